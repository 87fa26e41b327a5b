"""An OTLP receiver (HTTP, protobuf) that also scrapes the metrics of a server's admin port.

It decodes and counts what it receives, and returns the counts in response to GET. Run it with
`python -m benchmarks.collector --port 4318 --scrape http://127.0.0.1:9090/metrics`.
"""

import argparse
import contextlib
import json
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.processes import free_port, running

SCRAPE_SECONDS = 15
START_SECONDS = 1

COUNTS: Counter[str] = Counter()


class Receiver(BaseHTTPRequestHandler):
    """The handler of an exporter's connection."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Count the spans or metrics in an export request."""
        # Only the collector's process needs the extra "otel".
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/traces":
            traces = ExportTraceServiceRequest.FromString(body)
            COUNTS["spans"] += sum(len(scope.spans) for of in traces.resource_spans for scope in of.scope_spans)
        else:
            metrics = ExportMetricsServiceRequest.FromString(body)
            COUNTS["metrics"] += sum(len(scope.metrics) for of in metrics.resource_metrics for scope in of.scope_metrics)
        self._answer(b"", "application/x-protobuf")

    def do_GET(self) -> None:
        """Return the counts so far."""
        self._answer(json.dumps(COUNTS).encode(), "application/json")

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self, body: bytes, content_type: str) -> None:
        self.send_response(200)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def scrape(url: str) -> None:
    """Scrape the metrics at `url` every `SCRAPE_SECONDS`. Retry more often until the server has started."""
    while True:
        wait = START_SECONDS
        with contextlib.suppress(OSError), urllib.request.urlopen(url) as answer:
            answer.read()
            COUNTS["scrapes"] += 1
            wait = SCRAPE_SECONDS
        time.sleep(wait)


@dataclass(frozen=True, slots=True)
class Watched:
    """The flags and environment variables with which a server is observed. By default, it is not observed."""

    flags: Sequence[str] = ()
    environment: Mapping[str, str] | None = None


@contextlib.contextmanager
def watching() -> Iterator[Watched]:
    """Run a collector, and yield the options for a server to observe.

    On exit, raises `RuntimeError` if the collector has no spans, no metrics or no scrapes.
    """
    admin = free_port()
    with running("benchmarks.collector", f"--scrape=http://127.0.0.1:{admin}/metrics") as collector:
        yield Watched([f"--server.admin-port={admin}"], {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url})
        with urllib.request.urlopen(collector.url) as answer:
            counts = json.load(answer)
        missing = [name for name in ("spans", "metrics", "scrapes") if not counts.get(name)]
        if missing:
            raise RuntimeError(f"the collector has no {', '.join(missing)}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="An OTLP receiver that counts what it receives, and scrapes a server.")
    parser.add_argument("--port", type=int, default=4318)
    parser.add_argument("--scrape", metavar="URL", help="metrics to scrape")
    options = parser.parse_args()
    if options.scrape:
        threading.Thread(target=scrape, args=(options.scrape,), daemon=True).start()
    ThreadingHTTPServer(("127.0.0.1", options.port), Receiver).serve_forever()


if __name__ == "__main__":
    main()
