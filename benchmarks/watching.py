"""Runs the collector that observes a server, and provides the server's options for it."""

import contextlib
import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.processes import free_port, running


@dataclass(frozen=True, slots=True)
class Watched:
    """The options with which a server is started to be observed. By default, it is not observed."""

    flags: Sequence[str] = ()
    environment: Mapping[str, str] | None = None


@contextlib.contextmanager
def watching() -> Iterator[Watched]:
    """Run a collector. Raises `RuntimeError` on exit if it has no spans, metrics or scrapes: nothing was observed then."""
    admin = free_port()
    with running("benchmarks.collector", f"--scrape=http://127.0.0.1:{admin}/metrics") as collector:
        yield Watched([f"--server.admin-port={admin}"], {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url})
        with urllib.request.urlopen(collector.url) as answer:
            counts = json.load(answer)
        missing = [name for name in ("spans", "metrics", "scrapes") if not counts.get(name)]
        if missing:
            raise RuntimeError(f"the observed server was not observed: no {', '.join(missing)}")
