"""Captures of requests to the upstream and of its answers, and the page that shows them."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import openai
import orjson
import pytest
import redis

from responses_mw.inspector.translation import marked
from responses_mw.state import State, connect
from responses_mw.telemetry.captures import (
    CAPTURES,
    MAX_ANSWER,
    MAX_TEXT,
    MAX_TOTAL,
    MAX_TURNS,
    MAX_VALUES,
    Capture,
    CaptureCollector,
    clipped,
)
from responses_mw.telemetry.summaries import SummaryCollector
from tests.inspector.conftest import ANSWER, until
from tests.support.scripted import Signal, error, finish, text, usage
from tests.support.websocket import UVICORN, opened

if TYPE_CHECKING:
    from tests.inspector.conftest import Inspect, Inspected
    from tests.support.scripted import ScriptedUpstream

pytestmark = pytest.mark.usefixtures("nobody_else")

ASK = {"x-responses-capture": "1"}


def page(inspected: Inspected, response_id: str, expected: str) -> str:
    """Wait until the page of a response has the `expected` text, because captures are written with a delay."""

    def shown() -> str | None:
        html = inspected.admin.get(f"/ui/responses/{response_id}").text
        return html if expected in html else None

    found: str = until(shown)
    return found


def unmarked(html: str) -> str:
    """Return a page without the marks of shared texts."""
    return re.sub("</?mark[^>]*>", "", html)


async def test_a_failed_response_shows_what_was_sent_and_the_error(inspect: Inspect, upstream: ScriptedUpstream) -> None:
    inspected = inspect()
    upstream.stream(text("a partial answer"), error("the engine died", 500))
    with inspected.ours.sync_client.responses.stream(model="tiny", input="a question") as stream:
        failed = [event.response.id for event in stream if event.type == "response.failed"]
    html = page(inspected, failed[0], "Sent to the upstream")
    assert "&#34;messages&#34;" in html
    assert "the engine died" in html
    assert "a partial answer" in html


async def test_a_failure_that_is_not_stored_is_also_captured(inspect: Inspect, upstream: ScriptedUpstream) -> None:
    inspected = inspect()
    upstream.whole(error("out of memory", 500), 500)
    with pytest.raises(openai.InternalServerError):
        inspected.ours.sync_client.responses.create(model="tiny", input="a question")
    [summary] = inspected.wait_for(1)
    html = page(inspected, summary["id"], "Sent to the upstream")
    assert "a question" in html
    assert "out of memory" in html


async def test_a_header_requests_a_capture_of_the_bytes_of_the_answer(inspect: Inspect, upstream: ScriptedUpstream) -> None:
    inspected = inspect()
    upstream.stream(text("hel"), text("lo"), finish(), usage())
    upstream.whole(ANSWER)
    client = inspected.ours.sync_client
    with client.responses.stream(model="tiny", input="q", extra_headers=ASK) as stream:
        made = stream.get_final_response()
    assert made.output_text == "hello"
    html = page(inspected, made.id, "Sent to the upstream")
    assert "&#34;content&#34;:&#34;hel&#34;" in unmarked(html)
    assert "data: [DONE]" in html
    whole = client.responses.create(model="tiny", input="q", extra_headers=ASK)
    assert whole.output_text == "the answer"
    assert "chat.completion" in page(inspected, whole.id, "Sent to the upstream")


@pytest.mark.parametrize(
    ("mode", "options"),
    [("content", {}), ("content", {"store": False, "extra_headers": ASK}), ("metadata", {"extra_headers": ASK})],
    ids=["not asked for", "not stored", "metadata"],
)
async def test_successful_responses_without_a_request_for_a_capture_are_not_captured(
    nobody_else: None, inspect: Inspect, upstream: ScriptedUpstream, redis_url: str, mode: str, options: dict[str, Any]
) -> None:
    CAPTURES.take()  # of servers that have stopped
    inspected = inspect(ui__mode=mode)
    upstream.whole(ANSWER)
    inspected.ours.sync_client.responses.create(model="tiny", input="q", **options)
    if options.get("store") is False:
        upstream.whole(error("no", 500), 500)
        with pytest.raises(openai.InternalServerError):
            inspected.ours.sync_client.responses.create(model="tiny", input="q", **options)
    inspected.wait_for(2 if options.get("store") is False else 1)
    assert CAPTURES.take() == []
    with redis.Redis.from_url(redis_url) as client:
        assert not list(client.scan_iter("rmw:{*}:t:*"))


async def test_a_background_job_captures_if_its_request_asked_for_it(inspect: Inspect, upstream: ScriptedUpstream) -> None:
    inspected = inspect()
    client = inspected.ours.sync_client
    upstream.stream(text("hel"), text("lo"), finish(), usage())
    raw = client.responses.with_raw_response.create(model="tiny", input="q", background=True, extra_headers=ASK)
    assert raw.headers["x-responses-capture"] == "on"
    html = page(inspected, raw.parse().id, "Sent to the upstream")
    assert "&#34;content&#34;:&#34;hel&#34;" in unmarked(html)


async def test_a_websocket_message_is_captured_if_its_upgrade_asked_for_it(
    inspect: Inspect, upstream: ScriptedUpstream
) -> None:
    inspected = inspect(uvicorn=UVICORN)
    upstream.stream(text("hello"), finish(), usage())
    async with opened(inspected.ours, headers=ASK) as socket:
        made = await socket.response()
    html = await asyncio.to_thread(page, inspected, made["id"], "Sent to the upstream")
    assert "&#34;content&#34;:&#34;hello&#34;" in unmarked(html)


@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [({}, {}, "on"), ({}, {"store": False}, "not-stored"), ({"ui__mode": "metadata"}, {}, "off")],
    ids=["on", "not-stored", "off"],
)
async def test_a_response_header_says_whether_a_capture_is_made(
    inspect: Inspect, upstream: ScriptedUpstream, settings: dict[str, Any], options: dict[str, Any], expected: str
) -> None:
    create = inspect(**settings).ours.sync_client.responses.with_raw_response.create
    upstream.whole(ANSWER)
    upstream.whole(ANSWER)
    raw = create(model="tiny", input="q", extra_headers=ASK, **options)
    assert raw.headers["x-responses-capture"] == expected
    declined = create(model="tiny", input="q", extra_headers={"x-responses-capture": "0"}, **options)
    assert "x-responses-capture" not in declined.headers
    with pytest.raises(openai.BadRequestError, match="x-responses-capture"):
        create(model="tiny", input="q", extra_headers={"x-responses-capture": "perhaps"}, **options)


async def test_deleting_a_response_deletes_its_capture(inspect: Inspect, upstream: ScriptedUpstream, redis_url: str) -> None:
    inspected = inspect()
    upstream.whole(ANSWER)
    made = inspected.ours.sync_client.responses.create(model="tiny", input="q", extra_headers=ASK)
    with redis.Redis.from_url(redis_url) as client:
        until(lambda: list(client.scan_iter("rmw:{*}:t:*")))
        inspected.ours.sync_client.responses.delete(made.id)
        assert not list(client.scan_iter("rmw:{*}:t:*"))


async def test_only_the_last_captures_are_kept(inspect: Inspect, upstream: ScriptedUpstream, redis_url: str) -> None:
    inspected = inspect(ui__captures=2)
    made = []
    with redis.Redis.from_url(redis_url) as client:
        for _ in range(4):
            upstream.whole(ANSWER)
            made.append(inspected.ours.sync_client.responses.create(model="tiny", input="q", extra_headers=ASK).id)
            until(lambda: any(made[-1][-25:].encode() in key for key in client.scan_iter("rmw:{*}:t:*")))
        kept = until(lambda: len(keys := list(client.scan_iter("rmw:{*}:t:*"))) == 2 and keys)
        assert {key[-25:].decode() for key in kept} == {one[-25:] for one in made[-2:]}
        assert client.zcard("rmw:{captures}:keys") == 2
        assert all(0 < client.ttl(key) <= 24 * 3600 for key in kept)


def test_each_captured_request_and_answer_is_bounded() -> None:
    long: dict[str, Any] = {"messages": [{"content": "x" * 100_000}] * 10 + [1] * 100_000}
    shown = clipped(long)
    assert len(shown["messages"][0]["content"]) < MAX_TEXT + 40
    assert len(shown["messages"]) <= MAX_VALUES
    [name] = clipped({"x" * 100_000: 1})
    assert len(name) < MAX_TEXT + 40
    assert len(json.dumps(clipped([["x" * 3000] * 4000, *["y"] * 4000], 100_000))) < 100_000 + MAX_VALUES * 40
    capture = Capture(is_requested=True)
    for number in range(100):
        capture.begin({"turn": number})
    assert len(capture.turns) == MAX_TURNS
    assert (capture.turns[0].sent, capture.turns[-1].sent) == ({"turn": 0}, {"turn": 99})
    turn = capture.open_turn
    assert turn is not None
    for _ in range(5):
        turn.receive(b"x" * 100_000)
    assert (len(turn.answer), turn.is_cut) == (MAX_ANSWER, True)


async def test_chunks_are_shown_beside_the_resulting_events(inspect: Inspect, upstream: ScriptedUpstream) -> None:
    inspected = inspect()
    read = Signal()
    upstream.stream(text("first"), read, text("second"), finish(), usage())
    with inspected.ours.sync_client.responses.stream(model="tiny", input="q", extra_headers=ASK) as stream:
        for event in stream:
            if event.type == "response.output_text.delta" and event.delta == "first":
                read.set()
        made = stream.get_final_response()
    html = page(inspected, made.id, "Chunks and events")
    table = html[html.index("Events to the client") :].partition("</table>")[0]
    rows = [row for row in table.split("<tr>") if "response.output_text.delta" in row]
    assert [["first" in row, "second" in row] for row in rows] == [[True, False], [False, True]]
    for row, delta in zip(rows, ("first", "second"), strict=True):
        [number] = set(re.findall(rf'<mark data-mark="(\d+)">&#34;{delta}&#34;</mark>', row))
        assert row.count(f'data-mark="{number}"') == 2
    assert "response.completed" in table


def test_the_total_size_of_a_capture_is_bounded() -> None:
    capture = Capture(is_requested=True)
    for _ in range(30):
        capture.begin({"messages": [{"x" * 3000: "y" * 3000}] * 100})
        assert capture.open_turn is not None
        capture.open_turn.receive(b"x" * MAX_ANSWER)
        for _ in range(20):
            capture.add_event("response.completed", {"response": "😀" * 2_000})
    facts = capture.facts()
    assert facts["are_events_cut"]
    assert [turn["number"] for turn in facts["turns"]] == [*range(1, 11), *range(21, 31)]
    assert len(json.dumps(facts, ensure_ascii=False)) < 4 * MAX_TOTAL


def test_shared_texts_are_marked_and_longer_ones_take_precedence() -> None:
    pieces = marked('{"a": "hello world", "b": "hello"}', ["hello world", "hello"])
    assert [(piece.text, piece.mark) for piece in pieces if piece.mark] == [("hello world", 1), ("hello", 2)]
    assert "".join(piece.text for piece in pieces) == '{"a": "hello world", "b": "hello"}'


@pytest.mark.parametrize("kind", [CaptureCollector, SummaryCollector])
def test_collecting_stops_with_the_last_application(kind: type[CaptureCollector | SummaryCollector]) -> None:
    collector = kind()
    first, second = collector.collecting(), collector.collecting()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert collector.is_on
    second.__exit__(None, None, None)
    assert not collector.is_on


async def test_a_gap_in_the_sequence_numbers_is_shown(inspect: Inspect, upstream: ScriptedUpstream, redis_url: str) -> None:
    inspected = inspect()
    upstream.whole(ANSWER)
    made = inspected.ours.sync_client.responses.create(model="tiny", input="hello")
    events = [[number, 1, 0, 0.1, "response.output_text.delta", '{"delta":"x"}'] for number in (0, 1, 4)]
    state = State(connect(redis_url))
    await state.captures.add(made.id, orjson.dumps({"turns": [], "events": events}), maximum=10, seconds=60)
    await state.aclose()
    html = inspected.admin.get(f"/ui/responses/{made.id}").text
    assert re.findall(r'<td class="number">(?:<span class="fault">([a-z ]+)</span> )?(\d+)</td>', html) == [
        ("", "0"),
        ("", "1"),
        ("after a gap", "4"),
    ]
