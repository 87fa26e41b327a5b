"""Redis unreachable, slow, full, read-only, killed and restarted: clear and timely errors, no partial writes, recovery."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import asynccontextmanager, suppress
from functools import partial
from hashlib import sha1
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from redis import RedisError

from benchmarks.processes import free_port
from responses_mw.ids import RunIds, new_tag, random_part
from responses_mw.lua import Script, load
from responses_mw.state import (
    Batch,
    Chain,
    Conversation,
    Deleted,
    Missing,
    State,
    StateOptions,
    StateUnavailable,
    connect,
    writes,
)
from responses_mw.state.client import Client
from responses_mw.state.schema import Address, conversation_key, response_address, turn_random
from tests.state.test_conversations import converse, listed, some_items
from tests.support.garbage import count_of, nothing_left
from tests.support.paths import ROOT
from tests.support.servers import PATIENCE
from tests.support.stored import ALICE, continued, everything, history, made, message, respond, turns
from tests.support.valkey import SURVIVES_A_KILL, wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.support.valkey import OpenState, Plain, Server

T = TypeVar("T")


@asynccontextmanager
async def opened(url: str, *, answers_in: float = 20.0, patience: float | None = 0.0) -> AsyncIterator[State]:
    """Open a state. If `patience` is None, it has the default."""
    client = connect(url, timeout=answers_in)
    state = State(client) if patience is None else State(client, StateOptions(patience=patience))
    try:
        yield state
    finally:
        await state.aclose()


def assert_whole(server: Plain) -> None:
    """Assert that every record has its turn, and that the refs of a segment list each of its turns."""
    for key in server.keys("*:r:*"):
        prefix, _, random = key.decode().rpartition("r:")
        segment, length = server.hmget(key, "segment", "length")
        turn = server.lindex(f"{prefix}s:{segment.decode()}", int(length) - 1)
        assert turn_random(turn) == random
        assert server.zscore(f"{prefix}s:{segment.decode()}:refs", f"r{random}") == int(length)
        assert server.pttl(key) > 0
    stored = [turn_random(turn) for segment in turns(server) for turn in server.lrange(segment, 0, -1)]
    assert len(stored) == len(set(stored)) == len(server.keys("*:r:*"))


async def test_a_refused_connection_is_unavailable_immediately() -> None:
    async with opened(f"redis://127.0.0.1:{free_port()}") as state:
        before = time.monotonic()
        for asking in (
            state.responses.get("resp_" + "a" * 50, ALICE),
            state.responses.chain("resp_" + "a" * 50, ALICE),
            state.responses.delete("resp_" + "a" * 50, ALICE),
            state.conversations.get("conv_" + "a" * 25, ALICE),
            respond(state, Chain.new(), "x"),
            state.check(),
            state.nearly_full(),
        ):
            with pytest.raises(StateUnavailable) as away:
                await asking
            assert (away.value.status, away.value.reason) == (503, "it cannot be reached: the connection was refused")
            assert int(away.value.headers["retry-after"]) >= 1
        assert time.monotonic() - before < 10


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("LOADING Redis is loading the dataset in memory", "it is loading its data"),
        ("READONLY You can't write against a read only replica.", "it is read-only"),
        ("OOM command not allowed when used memory > 'maxmemory'.", "its memory is full"),
        ("NOPERM this user has no permissions", "our user lacks permission for a command"),
        ("WRONGPASS invalid username-password pair", "it refused our credentials"),
        ("CLUSTERDOWN The cluster is down", "the cluster is down"),
        ("MOVED 1234 127.0.0.1:1", "it is a cluster (use redis+cluster://)"),
        ("BUSY Redis is busy running a script.", "it refused a command (BUSY)"),
        ("NOREPLICAS Not enough good replicas to write.", "it refused a command (NOREPLICAS)"),
        ("MISCONF Errors writing to the AOF file: No space left on device", "it refused a command (MISCONF)"),
        ("ERR unknown command 'FCALL'", "it refused a command"),
        ("ERR max number of clients reached", "it cannot be reached"),
        ("ERR DB index is out of range", "it has no database with the number in redis.url"),
    ],
)
async def test_every_error_of_redis_is_unavailable_with_its_reason(error: str, reason: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while head := await reader.readline():
                command = [await reader.readline() for _ in range(2 * int(head[1:]))]
                writer.write(b"+OK\r\n" if command[1] == b"CLIENT\r\n" else f"-{error}\r\n".encode())
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server, opened(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}") as state:
        with pytest.raises(StateUnavailable) as refused:
            await respond(state, Chain.new(), "x")
        assert refused.value.reason == reason


async def test_calls_to_a_redis_that_hangs_fail_after_their_timeout(
    start: Callable[..., Server],
) -> None:
    server = start()
    async with opened(server.url) as state, opened(server.url, answers_in=0.3, patience=0.5) as hasty:
        first = await respond(state, Chain.new(), "one")
        server.signal(signal.SIGSTOP)
        before = time.monotonic()
        asked = [hasty.responses.get(first, ALICE), hasty.responses.chain(first, ALICE), respond(hasty, Chain.new(), "x")]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [getattr(answer, "reason", answer) for answer in answers] == ["it did not answer in time"] * 3
        assert time.monotonic() - before < 10
        server.signal(signal.SIGCONT)
        assert await history(state, await continued(state, first, "two")) == ["one", "one!", "two", "two!"]


async def test_a_commit_during_a_stall_of_redis_is_stored_once(start: Callable[..., Server]) -> None:
    server = start()
    async with opened(server.url) as state, opened(server.url, answers_in=0.2, patience=20) as hasty:
        parent = await respond(state, Chain.new(), "one")
        chain = await state.responses.chain(parent, ALICE)
        server.signal(signal.SIGSTOP)
        storing = asyncio.create_task(respond(hasty, chain, "two"))
        await asyncio.sleep(1.5)
        server.signal(signal.SIGCONT)
        assert await history(state, await storing) == ["one", "one!", "two", "two!"]
        with server.client() as client:
            assert list(turns(client).values()) == [2]
            assert_whole(client)


async def test_all_commits_during_a_stall_longer_than_the_timeout_are_stored(start: Callable[..., Server]) -> None:
    server = start()
    async with opened(server.url, patience=60) as state, opened(server.url, answers_in=0.5, patience=None) as ours:
        await respond(state, Chain.new(), "loads the script")
        server.signal(signal.SIGSTOP)
        storing = []
        for number in range(57):
            storing.append(asyncio.create_task(respond(ours, Chain.new(), f"{number}")))
            await asyncio.sleep(0.03)
        await asyncio.sleep(1.0)
        server.signal(signal.SIGCONT)
        stored = await asyncio.gather(*storing, return_exceptions=True)
        assert [end for end in stored if isinstance(end, BaseException)] == []
        for number, response in enumerate(stored):
            assert await history(state, str(response)) == [f"{number}", f"{number}!"]


async def test_a_commit_abandoned_during_a_stall_is_undone(start: Callable[..., Server]) -> None:
    server = start()
    async with opened(server.url) as state, opened(server.url, answers_in=0.3, patience=0.3) as hasty:
        conversation_id = await converse(state, "one")
        chain = await state.conversations.chain(conversation_id, ALICE)
        document, given = made(chain, "two")
        token = random_part()
        server.signal(signal.SIGSTOP)
        with pytest.raises(StateUnavailable):
            await hasty.responses.commit(chain, document, given, ALICE, token)
        server.signal(signal.SIGCONT)
        with server.client() as client:
            async with asyncio.timeout(60):
                while not client.keys("*:x:*"):
                    await asyncio.sleep(0.02)
        with pytest.raises(Deleted):  # the same commit, as if it arrived only now
            await state.responses.commit(chain, document, given, ALICE, token)
        with pytest.raises(Missing):
            await state.responses.get(document["id"], ALICE)
        assert await listed(state, conversation_id) == ["one"]


async def test_writes_that_wait_to_be_undone_release_the_memory_of_their_texts(start: Callable[..., Server]) -> None:
    server = start()
    code = (  # in its own process, because pytest keeps log records with their errors
        "import asyncio, gc, sys, tracemalloc\n"
        "from contextlib import suppress\n"
        "from secrets import token_hex\n"
        "from responses_mw.state import Chain, State, StateOptions, StateUnavailable, connect\n"
        "from tests.support.stored import respond\n"
        "async def main():\n"
        "    state = State(connect(sys.argv[1], timeout=0.3), StateOptions(patience=0.3))\n"
        "    tracemalloc.start()\n"
        "    for _ in range(4):\n"
        "        with suppress(StateUnavailable):\n"
        "            await respond(state, Chain.new(), token_hex(2_000_000))\n"
        "    gc.collect()\n"
        "    print(tracemalloc.get_traced_memory()[0])\n"
        "asyncio.run(main())\n"
    )
    server.signal(signal.SIGSTOP)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, server.url, stdout=-1, cwd=ROOT)
    output, _ = await process.communicate()
    server.signal(signal.SIGCONT)
    assert int(output) < 12_000_000  # the compressing threads may still hold their last texts


async def test_undoing_a_commit_does_not_remove_a_response_committed_with_another_token(start: Callable[..., Server]) -> None:
    server = start()
    async with opened(server.url) as state, opened(server.url, answers_in=0.3, patience=0.3) as hasty:
        document, given = made(Chain.new(), "one")
        await state.responses.commit(Chain.new(), document, given, ALICE, "first")
        server.signal(signal.SIGSTOP)
        with pytest.raises(StateUnavailable):
            await hasty.responses.commit(Chain.new(), document, given, ALICE, "second")
        server.signal(signal.SIGCONT)
        other = await patiently(lambda: respond(hasty, Chain.new(), "another"))
        await hasty.writer.aclose()
        assert await history(state, document["id"]) == ["one", "one!"]
        assert await history(state, other) == ["another", "another!"]


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `ask`, which is called again until Redis answers in time."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(StateUnavailable):
                return await ask()
            await asyncio.sleep(0.02)


async def test_after_a_timeout_calls_fail_immediately_until_redis_responds_again(start: Callable[..., Server]) -> None:
    server = start()
    async with opened(server.url, answers_in=1.5) as state:
        response = await respond(state, Chain.new(), "one")
        server.signal(signal.SIGSTOP)
        with pytest.raises(StateUnavailable):
            await state.responses.get(response, ALICE)
        before = time.monotonic()
        for _ in range(20):
            with pytest.raises(StateUnavailable, match="did not answer in time"):
                await state.responses.get(response, ALICE)
        assert time.monotonic() - before < 10  # instead of 30
        server.signal(signal.SIGCONT)
        assert (await patiently(lambda: state.responses.get(response, ALICE))).document["id"] == response


async def test_a_slow_command_does_not_make_other_commands_fail(
    monkeypatch: pytest.MonkeyPatch, open_state: OpenState, valkey: Server, server: Plain
) -> None:
    monkeypatch.setattr("responses_mw.state.client.FIRST_PROBE", 60.0)  # a busy machine may answer the first probe late
    state = open_state(valkey.url)

    async def block() -> list[Any]:
        async with asyncio.timeout(0.05):  # less than the timeout of the client, which others need
            return [await state.client.redis.blpop("rmw:none", 60)]

    response = await respond(state, Chain.new(), "one")
    for _ in range(3):
        with pytest.raises(StateUnavailable, match="did not answer in time"):
            await state.client.round_trip(block, "BLPOP")
        assert (await state.responses.get(response, ALICE)).document["id"] == response


async def test_conversation_writes_during_a_stall_of_redis_are_stored_once(start: Callable[..., Server]) -> None:
    server = start()
    async with opened(server.url) as state, opened(server.url, answers_in=0.2, patience=20) as hasty:
        conversation_id = await converse(state, "one")
        server.signal(signal.SIGSTOP)
        storing = asyncio.create_task(hasty.conversations.append(conversation_id, some_items(conversation_id, "two"), ALICE))
        creating = asyncio.create_task(converse(hasty, "another"))
        await asyncio.sleep(1.0)
        server.signal(signal.SIGCONT)
        await storing
        assert await listed(state, conversation_id) == ["one", "two"]
        assert await listed(state, await creating) == ["another"]


async def test_conversation_writes_abandoned_during_a_stall_are_undone(start: Callable[..., Server]) -> None:
    server = start()
    async with opened(server.url) as state, opened(server.url, answers_in=0.3, patience=0.3) as hasty:
        conversation_id = await converse(state, "one")
        ids, new = RunIds(conversation_id.removeprefix("conv_")), Conversation(f"conv_{new_tag()}", 1, {})
        server.signal(signal.SIGSTOP)
        given_up = await asyncio.gather(
            hasty.conversations.append(conversation_id, [message(ids.item("msg"), "user", "two")], ALICE, ids.random),
            hasty.conversations.create(new, some_items(new.id, "another"), ALICE),
            return_exceptions=True,
        )
        assert [type(error) for error in given_up] == [StateUnavailable] * 2
        server.signal(signal.SIGCONT)
        with server.client() as client:
            async with asyncio.timeout(60):
                while len(client.keys("*:x:*")) < 2:
                    await asyncio.sleep(0.02)
        assert await listed(state, conversation_id) == ["one"]
        with pytest.raises(Missing):
            await state.conversations.get(new.id, ALICE)
        assert server_keys(server, new.id) == 1  # the tombstone
        with server.client() as client:
            [tombstone] = client.keys(f"rmw:{{{new.id.removeprefix('conv_')}}}:*")
            assert writes.UNDONE_SECONDS - 300 < client.ttl(tombstone) <= writes.UNDONE_SECONDS


async def test_a_conversation_write_that_arrives_after_its_undo_has_no_effect(start: Callable[..., Server]) -> None:
    server = start()
    async with opened(server.url) as state:
        conversation_id, new = await converse(state, "one"), f"conv_{new_tag()}"
        writes: list[tuple[str, str, list[str | bytes | int]]] = [
            (conversation_id.removeprefix("conv_"), "conversation_append", [ALICE, 10_000, 10, 10_000, "msg_x", b"J{}"]),
            (new.removeprefix("conv_"), "conversation_create", [ALICE, 1, b"{}", 10_000, 10, 10_000]),
        ]
        for tag, script, args in writes:
            keys, whole = [conversation_key(tag), Address(tag, "late").tombstone], "1" if "create" in script else ""
            await state.client.script(load("state", "conversation_undo")[0], keys, [ALICE, 10_000, whole])
            assert await state.client.script(load("state", script)[0], keys, args) == [b"missing"]
        assert await listed(state, conversation_id) == ["one"]
        assert server_keys(server, new) == 1


def server_keys(server: Server, conversation_id: str) -> int:
    """Return the number of keys of the conversation on the server."""
    with server.client() as client:
        return len(client.keys(f"rmw:{{{conversation_id.removeprefix('conv_')}}}:*"))


async def test_commits_fail_without_waiting_once_redis_has_been_unreachable_for_the_patience() -> None:
    async with opened(f"redis://127.0.0.1:{free_port()}", patience=3) as state:
        with pytest.raises(StateUnavailable):
            await respond(state, Chain.new(), "waits")
        before = time.monotonic()
        with pytest.raises(StateUnavailable):
            await respond(state, Chain.new(), "does not")
        assert time.monotonic() - before < 2.5


async def test_a_commit_that_fails_while_reads_succeed_ends_after_its_patience(start: Callable[..., Server]) -> None:
    server = start()
    async with opened(server.url, patience=0.3) as state:
        first = await respond(state, Chain.new(), "one")
        with server.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", free_port())  # reads still succeed
        storing = asyncio.create_task(respond(state, Chain.new(), "two"))
        async with asyncio.timeout(60):
            while not storing.done():
                await state.responses.get(first, ALICE)
        with pytest.raises(StateUnavailable, match="read-only"):
            await storing


async def test_only_the_first_commits_wait_while_redis_refuses_writes(start: Callable[..., Server]) -> None:
    server = start()
    async with opened(server.url, patience=2) as state:
        with server.client() as client:
            client.config_set("min-replicas-to-write", 1)
            with pytest.raises(StateUnavailable):
                await respond(state, Chain.new(), "one")
            await state.check()
            before = time.monotonic()
            with pytest.raises(StateUnavailable):
                await respond(state, Chain.new(), "two")
            assert time.monotonic() - before < 1.5
            client.config_set("min-replicas-to-write", 0)
        await respond(state, Chain.new(), "three")


async def test_a_long_refusal_of_writes_delays_only_the_first_write(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "FORGOTTEN_AFTER", 3.0)
    server = start()
    async with opened(server.url, patience=0.5) as state:
        with server.client() as client:
            client.config_set("min-replicas-to-write", 1)
            counts = []
            began = time.monotonic()
            while time.monotonic() < began + 5.0:
                with pytest.raises(StateUnavailable):
                    await state.jobs.create(made(Chain.new(), "one")[0], {}, [], ALICE, "sealed", Batch(0, 0, b"data: 0\n\n"))
                counts.append(int(client.info("errorstats")["errorstat_NOREPLICAS"]["count"]))
                await state.check()
                await asyncio.sleep(0.1)
        assert {after - before for before, after in pairwise(counts)} == {1}


async def test_an_old_write_error_does_not_shorten_the_wait_of_a_commit(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "FORGOTTEN_AFTER", 0.1)
    server = start()
    async with opened(server.url, patience=3) as state:
        with server.client() as client:
            client.config_set("min-replicas-to-write", 1)
            document, _ = made(Chain.new(), "one")
            with pytest.raises(StateUnavailable):  # this write is not undone, so no later write succeeds
                await state.jobs.create(document, {}, [], ALICE, "sealed", Batch(0, 0, b"data: 0\n\n"))
            await asyncio.sleep(0.2)
            await state.check()
            storing = asyncio.create_task(respond(state, Chain.new(), "two"))
            before = client.info("errorstats")["errorstat_NOREPLICAS"]
            while client.info("errorstats")["errorstat_NOREPLICAS"] == before:
                await asyncio.sleep(0.01)
            client.config_set("min-replicas-to-write", 0)
        assert await history(state, await storing) == ["two", "two!"]


async def test_a_commit_waits_until_redis_has_its_required_replicas(start: Callable[..., Server]) -> None:
    server = start()
    async with opened(server.url, patience=20) as state:
        with server.client() as client:
            client.config_set("min-replicas-to-write", 1)
            storing = asyncio.create_task(respond(state, Chain.new(), "one"))
            while "errorstat_NOREPLICAS" not in client.info("errorstats"):
                await asyncio.sleep(0.01)
            client.config_set("min-replicas-to-write", 0)
        assert await history(state, await storing) == ["one", "one!"]


async def test_a_commit_waits_for_the_restart_of_redis(start: Callable[..., Server]) -> None:
    server = start(*SURVIVES_A_KILL)
    async with opened(server.url, patience=20) as state:
        parent = await respond(state, Chain.new(), "one")
        chain = await state.responses.chain(parent, ALICE)
        server.kill()
        storing = asyncio.create_task(respond(state, chain, "two"))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.start)
        assert await history(state, await storing) == ["one", "one!", "two", "two!"]


async def test_acknowledged_responses_survive_a_kill_and_restart_of_redis(
    start: Callable[..., Server],
) -> None:
    server = start(*SURVIVES_A_KILL)
    acknowledged: dict[str, str] = {}

    async def storing(state: State, name: int) -> None:
        tip = await respond(state, Chain.new(), f"{name}")
        for number in range(1000):
            acknowledged[tip] = f"{name}" if number == 0 else f"{name}.{number}"
            tip = await continued(state, tip, f"{name}.{number + 1}")

    async with opened(server.url) as state:
        runs = [asyncio.create_task(storing(state, name)) for name in range(8)]
        await asyncio.sleep(0.5)
        server.kill()
        ends = await asyncio.gather(*runs, return_exceptions=True)
        assert all(isinstance(end, StateUnavailable) for end in ends)
        server.start()
        assert len(acknowledged) > 8
        for response, text in acknowledged.items():
            stored = await state.responses.get(response, ALICE)
            assert stored.input[0]["content"][0]["text"] == text
        with server.client() as client:
            assert_whole(client)


async def test_a_killed_process_leaves_no_partial_write(start: Callable[..., Server]) -> None:
    server = start()
    code = (
        "import asyncio, sys\n"
        "from responses_mw.state import Chain, State, connect\n"
        "from tests.support.stored import respond, continued\n"
        "async def main():\n"
        "    state = State(connect(sys.argv[1]))\n"
        "    async def run():\n"
        "        tip = await respond(state, Chain.new(), 'x' * 20_000)\n"
        "        while True:\n"
        "            print(tip, flush=True)\n"
        "            await asyncio.gather(*(continued(state, tip, 'fork') for _ in range(2)))\n"
        "            tip = await continued(state, tip, 'y' * 20_000)\n"
        "    await asyncio.gather(*(run() for _ in range(8)))\n"
        "asyncio.run(main())\n"
    )
    with server.client() as client:
        for _ in range(3):
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, server.url, stdout=-1, cwd=ROOT)
            assert process.stdout is not None
            tips = [(await process.stdout.readline()).decode().strip() for _ in range(30)]
            process.kill()
            await process.communicate()
            assert_whole(client)
            async with opened(server.url) as state:
                assert [len(await history(state, tip)) for tip in tips]


async def test_a_full_redis_refuses_a_whole_commit_and_allows_deletion(start: Callable[..., Server]) -> None:
    server = start("--maxmemory-policy", "noeviction")
    async with opened(server.url) as state:
        tip = await respond(state, Chain.new(), "one")
        fork = await continued(state, tip, "two")
        with server.client() as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
            before = everything(client)
            with pytest.raises(StateUnavailable) as refused:
                await continued(state, tip, "three")
            assert refused.value.reason == "its memory is full"
            assert everything(client) == before
            assert await history(state, fork) == ["one", "one!", "two", "two!"]
            await state.responses.delete(fork, ALICE)
            assert_whole(client)
            client.config_set("maxmemory", 0)
        assert await history(state, await continued(state, tip, "three")) == ["one", "one!", "three", "three!"]


async def test_nearly_full_is_true_before_the_memory_of_redis_is_full(start: Callable[..., Server]) -> None:
    server = start()
    async with opened(server.url) as state:
        assert not await state.nearly_full()
    with server.client() as client:
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] * 1.05))
    async with opened(server.url) as state:
        assert await state.nearly_full()
        server.kill()
        assert await state.nearly_full()  # the result is cached


async def test_a_redis_that_became_a_replica_refuses_writes(start: Callable[..., Server]) -> None:
    server = start()
    async with opened(server.url) as state:
        response = await respond(state, Chain.new(), "one")
        with server.client() as client:
            client.replicaof("127.0.0.1", free_port())
            with pytest.raises(StateUnavailable) as refused:
                await continued(state, response, "two")
            assert refused.value.reason == "it is read-only"
            assert (await state.check()).errors == ("The server is a replica: nothing can be written to it.",)
            client.replicaof("NO", "ONE")
        assert await history(state, await continued(state, response, "two")) == ["one", "one!", "two", "two!"]


async def test_connections_move_to_the_new_primary_after_a_failover_behind_one_address(start: Callable[..., Server]) -> None:
    old, new = start(), start()
    async with wire(old.port) as line, opened(line.url, patience=20) as busy, opened(line.url) as idle:
        await respond(busy, Chain.new(), "one")
        await idle.check()
        line.port = new.port  # only new connections lead to the new primary
        with old.client() as client:
            client.replicaof("127.0.0.1", new.port)
        await respond(busy, Chain.new(), "two")
        assert (await idle.check()).errors == ("The server is a replica: nothing can be written to it.",)
        assert (await idle.check()).errors == ()


@pytest.mark.parametrize("count", [1, 2])
async def test_a_failed_lease_renewal_moves_the_connection_to_the_new_primary(start: Callable[..., Server], count: int) -> None:
    old, new = start(), start()
    held = [(RunIds(new_tag()).response, "token") for _ in range(count)]
    async with wire(old.port) as line, opened(line.url) as state:
        for server in (old, new):
            with server.client() as client:
                for job, token in held:
                    client.hset(response_address(job).record, mapping={"v": 1, "status": "in_progress", "token": token})
        assert await state.jobs.renew(held, 60) == [True] * count
        line.port = new.port  # only new connections lead to the new primary
        with old.client() as client:
            client.replicaof("127.0.0.1", new.port)
        assert await state.jobs.renew(held, 60) == [None] * count
        assert await state.jobs.renew(held, 60) == [True] * count


async def test_scripts_are_loaded_again_after_a_script_flush(state: State, server: Plain) -> None:
    response = await respond(state, Chain.new(), "one")
    server.script_flush()
    assert await history(state, await continued(state, response, "two")) == ["one", "one!", "two", "two!"]


async def test_requests_wait_for_a_free_connection(open_state: OpenState, valkey: Server, server: Plain) -> None:
    state = open_state(valkey.url, max_connections=3)
    connected = server.info("clients")["connected_clients"]
    responses = await asyncio.gather(*(respond(state, Chain.new(), str(number)) for number in range(100)))
    assert len(set(responses)) == 100
    assert server.info("clients")["connected_clients"] <= connected + 3


async def test_a_connection_stays_usable_after_a_cancelled_request(open_state: OpenState, valkey: Server) -> None:
    small = open_state(valkey.url, max_connections=1)
    first = await respond(small, Chain.new(), "one")
    second = await respond(small, Chain.new(), "two")
    for _ in range(20):
        reading = asyncio.create_task(small.responses.get(first, ALICE))
        await asyncio.sleep(0)
        await asyncio.sleep(0.0002)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert (await small.responses.get(second, ALICE)).document["id"] == second


async def test_a_cancelled_commit_can_be_repeated(state: State, server: Plain) -> None:
    document, given = made(Chain.new(), "one")
    token = random_part()
    for _ in range(5):
        storing = asyncio.create_task(state.responses.commit(Chain.new(), document, given, ALICE, token))
        await asyncio.sleep(0.0003)
        storing.cancel()
        await asyncio.gather(storing, return_exceptions=True)
    await state.responses.commit(Chain.new(), document, given, ALICE, token)
    assert list(turns(server).values()) == [1]
    assert_whole(server)


async def test_an_error_within_a_pipeline_leaves_no_unread_reply(open_state: OpenState, valkey: Server) -> None:
    client = open_state(valkey.url, max_connections=1).client
    key = f"{{{random_part()}}}"
    for _ in range(3):
        with pytest.raises(StateUnavailable):
            await client.pipeline([("SET", key, "a"), ("HGET", key, "b"), ("EVALSHA", "0" * 40, 0), ("STRLEN", key)])
        assert await client.pipeline([("GET", key), ("STRLEN", key)]) == [b"a", 1]


async def assert_failures_leave_nothing(client: Client) -> None:
    """Run scripts that the server does not know, that fail and that find a damaged key, and check that all errors are freed."""
    key = f"{{{random_part()}}}"
    with suppress(StateUnavailable):
        await client.command("SET", key, "a")
    texts = ("return 1", "return redis.call('GET')", "return redis.call('HGET', KEYS[1], 'a')")
    async with nothing_left(partial(count_of, RedisError, StateUnavailable)):
        for line, count, contained in product(texts, (1, 2), (False, True)):
            text = f"{line} -- {key} {count} {contained}"
            script = Script("any", text, sha1(text.encode()).hexdigest())
            with suppress(StateUnavailable):
                await client.scripts(script, [([key], [])] * count, contained=contained)


async def test_failed_scripts_leave_nothing_to_the_garbage_collector(open_state: OpenState, valkey: Server) -> None:
    await assert_failures_leave_nothing(open_state(valkey.url).client)
    await assert_failures_leave_nothing(open_state(f"redis://127.0.0.1:{free_port()}").client)


async def test_a_connection_is_returned_to_the_pool_after_use(open_state: OpenState, valkey: Server) -> None:
    client = open_state(f"{valkey.url}?max_connections=1").client
    for _ in range(3):
        assert await client.command("PING")
        assert "redis_version" in await client.round_trip(client.redis.info, "INFO")


class Delays:
    """A relay to a server. It delays each request of a connection by `seconds`, or discards what is sent on lost connections."""

    def __init__(self, port: int, seconds: float = 0.0) -> None:
        self._port = port
        self._seconds = seconds
        self._lost: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self.sent_in_vain = 0
        self.url = ""

    def lose_connections(self) -> None:
        """Discard everything that is sent on the connections that are open now."""
        self._lost |= self._open

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upward, downward = await asyncio.open_connection("127.0.0.1", self._port)
        self._open.add(writer)

        async def ask() -> None:
            while data := await reader.read(1 << 16):
                self.sent_in_vain += writer in self._lost
                await asyncio.sleep(self._seconds)
                if writer not in self._lost:
                    downward.write(data)

        asking = asyncio.create_task(ask())
        asking.add_done_callback(lambda _: downward.close())
        with suppress(ConnectionError, asyncio.CancelledError):
            while data := await upward.read(1 << 16):
                writer.write(data)
        asking.cancel()
        writer.close()


@asynccontextmanager
async def relayed(port: int, seconds: float = 0.0) -> AsyncIterator[Delays]:
    relay = Delays(port, seconds)
    server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    async with server:
        relay.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield relay


async def test_the_login_of_a_connection_does_not_shorten_the_time_of_its_first_command(valkey: Server) -> None:
    async with relayed(valkey.port, 1.0) as relay, opened(relay.url, answers_in=1.8) as state:
        began = time.monotonic()
        await state.client.command("PING")
        assert time.monotonic() - began > 1.8


async def test_idle_connections_that_were_lost_silently_cost_one_timeout(valkey: Server) -> None:
    async with relayed(valkey.port) as relay, opened(relay.url, answers_in=1.0) as state:
        await asyncio.gather(*(state.client.command("PING") for _ in range(8)))
        relay.lose_connections()
        with pytest.raises(StateUnavailable, match="did not answer in time"):
            await state.client.command("PING")
        async with asyncio.timeout(60):
            while state.client.away_for:
                with suppress(StateUnavailable):
                    await state.client.command("PING")
                await asyncio.sleep(0.01)
        await asyncio.gather(*(state.client.command("PING") for _ in range(8)))
        assert relay.sent_in_vain == 2  # the command, and the first probe
