"""Continuation of an `incomplete` message that a client sends back, or that ends the history."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.engine import turns
from tests.engine.test_continuation import FUNCTION, SAID, THOUGHT, said
from tests.support.continuing import PIECE, Continuing
from tests.support.mcp_servers import weather
from tests.support.oracle import stream, whole
from tests.support.scripted import Answer, Asked, error, json_answer

if TYPE_CHECKING:
    from tests.support.servers import Ours, Serve, Start

BEGUN = 30
INPUT: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": THOUGHT}]},
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "incomplete",
        "content": [{"type": "output_text", "text": SAID[:BEGUN], "annotations": []}],
    },
]


@pytest.fixture
def begin(serve: Serve, start_at: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setattr(turns, "FIRST_PAUSE", 0.01)

    def start(upstream: Continuing, **settings: Any) -> Ours:
        url = serve(upstream)
        return start_at("proxy", upstream=url, upstream__status_grace=0, tools__allow_private_urls=True, **settings)

    return start


def thinking() -> Continuing:
    """A vLLM whose parser takes a continued text for reasoning, unless the request turns reasoning off."""
    upstream = Continuing(SAID, THOUGHT)
    upstream.as_reasoning = upstream.can_turn_reasoning_off = True
    return upstream


@pytest.mark.parametrize("body", [{}, {"tools": [FUNCTION]}, {"max_output_tokens": 9}], ids=["plain", "tools", "limit"])
async def test_the_rest_of_an_incomplete_message_is_a_message(begin: Start, body: dict[str, Any]) -> None:
    ours = begin(thinking())
    rest = SAID[BEGUN:]
    expected = [("message", rest)] if "max_output_tokens" not in body else [("message", rest[:9], "incomplete")]
    streamed = await stream(ours, input=INPUT, **body)
    assert said(streamed.response) == expected
    assert streamed.response["usage"]["output_tokens"] == len(expected[0][1])
    assert said(await whole(ours, input=INPUT, **body)) == expected


async def test_a_message_cut_by_the_limit_is_continued_by_the_next_response_with_an_empty_input(begin: Start) -> None:
    upstream = thinking()
    ours = begin(upstream)
    cut = await stream(ours, max_output_tokens=60)
    assert said(cut.response)[1][2] == "incomplete"
    rest = await stream(ours, previous_response_id=cut.response["id"], input=[])
    assert [item["type"] for item in rest.response["output"]] == ["message"]
    assert cut.response["output_text"] + rest.response["output_text"] == SAID
    await stream(ours, previous_response_id=rest.response["id"], input="And now?")
    assert upstream.requests[-1].json["messages"][-2] == {"role": "assistant", "content": SAID}


async def test_the_text_is_a_message_even_if_reasoning_cannot_be_turned_off(begin: Start) -> None:
    upstream = thinking()
    upstream.can_turn_reasoning_off = False
    ours = begin(upstream)
    assert said((await stream(ours, input=INPUT)).response) == [("message", SAID[BEGUN:])]
    assert said(await whole(ours, input=INPUT)) == [("message", SAID[BEGUN:])]
    streamed = await stream(ours, input=INPUT, tools=[FUNCTION])
    assert streamed.terminal == "response.failed", "calls would come as text"


@pytest.mark.parametrize("counts_each_chunk", [True, False])
async def test_a_server_that_begins_a_new_answer_gives_its_reasoning_and_a_whole_message(
    begin: Start, counts_each_chunk: bool
) -> None:
    upstream = Continuing(SAID, THOUGHT)
    upstream.hides = True
    upstream.counts_each_chunk = counts_each_chunk
    assert said((await stream(begin(upstream), input=INPUT)).response) == [("reasoning", THOUGHT), ("message", SAID)]


@pytest.mark.parametrize("status", [404, 429, 503])
async def test_a_server_without_tokenize_is_asked_to_continue_without_reasoning(begin: Start, status: int) -> None:
    class Bare(Continuing):
        def page(self, asked: Asked) -> Answer:
            if asked.path == "/tokenize":
                return json_answer(error("no", status), status)
            return super().page(asked)

    upstream = Bare(SAID, THOUGHT)
    upstream.as_reasoning = upstream.can_turn_reasoning_off = True
    assert said((await stream(begin(upstream), input=INPUT)).response) == [("message", SAID[BEGUN:])]
    (asked,) = upstream.requests
    assert asked.json["continue_final_message"] is True
    assert asked.json["chat_template_kwargs"] == {"enable_thinking": False}


async def test_reasoning_stays_on_if_the_prompt_depends_on_it(begin: Start) -> None:
    class Hinting(Continuing):
        def prompt(self, body: dict[str, Any]) -> str:
            is_off = (body.get("chat_template_kwargs") or {}).get("enable_thinking") is False
            return ("/no_think " if is_off else "") + super().prompt(body)

    upstream = Hinting(SAID, THOUGHT)
    assert said((await stream(begin(upstream), input=INPUT)).response) == [("message", SAID[BEGUN:])]
    assert "chat_template_kwargs" not in upstream.requests[-1].json


async def test_the_tools_of_a_server_do_not_hide_that_a_message_is_unfinished(begin: Start, serve: Serve) -> None:
    url = serve(weather().streamable_http_app(stateless_http=True)) + "/mcp"
    tools = [{"type": "mcp", "server_label": "w", "server_url": url, "require_approval": "never"}]
    streamed = await stream(begin(thinking()), input=INPUT, tools=tools)
    assert [item["type"] for item in streamed.response["output"]] == ["mcp_list_tools", "message"]
    assert streamed.response["output_text"] == SAID[BEGUN:]


@pytest.mark.parametrize("cut", [0, 1, 4])
async def test_the_rest_of_a_message_is_continued_after_a_break(begin: Start, cut: int) -> None:
    upstream = thinking()
    ours = begin(upstream)
    upstream.cuts = deque([cut])
    streamed = await stream(ours, input=INPUT)
    assert said(streamed.response) == [("message", SAID[BEGUN:])]
    assert streamed.response["usage"]["output_tokens"] == len(SAID) - BEGUN
    assert len(upstream.requests[-1].json["messages"][-1]["content"]) == BEGUN + cut * PIECE


async def test_a_finished_message_at_the_end_is_not_continued(begin: Start) -> None:
    upstream = thinking()
    await stream(begin(upstream), input=[*INPUT[:2], {**INPUT[2], "status": "completed"}])
    assert "continue_final_message" not in upstream.requests[-1].json
    assert not any(asked.path == "/tokenize" for asked in upstream.visits)


async def test_white_space_that_the_template_hides_from_the_model_comes_once(begin: Start) -> None:
    upstream = Continuing("one \n two")
    upstream.trims = True
    message = {**INPUT[2], "content": [{"type": "output_text", "text": "one \n", "annotations": []}]}
    streamed = await stream(begin(upstream), input=[INPUT[0], message])
    assert said(streamed.response) == [("message", " two")]
