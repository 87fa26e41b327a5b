"""Which processes of the deployment are running: servers and workers that report themselves every few seconds."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson

from ..tasks import in_background
from ..version import VERSION
from .client import Client
from .errors import StateUnavailable
from .schema import REPLICAS

logger = logging.getLogger(__name__)

INTERVAL = 10.0
EXPIRY = 35.0
"""Seconds after its last report for which a process is listed. A process that stops removes its report."""
MAX_BYTES = 16 * 1024  # maximum size of a report; a longer one has no further facts
MAX_LISTED = 1000

_TYPES: dict[str, Any] = {
    **dict.fromkeys(("name", "version", "worker"), str),
    **dict.fromkeys(("started", "reported", "running", "room"), (int, float)),
    **dict.fromkeys(("endpoints", "warnings", "tools"), list),
    "judge": dict,
}
"""The types of members of reports."""

Facts = Callable[[], dict[str, Any]]


def replica_name() -> str:
    """Return the name of this process: the name of the host or pod, and the process id."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}"


class Replicas:
    """The running processes. Each has a report with its `name`, `version`, `started`, `reported` and further facts."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sources: list[Facts] = []
        self._last = b""

    def describe(self, source: Facts) -> None:
        """Add the facts that `source` returns to the reports of this process."""
        self._sources.append(source)

    @asynccontextmanager
    async def reporting(self, name: str) -> AsyncIterator[None]:
        """Report this process as `name` until the context exits."""
        started = time.time()
        try:
            async with in_background(self._report(name, started)):
                yield
        finally:
            try:
                await self._client.command("ZREM", REPLICAS, self._last)
            except StateUnavailable as error:  # the report expires
                logger.debug("could not remove the report of this process: %s", error.message)

    async def _report(self, name: str, started: float) -> None:
        while True:
            try:
                await self.report(name, started)
            except StateUnavailable as error:
                logger.debug("could not report this process: %s", error.message)
            await asyncio.sleep(INTERVAL)

    async def report(self, name: str, started: float) -> None:
        """Write the report of this process, and remove its last report and expired ones."""
        now = time.time()
        report = {"name": name, "version": VERSION, "started": round(started), "reported": round(now, 3)}
        text = orjson.dumps({fact: value for source in self._sources for fact, value in source().items()} | report)
        if len(text) > MAX_BYTES:
            text = orjson.dumps(report)
        ms = int(now * 1000)
        removed, self._last = self._last, text
        await self._client.pipeline(
            [
                ("ZREM", REPLICAS, removed),
                ("ZADD", REPLICAS, ms, text),
                ("ZREMRANGEBYSCORE", REPLICAS, "-inf", ms - int(EXPIRY * 1000)),
                ("PEXPIRE", REPLICAS, int(EXPIRY * 1000)),
            ]
        )

    async def running(self) -> list[dict[str, Any]]:
        """Return the reports of the running processes by name. Raises StateUnavailable if Redis fails."""
        oldest = int((time.time() - EXPIRY) * 1000)
        found = await self._client.command("ZRANGEBYSCORE", REPLICAS, oldest, "+inf", "LIMIT", 0, MAX_LISTED)
        reports = [report for text in found if (report := _decoded(text)) is not None]
        return sorted({report["name"]: report for report in reports}.values(), key=lambda report: str(report["name"]))


def _decoded(text: bytes) -> dict[str, Any] | None:
    """Decode a report. Return None if it is damaged."""
    try:
        report = orjson.loads(text)
    except ValueError:
        return None
    is_complete = isinstance(report, dict) and all(name in report for name in ("name", "version", "started"))
    return (
        report if is_complete and all(isinstance(value, _TYPES.get(name, object)) for name, value in report.items()) else None
    )
