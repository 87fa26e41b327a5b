"""Answers of models, and the chunks in which each kind of server sends them, as seen in its source or traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
from hypothesis import strategies as st

USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """One turn of a model."""

    reasoning: str = ""
    text: str = ""
    refusal: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Manner:
    name: str
    first: dict[str, Any] | None = field(default_factory=lambda: {"role": "assistant", "content": ""})
    """The delta of a chunk that opens the stream."""
    preamble: tuple[dict[str, Any], ...] = ()
    reasoning: tuple[str, ...] = ("reasoning",)
    """The members that carry reasoning, each with all of it; none where the server does not tell it apart."""
    repeated: dict[str, Any] = field(default_factory=dict)
    """What every delta has besides."""
    chunk: dict[str, Any] = field(default_factory=dict)
    """What every chunk has besides."""
    refusals: bool = False
    most_calls: int = 4
    calls: Callable[[list[Call], Cut], Iterator[list[Any]]] = field(default=lambda calls, cut: iter(()))
    """The `tool_calls` of one delta after the other."""
    finish: str | None = "own"
    """`own`: a chunk of its own; `last`: on the last one with content; None: never."""
    finish_calls: str = "tool_calls"
    finish_text: str = "stop"
    usage: str = "alone"
    """`alone`: a last chunk with `choices: []`; `finish`: on the last chunk; `every`; `never`."""


Cut = Callable[[str], list[str]]
"""Cuts a text into pieces, none of them empty."""


def render(
    manner: Manner, answer: Answer, cut: Cut, *, interleave: Callable[[list[list[Any]]], list[list[Any]]] | None = None
) -> list[Any]:
    """Return the chunks of `answer`."""
    deltas: list[dict[str, Any]] = []
    if manner.reasoning:
        deltas += [dict.fromkeys(manner.reasoning, piece) for piece in cut(answer.reasoning)]
    deltas += [{"content": piece} for piece in cut(answer.text)]
    if manner.refusals:
        deltas += [{"refusal": piece} for piece in cut(answer.refusal)]
    calls = list(answer.calls[: manner.most_calls])
    fragments = list(manner.calls(calls, cut))
    deltas += [{"tool_calls": one} for one in (interleave(fragments) if interleave else fragments)]
    chunks = [_chunk(manner, {**manner.repeated, **delta}) for delta in ([manner.first] if manner.first else []) + deltas]
    _finish(manner, chunks, manner.finish_calls if calls else manner.finish_text)
    _use(manner, chunks)
    return [*manner.preamble, *chunks]


def _chunk(manner: Manner, delta: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", **manner.chunk, "choices": [choice]}


def _finish(manner: Manner, chunks: list[Any], reason: str) -> None:
    if manner.finish == "last" and chunks:
        chunks[-1]["choices"][0]["finish_reason"] = reason
    elif manner.finish:
        chunks.append(_chunk(manner, {}))
        chunks[-1]["choices"][0]["finish_reason"] = reason


def _use(manner: Manner, chunks: list[Any]) -> None:
    if manner.usage == "alone":
        chunks.append({"id": "", "object": "chat.completion.chunk", "choices": [], "usage": USAGE})
    elif manner.usage == "finish":
        chunks[-1]["usage"] = USAGE
    elif manner.usage == "every":
        for number, chunk in enumerate(chunks, 1):
            chunk["usage"] = {**USAGE, "completion_tokens": number, "total_tokens": 9 + number}
        chunks[-1]["usage"] = USAGE


def dumped(call: Call) -> str:
    return orjson.dumps(call.arguments).decode()


# -- how calls come ------------------------------------------------------------------------------------------------------


def fragments(calls: list[Call], cut: Cut) -> Iterator[list[Any]]:
    """OpenAI: id, type and name with empty arguments, followed by the arguments with only the index."""
    for index, call in enumerate(calls):
        yield [{"index": index, "id": f"call_{index}", "type": "function", "function": {"name": call.name, "arguments": ""}}]
        for piece in cut(dumped(call)):
            yield [{"index": index, "function": {"arguments": piece}}]


def vllm(calls: list[Call], cut: Cut) -> Iterator[list[Any]]:
    """vLLM: no `arguments` member at first, and deltas with `tool_calls: []` in between."""
    for index, call in enumerate(calls):
        yield [{"index": index, "id": f"chatcmpl-tool-{index}", "type": "function", "function": {"name": call.name}}]
        yield []
        for piece in cut(dumped(call)):
            yield [{"index": index, "function": {"arguments": piece}}]


def kimi(calls: list[Call], cut: Cut) -> Iterator[list[Any]]:
    """Kimi: the name together with the first arguments, and numbered ids."""
    for index, call in enumerate(calls):
        first, *rest = cut(dumped(call))
        yield [{"index": index, "id": f"functions.{call.name}:{index}", "function": {"name": call.name, "arguments": first}}]
        for piece in rest:
            yield [{"index": index, "id": None, "function": {"name": None, "arguments": piece}}]


def sglang(calls: list[Call], cut: Cut) -> Iterator[list[Any]]:
    for index, call in enumerate(calls):
        given = {"index": index, "type": "function"}
        yield [{**given, "id": f"call_{index:024x}", "function": {"name": call.name, "arguments": ""}}]
        for piece in cut(dumped(call)):
            yield [{**given, "id": None, "function": {"name": None, "arguments": piece}}]


def tgi_old(calls: list[Call], cut: Cut) -> Iterator[Any]:
    """TGI up to 3.1: an object with the name within the arguments, and a special token at the end."""
    for call in calls:
        for piece in cut(orjson.dumps({"function": {"_name": call.name, **call.arguments}}).decode() + "<|eot_id|>"):
            yield {"index": 0, "id": "", "type": "function", "function": {"name": None, "arguments": piece}}


def tgi(calls: list[Call], cut: Cut) -> Iterator[list[Any]]:
    """TGI from 3.2: the id "0" in every fragment."""
    for call in calls:
        for number, piece in enumerate(["{", *cut(dumped(call)[1:])]):
            yield [
                {
                    "index": 0,
                    "id": "0",
                    "type": "function",
                    "function": {"name": None if number else call.name, "arguments": piece},
                }
            ]


def whole(calls: list[Call], cut: Cut) -> Iterator[list[Any]]:
    """Ollama, Cerebras, transformers: each call in one delta."""
    for index, call in enumerate(calls):
        yield [
            {
                "index": index,
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": dumped(call)},
            }
        ]


def whole_index_zero(calls: list[Call], cut: Cut) -> Iterator[list[Any]]:
    """Older Ollama: all calls with index 0."""
    for index, call in enumerate(calls):
        yield [
            {"index": 0, "id": f"call_{index}", "type": "function", "function": {"name": call.name, "arguments": dumped(call)}}
        ]


def whole_bare(calls: list[Call], cut: Cut) -> Iterator[list[Any]]:
    """All calls in one delta, without index and id. The arguments are objects."""
    if calls:
        yield [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls]


def bedrock(calls: list[Call], cut: Cut) -> Iterator[list[Any]]:
    """Bedrock: several fragments with the same index in one delta, each with the type."""
    for index, call in enumerate(calls):
        pieces = [{"index": index, "type": "function", "function": {"arguments": piece}} for piece in cut(dumped(call))]
        yield [{"index": index, "id": f"tooluse_{index}", "type": "function", "function": {"name": call.name}}, *pieces]


def watsonx(calls: list[Call], cut: Cut) -> Iterator[list[Any]]:
    """watsonx: an empty name where others omit the member."""
    for index, call in enumerate(calls):
        yield [{"index": index, "id": f"chatcmpl-tool-{index}", "function": {"name": call.name, "arguments": ""}}]
        for piece in cut(dumped(call)):
            yield [{"index": index, "id": "", "function": {"name": "", "arguments": piece}}]


def late_name(calls: list[Call], cut: Cut) -> Iterator[list[Any]]:
    """The arguments before the name."""
    for index, call in enumerate(calls):
        first, *rest = cut(dumped(call))
        yield [{"index": index, "function": {"arguments": first}}]
        yield [{"index": index, "id": f"call_{index}", "function": {"name": call.name}}]
        for piece in rest:
            yield [{"index": index, "function": {"arguments": piece}}]


# -- the servers ---------------------------------------------------------------------------------------------------------

_AZURE_FIRST = {"id": "", "object": "", "model": "", "choices": [], "prompt_filter_results": [{"prompt_index": 0}]}
_ROLE = {"role": "assistant"}
_NULL = {"role": "assistant", "content": None}

MANNERS = (
    Manner("openai", calls=fragments, refusals=True, reasoning=(), chunk={"usage": None, "obfuscation": "aX"}),
    Manner("azure", calls=fragments, refusals=True, reasoning=(), first=_NULL, preamble=(_AZURE_FIRST,)),
    Manner("vllm", calls=vllm, finish="last", chunk={"token_ids": None}),
    Manner("vllm with its usage forced", calls=kimi, finish="last", usage="every"),
    Manner("vllm of 2025", calls=vllm, reasoning=("reasoning", "reasoning_content"), finish="last"),
    Manner("tgi up to 3.1", calls=tgi_old, most_calls=1, first=None, reasoning=(), repeated=_ROLE, finish="last",
           finish_text="eos_token", finish_calls="eos_token", usage="never", chunk={"id": "", "usage": None}),
    Manner("tgi", calls=tgi, most_calls=1, first=None, reasoning=(), repeated=_ROLE, finish="last",
           finish_text="stop_sequence", finish_calls="stop", chunk={"id": "", "usage": None}),
    Manner("sglang", calls=sglang, reasoning=("reasoning_content",), chunk={"matched_stop": None}),
    Manner("llama.cpp", calls=fragments, reasoning=("reasoning_content",), first=_NULL, chunk={"timings": {"prompt_n": 1}}),
    Manner("ollama", calls=whole, first=None, repeated={**_ROLE, "content": ""}, finish_calls="stop"),
    Manner("older ollama", calls=whole_index_zero, first=None, repeated=_ROLE, finish="last", finish_calls="stop"),
    Manner("litellm", calls=fragments, reasoning=("reasoning_content",), repeated={"thinking_blocks": None}, usage="finish"),
    Manner("transformers", calls=whole, reasoning=(), usage="finish"),
    Manner("bedrock", calls=bedrock, finish="last"),
    Manner("watsonx", calls=watsonx, reasoning=(), finish="last"),
    Manner("cerebras", calls=whole, first=_NULL, usage="finish"),
    Manner("databricks", calls=fragments, reasoning=(), finish="last", usage="every"),
    Manner("no ids at all", calls=whole_bare, reasoning=(), usage="never"),
    Manner("names after arguments", calls=late_name, reasoning=(), usage="never"),
)  # fmt: skip

# -- answers -------------------------------------------------------------------------------------------------------------

texts = st.text(max_size=40)
spaces = st.text(" \n\t", max_size=3)
said = st.one_of(texts, spaces, st.builds("{}{}{}".format, spaces, texts, spaces))
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = st.text("abcdefghijklmnopqrstuvwxyz_-0123456789", min_size=1, max_size=12)
# A key "_name" is TGI's own, and nobody else's.
keys = st.text(max_size=8).filter(lambda key: key != "_name")
calls = st.builds(Call, names, st.dictionaries(keys, json_values, max_size=4))
answers = st.builds(
    Answer,
    reasoning=said,
    text=said,
    refusal=st.just("") | said.filter(str.strip),
    calls=st.lists(calls, max_size=3).map(tuple),
)


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Draw a function that splits a text into pieces. The lengths of the pieces repeat."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6) | st.just([1_000_000]))

    def cut(text: str) -> list[str]:
        pieces, position, turn = [], 0, 0
        while position < len(text):
            end = position + lengths[turn % len(lengths)]
            pieces.append(text[position:end])
            position, turn = end, turn + 1
        return pieces

    return cut


@st.composite
def interleavings(draw: st.DrawFn) -> Callable[[list[list[Any]]], list[list[Any]]]:
    """Draw an order of the fragments of several calls. It keeps the order within each call, and that of the first fragments."""
    choices = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))

    def shuffle(deltas: list[list[Any]]) -> list[list[Any]]:
        queues: dict[int, list[list[Any]]] = {}
        for delta in deltas:
            if delta:
                queues.setdefault(delta[0]["index"], []).append(delta)
        waiting, begun, mixed, turn = list(queues.values()), 0, [], 0
        while any(waiting):
            living = [n for n in range(len(waiting)) if waiting[n] and n <= begun]
            pick = living[choices[turn % len(choices)] % len(living)] if living else begun
            mixed.append(waiting[pick].pop(0))
            begun, turn = max(begun, pick + 1), turn + 1
        return mixed

    return shuffle


def expected(answer: Answer, manner: Manner) -> list[Any]:
    """Return the result of `runs.said` for the items of a response with the output `answer`."""
    reasoning = answer.reasoning if manner.reasoning else ""
    refusal = answer.refusal if manner.refusals else ""
    calls = answer.calls[: manner.most_calls]
    items: list[Any] = [("reasoning", reasoning)] if reasoning.strip() else []
    parts = [("output_text", answer.text)] if answer.text.strip() else []
    parts += [("refusal", refusal)] if refusal.strip() else []
    if not parts and not calls and (not items or answer.text):
        parts = [("output_text", answer.text)]  # white space, or nothing at all, is an answer too
    items += [parts] if parts else []
    return items + [(call.name, call.arguments) for call in calls]
