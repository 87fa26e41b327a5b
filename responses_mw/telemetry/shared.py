"""Metrics of several processes of one server, combined through the files of prometheus_client's multiprocess mode.

The mode is on if PROMETHEUS_MULTIPROC_DIR names a directory when the package is imported. The counts of processes that have
ended remain in the directory, so that no counter goes down.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import prometheus_client as prometheus
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

__all__ = ["DIRECTORY", "forget_process", "is_shared", "shared_registry"]

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"

_LIVE = re.compile(r"gauge_live[a-z]+_([0-9]+)\.db")


def is_shared() -> bool:
    """Return whether this process shares its metrics with other processes."""
    return DIRECTORY in os.environ


def forget_process(pid: int, directory: str) -> None:
    """Remove the gauges of a process that has ended."""
    mark_process_dead(pid, directory)  # type: ignore[no-untyped-call]


def shared_registry(own: prometheus.CollectorRegistry) -> prometheus.CollectorRegistry:
    """Return a registry with the metrics of all processes and the build information in `own`."""
    registry = prometheus.CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    registry.register(_Rest(own))
    return registry


class _Rest(Collector):
    """Metrics that are not in the files: build information, and the process metrics of all processes combined."""

    def __init__(self, own: prometheus.CollectorRegistry) -> None:
        self._own = own

    def collect(self) -> Iterator[Metric]:
        yield from (family for family in self._own.collect() if family.type == "info")
        yield from _summed(_processes())


def _processes() -> list[int]:
    names = (_LIVE.fullmatch(path.name) for path in Path(os.environ[DIRECTORY]).iterdir())
    return sorted({int(name[1]) for name in names if name is not None})


def _summed(processes: Iterable[int]) -> Iterable[Metric]:
    """Return the process metrics: sums over the processes, and the earliest start time."""
    families: dict[str, Metric] = {}
    for pid in processes:
        for family in prometheus.ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():  # type: ignore[misc]
            known = families.setdefault(family.name, family)
            if known is not family:
                [one], [other] = known.samples, family.samples
                value = min(one.value, other.value) if "start_time" in family.name else one.value + other.value
                known.samples = [one._replace(value=value)]
    return families.values()
