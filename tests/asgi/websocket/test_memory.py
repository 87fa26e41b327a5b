"""The memory used by the connections of one owner, and of all owners, is limited."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.exceptions import InvalidStatus

from responses_mw.asgi.websocket_memory import Block, Memory, Share, UnstoredChain
from responses_mw.errors import RateLimited
from tests.support.scripted import HELLO, Signal, text
from tests.support.servers import PATIENCE
from tests.support.websocket import UVICORN, opened

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours
    from tests.support.websocket import Socket


@pytest.fixture
def start_proxy(start_at: Callable[..., Ours]) -> Callable[..., Ours]:
    """Start a server for tests that do not depend on the mount."""
    return lambda **settings: start_at("proxy", uvicorn=UVICORN, **settings)


async def is_known(socket: Socket, response_id: str) -> bool:
    """Try to continue a response; return whether that succeeded."""
    await socket.create(previous_response_id=response_id, store=False, generate=False)
    return bool((await socket.events())[-1]["type"] == "response.completed")


async def test_the_memory_limit_of_an_owner_covers_all_its_connections(
    start_proxy: Callable[..., Ours], upstream: ScriptedUpstream
) -> None:
    ours = start_proxy(limits__memory_bytes=80_000)
    async with opened(ours) as first, opened(ours) as second, opened(ours, key="another's") as other:
        for _ in range(3):
            upstream.stream(*HELLO)
        foreign = await other.response("x" * 9_000, store=False)
        oldest = await first.response("x" * 9_000, store=False)
        newer = await second.response("x" * 9_000, store=False)
        for _ in range(2):
            upstream.stream(*HELLO)
        newest = await second.response("x" * 9_000, store=False)
        assert not await is_known(first, oldest["id"])
        assert await is_known(second, newest["id"])
        assert await is_known(other, foreign["id"])
        assert not await is_known(first, newer["id"])  # it belongs to the other connection


async def test_closing_a_connection_frees_its_memory(start_proxy: Callable[..., Ours], upstream: ScriptedUpstream) -> None:
    ours = start_proxy(limits__memory_bytes=60_000)
    for _ in range(8):
        async with opened(ours, key=f"{_}") as socket:
            upstream.stream(*HELLO)
            held = await socket.response("x" * 9_000, store=False)
            assert await is_known(socket, held["id"])


async def test_queued_requests_of_several_connections_count_together(
    start_proxy: Callable[..., Ours], upstream: ScriptedUpstream
) -> None:
    ours, held = start_proxy(limits__memory_bytes=80_000), Signal()
    async with opened(ours) as first, opened(ours) as second:
        for socket in (first, second):
            answer = upstream.stream(text("a"), held, *HELLO)
            await socket.create()
            await answer.asked.wait()
        await first.create("x" * 15_000)
        await second.create("x" * 15_000)
        while (event := await second.receive())["type"] != "error":
            pass
        assert (event["status"], event["error"]["code"]) == (429, "rate_limit_exceeded")
        upstream.stream(*HELLO)
        held.set()
        assert (await first.events())[-1]["type"] == "response.completed"
        assert (await first.events())[-1]["type"] == "response.completed"
        assert (await second.events())[-1]["type"] == "response.completed"
        upstream.stream(*HELLO)
        await second.response("x" * 15_000)


async def test_a_queued_request_frees_its_memory_when_it_begins(
    start_proxy: Callable[..., Ours], upstream: ScriptedUpstream
) -> None:
    ours = start_proxy(limits__memory_bytes=80_000)
    async with opened(ours) as socket:
        for _ in range(4):
            held = Signal()
            answer = upstream.stream(text("a"), held, *HELLO)
            upstream.stream(*HELLO)
            await socket.create()
            await answer.asked.wait()
            await socket.create("x" * 15_000)
            held.set()
            for _ in range(2):
                assert (await socket.events())[-1]["type"] == "response.completed"


async def queue_large_request(socket: Socket) -> None:
    """Queue a request that uses most of the memory. Repeat it until earlier connections have freed theirs."""
    async with asyncio.timeout(PATIENCE):
        while True:
            await socket.create("x" * 15_000)
            await socket.send(type="unknown")
            while (event := await socket.receive())["type"] != "error":
                pass
            if event["status"] == 400:
                return
            while (await socket.receive())["type"] != "error":
                pass
            await asyncio.sleep(0.02)


async def test_closing_a_connection_frees_the_memory_of_its_queued_requests(
    start_proxy: Callable[..., Ours], upstream: ScriptedUpstream
) -> None:
    ours = start_proxy(limits__memory_bytes=80_000)
    async with opened(ours) as other:  # its owner's share remains
        for _ in range(4):
            answer = upstream.stream(text("a"), Signal())
            async with opened(ours) as socket:
                await socket.create()
                await answer.asked.wait()
                await queue_large_request(socket)
            await answer.left.wait()
        answer = upstream.stream(text("a"), held := Signal(), *HELLO)
        await other.create()
        await answer.asked.wait()
        await queue_large_request(other)
        upstream.stream(*HELLO)
        held.set()
        for _ in range(2):
            assert (await other.events())[-1]["type"] == "response.completed"


async def test_queued_requests_are_not_decoded(start_proxy: Callable[..., Ours], upstream: ScriptedUpstream) -> None:
    ours, held = start_proxy(), Signal()
    async with opened(ours) as socket:
        answer = upstream.stream(text("a"), held, *HELLO)
        await socket.create()
        await answer.asked.wait()
        before = len(gc.get_objects())
        for _ in range(4):
            await socket.create(large=[[]] * 20_000)
        await socket.send(type="unknown")
        while (await socket.receive())["type"] != "error":
            pass
        assert len(gc.get_objects()) - before < 30_000  # the last frame may still be there
        for _ in range(4):
            upstream.stream(*HELLO)
        held.set()
        for _ in range(5):
            assert (await socket.events())[-1]["type"] == "response.completed"


async def test_small_values_are_counted_by_the_memory_they_use(
    start_proxy: Callable[..., Ours], upstream: ScriptedUpstream
) -> None:
    ours = start_proxy(limits__memory_bytes=400_000)
    message = {"type": "message", "role": "user", "content": "hi"}
    async with opened(ours) as socket:
        upstream.stream(*HELLO)
        small = await socket.response([{**message, "more": "x" * 10_000}], store=False)
        assert await is_known(socket, small["id"])
        upstream.stream(*HELLO)
        large = await socket.response([{**message, "more": [[]] * 3_000}], store=False)
        assert not await is_known(socket, large["id"])


async def test_the_number_of_connections_of_all_owners_is_limited(start_proxy: Callable[..., Ours]) -> None:
    ours = start_proxy(server__max_websockets=2)
    async with opened(ours, key="a"), opened(ours, key="b"):
        with pytest.raises(InvalidStatus) as caught:
            async with opened(ours, key="c"):
                pass
        assert caught.value.response.status_code == 503
        assert caught.value.response.headers["retry-after"] == "5"
    async with opened(ours, key="c") as socket:
        await socket.send(type="response.stop")
        await socket.receive()


# -- memory accounting -----------------------------------------------------------------------------------------------------


def chain(size: int, before: UnstoredChain | None = None) -> UnstoredChain:
    return UnstoredChain(tag="t", items=[], blocks=(*(before.blocks if before else ()), Block(size)))


def test_history_shared_by_several_responses_is_counted_once() -> None:
    share, known = Share(memory := Memory(owner_bytes=10_000, total_bytes=10_000)), set[str]()
    first = chain(4_000)
    share.hold("1", first, known)
    share.hold("2", second := chain(4_000, first), known)
    share.hold("3", chain(1_000, second), known)
    assert known == {"1", "2", "3"}
    assert 9_000 <= memory.size < 9_100
    share.evict("1")
    assert memory.size >= 9_000
    share.evict("3")
    assert 8_000 <= memory.size < 8_100
    share.evict("2")
    assert memory.size == 0


def test_an_owner_never_evicts_responses_of_another_owner() -> None:
    memory = Memory(owner_bytes=8_000, total_bytes=10_000)
    known: set[str] = set()
    with memory.share("a") as a, memory.share("b") as b:
        a.hold("a1", chain(7_000), known)
        b.hold("b1", chain(2_000), known)
        b.hold("b2", chain(5_000), known)  # it does not fit even if everything else of b is evicted
        assert known == {"a1", "b1"}
        with pytest.raises(RateLimited):
            b.enter(5_000)
        b.hold("b3", chain(2_000), known)
        assert known == {"a1", "b3"}


class Owner:
    """An owner, with the steps that it may apply to its share."""

    def __init__(self, memory: Memory) -> None:
        self.share = Share(memory)
        self.known: set[str] = set()
        self.waiting: list[int] = []

    def hold(self, number: int, size: int) -> None:
        self.share.hold(str(number), chain(size), self.known)

    def go_on(self, number: int, size: int) -> None:
        if self.known:
            self.share.hold(str(number), chain(size, self.share.get(min(self.known))), self.known)

    def evict(self, _number: int, _size: int) -> None:
        if self.known:
            self.share.evict(max(self.known))

    def enter(self, _number: int, size: int) -> None:
        with suppress(RateLimited):
            self.share.enter(size)
            self.waiting.append(size)

    def leave(self, _number: int, _size: int) -> None:
        if self.waiting:
            self.share.leave(self.waiting.pop())

    def end(self) -> None:
        for response_id in list(self.known):
            self.share.evict(response_id)
        for size in self.waiting:
            self.share.leave(size)


STEPS = [Owner.hold, Owner.go_on, Owner.evict, Owner.enter, Owner.leave]


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(STEPS), st.integers(0, 90))))
def test_the_memory_limits_hold_for_any_sequence_of_steps_and_all_memory_is_freed(steps: list[tuple[int, Any, int]]) -> None:
    memory = Memory(owner_bytes=60, total_bytes=100)
    owners = [Owner(memory) for _ in range(3)]
    for number, (owner, step, size) in enumerate(steps):
        step(owners[owner], number, size)
        assert memory.size <= 100
    for one in owners:
        one.end()
    assert memory.size == 0
