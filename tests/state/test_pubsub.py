"""Subscriptions survive restarts of Redis and lost connections, and clean up when they end."""

from __future__ import annotations

import asyncio
import gc
import signal
from typing import TYPE_CHECKING, Any

from benchmarks.processes import free_port
from responses_mw.state import State, connect, pubsub
from responses_mw.state.schema import stop_channel
from tests.state.hearing import assert_confirmed, assert_heard, subscriber_tasks

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tests.support.valkey import OpenState, Server

CHANNEL = stop_channel("w")


async def test_a_subscription_resumes_after_a_restart_of_redis(open_state: OpenState, start: Callable[..., Server]) -> None:
    server = start()
    state = open_state(server.url)
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    with state.wakeups.on(CHANNEL, messages.put_nowait):
        await assert_confirmed(messages)
        for number in range(3):
            server.kill()
            await asyncio.to_thread(server.start)
            await assert_confirmed(messages)
            await assert_heard(state, messages, "w", f"resp_{number}")


async def test_a_subscription_resumes_after_its_connection_is_killed(
    open_state: OpenState, start: Callable[..., Server]
) -> None:
    server = start()
    state = open_state(server.url)
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    with state.wakeups.on(CHANNEL, messages.put_nowait), server.client() as client:
        for number in range(5):
            await assert_confirmed(messages)
            await assert_heard(state, messages, "w", f"resp_{number}")
            assert client.client_kill_filter(_type="pubsub") == 1


async def test_a_subscription_reconnects_after_an_unanswered_ping(
    open_state: OpenState, start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pubsub, "SILENCE", 0.1)
    monkeypatch.setattr(pubsub, "ANSWER", 0.3)
    server = start()
    state = open_state(server.url)
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    with state.wakeups.on(CHANNEL, messages.put_nowait):
        await assert_confirmed(messages)
        await asyncio.sleep(0.5)  # time for some answered pings
        server.signal(signal.SIGSTOP)
        await asyncio.sleep(1)
        server.signal(signal.SIGCONT)
        await assert_heard(state, messages, "w", "resp_1")


async def test_resubscribing_to_a_channel_does_not_interrupt_other_channels(open_state: OpenState, valkey: Server) -> None:
    state = open_state(valkey.url)
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    heard: list[bytes] = []
    with state.wakeups.on(stop_channel("other"), heard.append):
        for _ in range(10):
            with state.wakeups.on(CHANNEL, messages.put_nowait):
                await assert_confirmed(messages)
        with state.wakeups.on(CHANNEL, messages.put_nowait):
            await asyncio.sleep(0.2)  # longer than the pause before a reconnection
            await assert_heard(state, messages, "w", "resp_1")
    assert heard == [b""]


async def test_a_connection_without_channels_is_closed_and_reopened_for_the_next_channel(
    open_state: OpenState, start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pubsub, "SILENCE", 0.1)
    server = start()
    state = open_state(server.url)
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    with server.client() as client:
        for number in range(2):
            with state.wakeups.on(CHANNEL, messages.put_nowait):
                await assert_confirmed(messages)
                await asyncio.sleep(0.3)  # longer than SILENCE
                await assert_heard(state, messages, "w", f"resp_{number}")
            async with asyncio.timeout(20):
                while client.client_list(_type="pubsub") or subscriber_tasks():
                    await asyncio.sleep(0.05)


async def test_messages_arrive_after_resubscribing_to_a_channel(open_state: OpenState, valkey: Server) -> None:
    state = open_state(valkey.url)
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    for pause in range(10):
        with state.wakeups.on(CHANNEL, lambda _: None):
            await asyncio.sleep(pause / 10_000)
    with state.wakeups.on(CHANNEL, messages.put_nowait):
        await assert_confirmed(messages)
        await assert_heard(state, messages, "w", "resp_1")


async def test_subscription_changes_do_not_accumulate_while_redis_is_unreachable(open_state: OpenState) -> None:
    state = open_state(f"redis://127.0.0.1:{free_port()}")
    with state.wakeups.on(CHANNEL, lambda _: None):
        for number in range(1000):
            with state.wakeups.on(f"rmw:{{a}}:ev:{number}", lambda _: None):
                pass
        async with asyncio.timeout(20):
            while state.wakeups.subscriber(CHANNEL.encode())._changes.qsize() > 0:
                await asyncio.sleep(0.01)


async def test_a_subscription_does_not_use_a_connection_of_the_pool(open_state: OpenState, valkey: Server) -> None:
    state = open_state(f"{valkey.url}?max_connections=1")
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    with state.wakeups.on(CHANNEL, messages.put_nowait):
        await assert_confirmed(messages)
        await asyncio.gather(*(state.jobs.tell("w", "resp_1") for _ in range(20)))  # one at a time


async def test_a_subscription_can_be_closed_while_its_connection_breaks(start: Callable[..., Server]) -> None:
    server = start()
    for steps in range(20):  # of the event loop between the end of the connection and the end of the subscription
        state = State(connect(server.url))
        messages: asyncio.Queue[bytes] = asyncio.Queue()
        with state.wakeups.on(CHANNEL, messages.put_nowait), server.client() as client:
            await assert_confirmed(messages)
            client.client_kill_filter(_type="pubsub")
            for _ in range(steps):
                await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await state.aclose()


def test_closing_a_subscription_while_it_connects_causes_no_errors(valkey: Server) -> None:
    faults: list[Any] = []

    async def subscribe(seconds: float, *, close: bool) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        state = State(connect(valkey.url))
        with state.wakeups.on("rmw:{a}:ev", lambda _: None):
            await asyncio.sleep(seconds)
        closing = asyncio.create_task(state.aclose())
        await asyncio.sleep(seconds)
        if close:
            await closing

    for number in range(60):
        asyncio.run(subscribe(number * 0.00005, close=number % 2 == 0))  # asyncio.run() cancels the remaining tasks
    gc.collect()
    assert faults == []
