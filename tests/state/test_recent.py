"""The index of recent responses."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from responses_mw.errors import BadRequest
from responses_mw.ids import RunIds
from responses_mw.state.recent import ALL, FAILED, Position, RecentFilter, read_ends
from responses_mw.state.schema import RECENT_SHARDS, recent_key

if TYPE_CHECKING:
    from responses_mw.state import State
    from tests.support.valkey import OpenState, Plain, Server

MANY = 100_000
"""A limit that no test reaches."""


def made(number: int, **facts: Any) -> tuple[str, bytes]:
    response_id = RunIds().response
    summary = {"id": response_id, "status": "completed", "kind": "json", "owner": "a" * 32, "model": "tiny", "ended": number}
    return response_id, orjson.dumps({**summary, **facts})


async def ids(state: State, wanted: RecentFilter = ALL, **options: Any) -> list[str]:
    return [summary["id"] for summary in (await state.recent.page(wanted, **options)).summaries]


async def test_pages_list_every_response_once_and_the_latest_first(state: State) -> None:
    given = [made(number) for number in range(25)]
    for one in given:
        await state.recent.add([one], MANY)
    listed, before = [], None
    while True:
        page = await state.recent.page(before=before, limit=10)
        listed += [summary["id"] for summary in page.summaries]
        if page.next is None:
            break
        before = Position.parse(str(page.next))
    ended = {response_id: number for number, (response_id, _) in enumerate(given)}
    assert sorted(listed) == sorted(ended)
    assert [ended[one] for one in listed[:10]] == sorted((ended[one] for one in listed[:10]), reverse=True)


@pytest.mark.parametrize(
    ("wanted", "facts"),
    [
        (RecentFilter(statuses=FAILED), {"status": "failed"}),
        (RecentFilter(kinds=frozenset({"websocket"})), {"kind": "websocket"}),
        (RecentFilter(model='a "model"'), {"model": 'a "model"'}),
        (RecentFilter(owner="b" * 8), {"owner": "b" * 32}),
        (RecentFilter(owner="team"), {"key": "team"}),
        (RecentFilter(tool="mcp"), {"tools": ["mcp", "web_search"]}),
        (RecentFilter(cache="exact"), {"cache": "exact"}),
        (RecentFilter(error="server_error"), {"error_code": "server_error"}),
        (RecentFilter(previous="resp_a"), {"previous": "resp_a"}),
        (RecentFilter(conversation="conv_a"), {"conversation": "conv_a"}),
        (RecentFilter(unstored=True), {"stored": False}),
        (RecentFilter(until=10), {"ended": 9.5}),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
async def test_a_filter_finds_only_what_matches(state: State, wanted: RecentFilter, facts: dict[str, Any]) -> None:
    others = [made(100), made(100, request="resp_a conv_a mcp exact server_error team " + "b" * 32 + ' a "model"')]
    matching = made(100, **facts)
    await state.recent.add([others[0], matching, others[1]], MANY)
    assert await ids(state, wanted) == [matching[0]]


async def test_a_short_owner_is_only_the_name_of_a_key(state: State) -> None:
    await state.recent.add([made(1, owner="abc" + "0" * 29)], MANY)
    assert await ids(state, RecentFilter(owner="abc")) == []


async def test_since_ends_the_list_at_older_responses(state: State, server: Plain) -> None:
    old = made(1)
    server.execute_command("XADD", recent_key(0), "1000-0", "s", old[1])
    new = made(2)
    await state.recent.add([new], MANY)
    assert await ids(state, RecentFilter(since=time.time() - 3600)) == [new[0]]


async def test_a_response_and_those_that_continue_it_are_found_by_its_id(state: State) -> None:
    first = RunIds()
    next_one = RunIds(first.tag)
    await state.recent.add([(first.response, made(1, id=first.response)[1])], MANY)
    child = made(2, id=next_one.response, previous=first.response)[1]
    await state.recent.add([(next_one.response, child), *(made(number) for number in range(50))], MANY)
    found = await state.recent.find(first.response)
    assert found is not None
    assert found["ended"] == 1
    assert [one["id"] for one in await state.recent.children(first.response)] == [next_one.response]
    assert await state.recent.find(RunIds().response) is None


async def test_the_index_keeps_about_the_maximum(state: State, server: Plain) -> None:
    for _ in range(10):
        await state.recent.add([made(number) for number in range(200)], 400)
    kept = sum(server.xlen(recent_key(shard)) for shard in range(RECENT_SHARDS))
    assert 400 <= kept <= 400 + 100 * RECENT_SHARDS  # Redis trims whole nodes of a stream


async def test_old_summaries_are_removed_and_the_keys_expire(state: State, server: Plain) -> None:
    server.execute_command("XADD", recent_key(0), "1000-0", "s", made(1)[1])
    new = made(2)
    await state.recent.add([new], MANY)
    await state.recent.trim(60)
    assert await ids(state) == [new[0]]
    assert all(server.ttl(key) in range(1, 61) for key in server.scan_iter("rmw:{recent*"))


async def test_a_follower_gets_summaries_that_are_added_later(state: State) -> None:
    await state.recent.add([made(1)], MANY)
    ends = await state.recent.ends()
    assert (await state.recent.after(ends))[0] == []
    added = [made(number, status="failed" if number % 2 else "completed") for number in range(6)]
    await state.recent.add(added, MANY)
    found, ends = await state.recent.after(ends, RecentFilter(FAILED))
    assert sorted(one["id"] for one in found) == sorted(response_id for response_id, _ in added[1::2])
    assert (await state.recent.after(ends))[0] == []


async def test_damaged_summaries_are_omitted(state: State, server: Plain) -> None:
    good = made(1)
    await state.recent.add([good], MANY)
    summary = orjson.loads(good[1])
    strange = [{**summary, name: value} for name, value in (("id", 1), ("status", None), ("kind", []), ("ended", "1"))]
    for text in (b"{", b"[]", b'{"id": 1}', *map(orjson.dumps, strange)):
        server.xadd(recent_key(0), {"s": text})
    server.xadd(recent_key(1), {"other": "field"})
    assert await ids(state) == [good[0]]


@pytest.mark.parametrize("text", ["", "1", "1-2", "1-2-3-4", "a-0-0", "1-0--1", "9" * 20 + "-0-0"])
def test_an_invalid_position_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        Position.parse(text)


@pytest.mark.parametrize("end", ["", "0", "0-x", "-1-0", "9" * 16 + "-0", "\u0661-\u0662"])
def test_invalid_ends_are_refused(end: str) -> None:
    assert read_ends(".".join(["0-0"] * RECENT_SHARDS)) == ["0-0"] * RECENT_SHARDS
    with pytest.raises(BadRequest):
        read_ends(".".join([end, *["0-0"] * (RECENT_SHARDS - 1)]))


async def test_processes_are_listed_until_they_stop_reporting(open_state: OpenState, valkey: Server, server: Plain) -> None:
    one, other = open_state(valkey.url), open_state(valkey.url)
    other.replicas.describe(lambda: {"worker": "w", "running": 2})
    await one.replicas.report("one", 1.0)
    async with other.replicas.reporting("other"):
        while len(found := await one.replicas.running()) < 2:
            pass
        assert [report["name"] for report in found] == ["one", "other"]
        assert (found[1]["worker"], found[1]["running"]) == ("w", 2)
        await one.replicas.report("one", 1.0)
        assert len(await one.replicas.running()) == 2
    assert [report["name"] for report in await one.replicas.running()] == ["one"]
    assert server.zcard("rmw:{replicas}:beats") == 1


async def test_a_report_that_is_too_large_is_shortened(state: State) -> None:
    state.replicas.describe(lambda: {"endpoints": ["x" * 100] * 1000})
    await state.replicas.report("one", 1.0)
    [report] = await state.replicas.running()
    assert "endpoints" not in report
