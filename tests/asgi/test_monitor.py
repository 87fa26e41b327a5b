"""Metrics that are measured in the background."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from responses_mw.asgi.admin import LAG_INTERVAL, Finding, monitoring
from tests.support.metrics import sample_value
from tests.support.scripted import HELLO, Signal, text
from tests.support.websocket import UVICORN, opened

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Start


def value(name: str, **labels: str) -> float:
    return sample_value(name, labels) or 0.0


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_the_health_of_the_upstream_is_measured() -> None:
    answers = [True]

    async def ask() -> Finding:
        return Finding("" if answers[0] else "It is away.")

    async def stay() -> Finding:
        return Finding()

    measured = {"monitored": ask, "other": stay}
    async with monitoring(None, measured):
        await until(lambda: value("responses_mw_upstream_up", upstream="monitored") == 1)
    answers[0] = False
    async with monitoring(None, measured):
        await until(lambda: value("responses_mw_upstream_up", upstream="monitored") == 0)
        await until(lambda: value("responses_mw_upstream_up", upstream="other") == 1)


async def test_a_blocked_event_loop_is_measured_as_lag() -> None:
    def lag() -> float:
        return value("responses_mw_event_loop_lag_seconds_sum")

    before = lag()
    async with monitoring(None, {}):
        await asyncio.sleep(0)  # the measurement begins
        time.sleep(LAG_INTERVAL + 0.3)  # noqa: ASYNC251 (it is to be held up)
        await until(lambda: lag() - before >= 0.29)


async def test_active_turns_and_open_websockets_are_counted(start_at: Start, upstream: ScriptedUpstream) -> None:
    turns, sockets = value("responses_mw_upstream_active_requests"), value("responses_mw_websockets_open")
    held, ours = Signal(), start_at("proxy", uvicorn=UVICORN)
    upstream.stream(text("a"), held, *HELLO)
    async with opened(ours) as socket:
        answering = asyncio.create_task(socket.response("hi"))
        await until(lambda: value("responses_mw_upstream_active_requests") == turns + 1)
        assert value("responses_mw_websockets_open") == sockets + 1
        held.set()
        await answering
        await until(lambda: value("responses_mw_upstream_active_requests") == turns)
    await until(lambda: value("responses_mw_websockets_open") == sockets)
