"""Replay of an event log into the output that the run had when it broke off."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from responses_mw.ids import RunIds
from responses_mw.jobs.event_log import final_batch, read_log, write_end
from responses_mw.protocol import sse
from responses_mw.protocol.request.create import parse
from responses_mw.protocol.response import document
from responses_mw.protocol.response.assembler import Assembler
from responses_mw.protocol.response.builder import ResponseOptions
from responses_mw.protocol.response.replay import OutputReplay
from responses_mw.state import Batch, State, TakeReason, connect
from responses_mw.state import jobs as state_jobs
from tests.jobs.test_records import ALICE, append, take, taken
from tests.support.scripted import HELLO, call, delta, finish, reasoning, text

LOGPROBS = {"content": [{"token": "Hel", "logprob": -0.1, "bytes": [72], "top_logprobs": []}]}
WITH_LOGPROBS = {"choices": [{"index": 0, "delta": {"content": "Hel"}, "logprobs": LOGPROBS}]}

RUNS: dict[str, list[dict[str, Any]]] = {
    "text": list(HELLO),
    "reasoning": [reasoning("Let me "), reasoning("see."), text("It is "), text("so.\n\nYes."), finish()],
    "calls": [
        call("", name="look", call_id="a"),
        call('{"x":'),
        call("1}"),
        call("{}", name="see", call_id="b", index=1),
        finish("tool_calls"),
    ],
    "refusal": [delta(refusal="I can"), delta(refusal="not."), finish()],
    "log probabilities": [WITH_LOGPROBS, text("lo"), finish()],
}


def run(chunks: list[dict[str, Any]], options: ResponseOptions) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Break a run off after `chunks`. Return the created document, the events of the log and the final document."""
    created = document.create(parse({"input": "Hi", "background": True}), response_id="resp_1", model="m", created_at=1)
    assembler = Assembler(dict(created, output=[]), RunIds(), options)
    batches = [assembler.start(queued=True), assembler.resume(2)]
    batches += [assembler.feed(chunk) for chunk in chunks]
    if chunks and chunks[-1] in (finish(), finish("tool_calls")):
        batches.append(assembler.end_turn())
    assembler.fail("server_error", "It broke off.")
    return created, list(sse.decode(b"".join(sse.encode(events) for events in batches))), assembler.response


def folded(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the output of a run whose log ends after these events."""
    output = OutputReplay([])
    for event in log:
        output.take(event)
    output.cut()
    return output.items


@pytest.mark.parametrize(
    "options",
    [
        ResponseOptions(logprobs=True),
        ResponseOptions(logprobs=True, summary=True),
        ResponseOptions(logprobs=True, open_reasoning=True),
    ],
)
@pytest.mark.parametrize("name", RUNS)
def test_the_log_of_a_run_interrupted_anywhere_replays_to_its_output(name: str, options: ResponseOptions) -> None:
    for length in range(len(RUNS[name]) + 1):
        _, log, broken = run(RUNS[name][:length], options)
        assert folded(log) == broken["output"]


def test_the_final_event_of_a_cancelled_run_is_response_failed_with_status_cancelled() -> None:
    created, log, _ = run(RUNS["text"][:2], ResponseOptions())
    [event] = sse.decode(final_batch({**created, "output": folded(log), "status": "cancelled"}, 7).data)
    assert event["type"] == "response.failed"
    assert event["response"]["status"] == "cancelled"
    assert event["sequence_number"] == 7


@pytest.mark.parametrize("data", [b"garbage\n\nmore\n\n", b"event: x\ndata: {}\n\n", b"event: x\ndata: 5\n\n"])
async def test_a_log_is_replayed_up_to_the_first_foreign_event(redis_url: str, data: bytes) -> None:
    state, ids = State(connect(redis_url, timeout=20.0)), RunIds()
    created = document.create(parse({"input": "Hi", "background": True}), response_id=ids.response, model="m", created_at=1)
    assembler = Assembler(dict(created, output=[]), ids, ResponseOptions())
    start = sse.encode([*assembler.start(queued=True), *assembler.resume(2)])
    await state.jobs.create(created, {}, [], ALICE, "sealed", Batch(0, 2, start))
    job = await taken(state, ids.response)
    words = sse.encode(events := assembler.feed(text("Hello")))
    last = 2 + len(events)
    assert await append(state, job, Batch(3, last, words))
    assert await append(state, job, Batch(last + 1, last + 1, data))
    ended = await write_end(state, await take(state, ids.response, TakeReason.CANCEL))
    assert (ended["status"], ended["output"][0]["content"][0]["text"]) == ("cancelled", "Hello")
    await state.aclose()


async def test_a_log_is_replayed_page_by_page(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_jobs, "PAGE", 4)
    state, ids = State(connect(redis_url, timeout=20.0)), RunIds()
    created = document.create(parse({"input": "Hi", "background": True}), response_id=ids.response, model="m", created_at=1)
    assembler = Assembler(dict(created, output=[]), ids, ResponseOptions())
    start = sse.encode([*assembler.start(queued=True), *assembler.resume(2)])
    await state.jobs.create(created, {}, [], ALICE, "sealed", Batch(0, 2, start))
    job = await taken(state, ids.response)
    size, number = 0, job.next_number
    for _ in range(100):
        events = assembler.feed(*[text(" word")] * 100)
        data = sse.encode(events)
        assert await append(state, job, Batch(number, number + len(events) - 1, data))
        size, number = size + len(data), number + len(events)
    job = await taken(state, ids.response, TakeReason.CANCEL)
    tracemalloc.start()
    try:
        log = await read_log(state, job)
        assert tracemalloc.get_traced_memory()[1] < size / 2
    finally:
        tracemalloc.stop()
        await state.aclose()
    assert (log.size, log.next_number) == (size + len(start), job.next_number)
    assert log.items[0]["content"][0]["text"] == " word" * 10_000
