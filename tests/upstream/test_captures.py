"""Captured answers of vLLM 0.32 (`data/captures`), replayed through the whole server."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.support.oracle import stream, whole
from tests.support.paths import DATA
from tests.support.scripted import JSON, SSE, Answer

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours

CAPTURES = DATA / "captures"


def status(name: str) -> int:
    return int((CAPTURES / f"{name}.status").read_text().split()[0])


def body(name: str) -> bytes:
    return (CAPTURES / f"{name}.body").read_bytes()


def is_stream(name: str) -> bool:
    return "text/event-stream" in (CAPTURES / f"{name}.status").read_text()


NAMES = sorted(path.name.removesuffix(".body") for path in CAPTURES.glob("*.body"))
FAILED = [name for name in NAMES if status(name) >= 400 or (is_stream(name) and b'data: {"error"' in body(name))]
ANSWERED = [name for name in NAMES if name not in FAILED]


def queue(upstream: ScriptedUpstream, name: str) -> None:
    """Queue a capture as the next answer, in the same network reads as from vLLM."""
    pieces = [piece + b"\n\n" for piece in body(name).split(b"\n\n") if piece.strip()] if is_stream(name) else [body(name)]
    upstream.queue(Answer(pieces, status(name), SSE if is_stream(name) else JSON))


@dataclass
class Said:
    """The contents of a captured answer, read independently of the product code."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Name and arguments of each call."""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    tokens: list[str] = field(default_factory=list)
    """All tokens that have log probabilities, those of reasoning too."""

    def take(self, choice: dict[str, Any], message: dict[str, Any]) -> None:
        self.reasoning += message.get("reasoning") or ""
        self.content += message.get("content") or ""
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.tokens += [entry["token"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
        for place, fragment in enumerate(message.get("tool_calls") or ()):
            index, function = fragment.get("index", place), fragment["function"]
            if index == len(self.calls):
                self.calls.append([function["name"], ""])
            self.calls[index][1] += function.get("arguments") or ""


def said(name: str) -> Said:
    result = Said()
    frames = (
        [frame.removeprefix(b"data: ") for frame in body(name).split(b"\n\n") if frame] if is_stream(name) else [body(name)]
    )
    for chunk in (json.loads(frame) for frame in frames if frame != b"[DONE]"):
        result.usage = chunk.get("usage") or result.usage
        for choice in chunk["choices"]:
            result.take(choice, choice["delta"] if "delta" in choice else choice["message"])
    return result


def request(name: str) -> dict[str, Any]:
    """Return the parameters of the captured chat request that affect how its answer is read."""
    chat = json.loads((CAPTURES / f"{name}.request.json").read_text())
    tools = [{"type": "function", **tool["function"]} for tool in chat.get("tools", ())]
    return {"tools": tools, **({"include": ["message.output_text.logprobs"]} if chat.get("logprobs") else {})}


def expect(document: dict[str, Any], answer: Said) -> None:
    """Assert that a response has the items, status and usage of a captured answer."""
    reasoning = "".join(part["text"] for item in document["output"] if item["type"] == "reasoning" for part in item["content"])
    messages = [part for item in document["output"] if item["type"] == "message" for part in item["content"]]
    calls = [[item["name"], item["arguments"]] for item in document["output"] if item["type"] == "function_call"]
    assert reasoning == answer.reasoning
    assert calls == [[name, arguments or "{}"] for name, arguments in answer.calls]
    is_said = bool(answer.content.strip()) or not (calls or reasoning)
    assert "".join(part["text"] for part in messages) == (answer.content if is_said else "")
    if calls and not answer.content.strip():
        assert messages == []
    if answer.tokens and messages:
        assert "".join(token["token"] for token in messages[0]["logprobs"]) == messages[0]["text"]
    cut = answer.finish_reason == "length"
    assert document["status"] == ("incomplete" if cut else "completed")
    assert document["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    if answer.usage is None:
        assert document["usage"] is None
    else:
        assert document["usage"]["input_tokens"] == answer.usage["prompt_tokens"]
        assert document["usage"]["output_tokens"] == answer.usage["completion_tokens"]


@pytest.mark.parametrize("name", ANSWERED)
async def test_a_captured_answer_has_the_expected_items_streamed_or_whole(
    ours: Ours, upstream: ScriptedUpstream, name: str
) -> None:
    answer, asked = said(name), request(name)
    queue(upstream, name)
    queue(upstream, name)
    expect((await stream(ours, **asked)).response, answer)
    expect(await whole(ours, **asked), answer)


ERRORS: dict[str, tuple[type[openai.APIStatusError], str | None, str | None]] = {
    "err_404": (openai.NotFoundError, None, None),
    "err_405": (openai.APIStatusError, None, None),
    "err_bad_json": (openai.BadRequestError, "18", None),
    "err_empty_messages": (openai.BadRequestError, None, None),
    "err_image_to_text_model": (openai.BadRequestError, None, None),
    "err_json_schema_bad": (openai.BadRequestError, None, None),
    "err_max_tokens_too_big": (openai.BadRequestError, "max_output_tokens", None),
    "err_no_messages": (openai.BadRequestError, "input", None),
    "err_temperature": (openai.BadRequestError, "temperature", None),
    "err_too_long_prompt": (openai.BadRequestError, "input", "context_length_exceeded"),
    "err_tool_choice_unknown_name": (openai.BadRequestError, "tool_choice", None),
    "err_tool_choice_without_tools": (openai.BadRequestError, "tool_choice", None),
    "err_tool_flat_responses_style": (openai.BadRequestError, "tools.0.function", None),
    "err_tool_noname": (openai.BadRequestError, "tools.0.function.name", None),
    "err_tool_parameters_not_object": (openai.BadRequestError, "tools.0.function.parameters", None),
    "err_tool_schema_strict_bad": (openai.BadRequestError, None, None),
    "err_tool_schema_strict_bad_stream": (openai.BadRequestError, None, None),
    "err_unknown_model": (openai.NotFoundError, "model", "model_not_found"),
    "err_unknown_model_stream": (openai.NotFoundError, "model", "model_not_found"),
}


def test_every_captured_error_has_an_expectation() -> None:
    assert sorted(FAILED) == sorted(ERRORS)


@pytest.mark.parametrize("name", sorted(ERRORS))
@pytest.mark.parametrize("streamed", [False, True], ids=["json", "stream"])
async def test_a_captured_error_raises_the_expected_exception_of_the_official_client(
    patient: Ours, upstream: ScriptedUpstream, name: str, streamed: bool
) -> None:
    queue(upstream, name)
    exception, param, code = ERRORS[name]
    with pytest.raises(exception) as caught:
        await patient.client.responses.create(model="tiny", input="Hi", stream=streamed)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"
    assert "Error code" in str(caught.value)
