"""Subscriptions survive what happens to Redis and to its connections, and leave nothing behind when they end."""

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


async def test_a_subscription_goes_on_when_redis_is_restarted(open_state: OpenState, start: Callable[..., Server]) -> None:
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


async def test_a_subscription_goes_on_when_its_connection_is_killed(
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


async def test_a_server_that_answers_no_ping_is_given_up_and_followed_again(
    open_state: OpenState, start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pubsub, "SILENCE", 0.1)
    monkeypatch.setattr(pubsub, "ANSWER", 0.3)
    server = start()
    state = open_state(server.url)
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    with state.wakeups.on(CHANNEL, messages.put_nowait):
        await assert_confirmed(messages)
        await asyncio.sleep(0.5)  # some pings, all of them answered
        server.signal(signal.SIGSTOP)
        await asyncio.sleep(1)
        server.signal(signal.SIGCONT)
        await assert_heard(state, messages, "w", "resp_1")


async def test_a_channel_that_is_left_and_joined_again_at_once_does_not_interrupt_others(
    open_state: OpenState, valkey: Server
) -> None:
    state = open_state(valkey.url)
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    heard: list[bytes] = []
    with state.wakeups.on(stop_channel("other"), heard.append):
        for _ in range(10):
            with state.wakeups.on(CHANNEL, messages.put_nowait):
                await assert_confirmed(messages)
        with state.wakeups.on(CHANNEL, messages.put_nowait):
            await asyncio.sleep(0.2)  # longer than the pause before a new connection
            await assert_heard(state, messages, "w", "resp_1")
    assert heard == [b""]


async def test_a_connection_without_channels_is_closed_and_opened_again_for_the_next(
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
                await asyncio.sleep(0.3)  # longer than the silence
                await assert_heard(state, messages, "w", f"resp_{number}")
            async with asyncio.timeout(20):
                while client.client_list(_type="pubsub") or subscriber_tasks():
                    await asyncio.sleep(0.05)


async def test_a_channel_that_is_left_and_joined_again_at_once_is_heard(open_state: OpenState, valkey: Server) -> None:
    state = open_state(valkey.url)
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    for pause in range(10):
        with state.wakeups.on(CHANNEL, lambda _: None):
            await asyncio.sleep(pause / 10_000)
    with state.wakeups.on(CHANNEL, messages.put_nowait):
        await assert_confirmed(messages)
        await assert_heard(state, messages, "w", "resp_1")


async def test_channels_that_come_and_go_do_not_pile_up_while_redis_is_away(open_state: OpenState) -> None:
    state = open_state(f"redis://127.0.0.1:{free_port()}")
    with state.wakeups.on(CHANNEL, lambda _: None):
        for number in range(1000):
            with state.wakeups.on(f"rmw:{{a}}:ev:{number}", lambda _: None):
                pass
        async with asyncio.timeout(20):
            while state.wakeups.subscriber(CHANNEL.encode())._changes.qsize() > 0:
                await asyncio.sleep(0.01)


async def test_a_subscription_takes_no_connection_from_commands(open_state: OpenState, valkey: Server) -> None:
    state = open_state(f"{valkey.url}?max_connections=1")
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    with state.wakeups.on(CHANNEL, messages.put_nowait):
        await assert_confirmed(messages)
        await asyncio.gather(*(state.jobs.tell("w", "resp_1") for _ in range(20)))  # one after the other


async def test_a_subscription_ends_while_its_connection_breaks(start: Callable[..., Server]) -> None:
    server = start()
    for steps in range(20):  # of the loop, between the end of the connection and that of the subscription
        state = State(connect(server.url))
        messages: asyncio.Queue[bytes] = asyncio.Queue()
        with state.wakeups.on(CHANNEL, messages.put_nowait), server.client() as client:
            await assert_confirmed(messages)
            client.client_kill_filter(_type="pubsub")
            for _ in range(steps):
                await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await state.aclose()


def test_a_subscription_that_ends_while_it_connects_leaves_nothing_behind(valkey: Server) -> None:
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
        asyncio.run(subscribe(number * 0.00005, close=number % 2 == 0))  # what goes on still is cancelled at its end
    gc.collect()
    assert faults == []
