"""A log, folded, is the document that the run had when it broke off."""

from __future__ import annotations

from typing import Any

import pytest

from responses_mw.ids import RunIds
from responses_mw.protocol import sse
from responses_mw.protocol.request.create import parse
from responses_mw.protocol.response import document
from responses_mw.protocol.response.assembler import Assembler
from responses_mw.protocol.response.builder import ResponseOptions
from responses_mw.protocol.response.replay import end, fold
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
    """The document as created, the events of its log, and the document as the run broke off after these chunks."""
    created = document.create(parse({"input": "Hi", "background": True}), response_id="resp_1", model="m", created_at=1)
    assembler = Assembler(dict(created, output=[]), RunIds(), options)
    batches = [assembler.start(queued=True), assembler.resume(2)]
    batches += [assembler.feed(chunk) for chunk in chunks]
    if chunks and chunks[-1] in (finish(), finish("tool_calls")):
        batches.append(assembler.end_turn())
    assembler.fail("server_error", "It broke off.")
    return created, list(sse.decode(b"".join(sse.encode(events) for events in batches))), assembler.response


@pytest.mark.parametrize(
    "options",
    [
        ResponseOptions(logprobs=True),
        ResponseOptions(logprobs=True, summary=True),
        ResponseOptions(logprobs=True, open_reasoning=True),
    ],
)
@pytest.mark.parametrize("name", RUNS)
def test_wherever_a_run_breaks_off_its_log_folds_to_its_output(name: str, options: ResponseOptions) -> None:
    for length in range(len(RUNS[name]) + 1):
        created, log, broken = run(RUNS[name][:length], options)
        assert fold(created, log)["output"] == broken["output"]


def test_the_end_of_a_cancelled_run_is_a_failure_whose_response_is_cancelled() -> None:
    created, log, _ = run(RUNS["text"][:2], ResponseOptions())
    event = end({**fold(created, log), "status": "cancelled"}, 7)
    assert event.type == "response.failed"
    assert event.data["response"]["status"] == "cancelled"
    assert event.data["sequence_number"] == 7
