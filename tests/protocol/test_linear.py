"""CPU time is linear in the size of a request. Each kind of request is measured at one size and at four times that size.

Only the time that this thread spent is counted, and the best of several tries: a busy machine changes neither much. What seems
not to be linear is measured again with larger sizes, because the caches of the processor and the allocator change times by a
constant factor, but quadratic work differs the more from linear work the larger it is.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from secrets import token_hex
from typing import Any

import orjson
import pytest

from responses_mw.protocol import json_limits
from responses_mw.protocol.chat.call_names import OfferedNames
from responses_mw.protocol.chat.chunks import SurrogateHalves
from responses_mw.protocol.chat.messages import to_messages
from responses_mw.protocol.chat.request import to_chat
from responses_mw.protocol.chat.tool_calls import ToolCalls
from responses_mw.protocol.chat.truncation import Truncation, truncated
from responses_mw.protocol.citation_markers import MarkerFilter
from responses_mw.protocol.citations import Source, Sources, visible_citations
from responses_mw.protocol.dialects import OPENAI
from responses_mw.protocol.request.create import parse
from responses_mw.protocol.request.items import parse_input, parse_previous
from responses_mw.protocol.request.tools import check_tool_choice, check_tools, choice_names, distinct, offered
from responses_mw.protocol.response import compaction
from responses_mw.protocol.response.replay import OutputReplay
from responses_mw.protocol.response.text import ThinkingSplitter
from responses_mw.protocol.sse import SSEDecoder
from responses_mw.protocol.tool_kinds.client_defined import as_pattern
from responses_mw.protocol.tool_kinds.form import CallForm, OfferedFunction
from responses_mw.protocol.tool_kinds.free_text import text_in
from responses_mw.tools.mcp_search import _read

TIMES = 4
MOST = 2.2 * TIMES
"""Linear work takes `TIMES` as long, quadratic work `TIMES` times that."""

Work = Callable[[], object]


def _seconds(work: Work) -> float:
    gc.disable()
    try:
        began = time.thread_time()
        work()
        return time.thread_time() - began
    finally:
        gc.enable()


def is_linear(make: Callable[[int], Work], size: int) -> bool:
    """Return whether the work that `make` prepares takes linear time, comparing `size` with `TIMES` that size."""
    for growth in (1, 2, 4):
        small = big = float("inf")
        for _ in range(5):
            small = min(small, _seconds(make(growth * size)))
            big = min(big, _seconds(make(growth * TIMES * size)))
            if big <= MOST * small:
                return True
    return False


def _asked(**members: Any) -> Work:
    """Parse the request and convert it to a chat request."""
    body = {"model": "m", "input": "Hi", **members}

    def work() -> None:
        request = parse(body)
        functions = offered(request.tools, request.items)
        to_chat(request, request.items, OPENAI, model="m", offered=functions)

    return work


def _message(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


def _call(number: Any, **members: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}", **members}


def _output(number: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": ""}


def _tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "name": f"tool_{index}"} for index in range(count)]


def many_parts(size: int) -> Work:
    return _asked(input=_message([{"type": "input_text", "text": "a"}] * size))


def long_text(size: int) -> Work:
    return _asked(input="a quick brown fox, " * size)


def deep_lists(size: int) -> Work:
    nested: Any = 1
    for _ in range(50):
        nested = [nested]
    return _asked(guided_json=[nested] * size)


def calls_and_outputs_apart(size: int) -> Work:
    cut = [_call(index, status="incomplete") for index in range(size)]
    later = [_call(f"later{index}") for index in range(size)]
    return _asked(input=[*cut, *(_output(f"later{index}") for index in range(size)), *later])


def calls_answered_backwards(size: int) -> Work:
    return _asked(input=[*map(_call, range(size)), *map(_output, reversed(range(size)))])


def reused_call_ids(size: int) -> Work:
    return _asked(input=[*(_call(0) for _ in range(size)), *(_output(0) for _ in range(size))])


def messages_answered_backwards(size: int) -> Work:
    calls = [{"id": f"c{index}", "function": {"name": "f", "arguments": "{}"}} for index in range(size)]
    told = [{"role": "tool", "tool_call_id": f"c{index}", "content": ""} for index in reversed(range(size))]
    return lambda: parse_previous([{"role": "assistant", "content": "", "tool_calls": calls}, *told])


def messages_answered_by_name(size: int) -> Work:
    calls = [{"function": {"name": f"f{index}", "arguments": "{}"}} for index in range(size)]
    told = [{"role": "tool", "name": f"f{index}", "content": ""} for index in reversed(range(size))]
    return lambda: parse_previous([{"role": "assistant", "content": "", "tool_calls": calls}, *told])


def tools_of_one_name(size: int) -> Work:
    functions = [
        OfferedFunction({"type": "function", "name": "f"}, CallForm("function_call", {"name": "f", "namespace": str(index)}))
        for index in range(size)
    ]
    return lambda: distinct(functions)


def tools_of_long_names(size: int) -> Work:
    names = [f"{'x' * 58}{index:06d}" for index in range(size)] * 2
    functions = [
        OfferedFunction({"type": "function", "name": name}, CallForm("function_call", {"name": name})) for name in names
    ]
    return lambda: distinct(functions)


def expressions(size: int) -> Work:
    expressions = [f"{token_hex(4)}(a|b)+" for _ in range(size)]
    return lambda: [as_pattern(one) for one in expressions]


def searches_that_find(size: int) -> Work:
    found = {"type": "tool_search_output", "call_id": "c", "tools": _tools(size)}
    return _asked(input=[{"type": "tool_search_call", "call_id": "c", "arguments": {}}, found])


def allowed_tools(size: int) -> Work:
    tools = check_tools(_tools(size))
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": f"tool_{size - 1}"}] * size}

    def work() -> None:
        choice_names(check_tool_choice(choice, tools), offered(tools, []))

    return work


def compacted_users(size: int) -> Work:
    before = parse_input([{"role": "user", "content": f"before {index}"} for index in range(size)])
    waiting = parse_input([{"role": "user", "content": f"waiting {index}"} for index in range(size)])
    item = {"type": "compaction", "encrypted_content": "x"}
    sealed = orjson.dumps({"summary": "All.", "waiting": waiting})
    return lambda: compaction.open_last([*before, item], lambda _: sealed)


def truncated_history(size: int) -> Work:
    items = [one for index in range(size) for one in (*_message("Hi"), _call(index), _output(index))]
    parsed = parse_input(items)
    return lambda: truncated(parsed, lambda some: len(some) < size) + Truncation(parsed).without(1)


def reasoning_and_text(size: int) -> Work:
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}] * 2}
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]}
    items = parse_input([*_message("Hi"), *([reasoning, answer] * size)])
    return lambda: to_messages(items, OPENAI)


def tags_in_one_chunk(size: int) -> Work:
    text = "<think>a</think>" * size
    return lambda: ThinkingSplitter("think").feed(text)


def cited_text(size: int) -> Work:
    text = "[a](https://b [1] `x https://c.d/e 【1】 [[ " * size
    sources = Sources()
    sources.add(Source(1, "", url="https://c.d/e"))
    return lambda: [*visible_citations(text, sources)]


def text_with_markers(size: int) -> Work:
    text, sources = "【1】【1【【1†【file-12345678】 【 a" * size, Sources()
    sources.add(Source(1, "a.md", file_id="file-1"))
    tokens: list[tuple[int, Any]] = [(end, {}) for end in range(1, len(text) + 1)]
    return lambda: MarkerFilter(sources).feed(text, tokens)


def found_pages(size: int) -> Work:
    pages = ["-\n", "[", "title\n", "title**", "[a](https:"]
    return lambda: [list(_read("https://a.example/x " + page * size)) for page in pages]


def arguments_in_pieces(size: int) -> Work:
    def work() -> None:
        calls = ToolCalls(OfferedNames())
        calls.feed({"index": 0, "function": {"name": "f", "arguments": '{"a": ['}})
        for _ in range(size):
            calls.feed({"index": 0, "function": {"arguments": "{},"}})
            calls.feed({"index": 0, "function": {"arguments": "{}"}})
            assert not calls.calls[0].is_whole()

    return work


def arguments_that_grow(size: int) -> Work:
    """Return fragments that repeat all earlier ones. Each is three times as long, so that the input is linear in `size`."""
    text = '{"a":"' + "b" * size + '"}'
    pieces = [text[: len(text) * step // 20] for step in range(1, 21)]
    return _fed(*pieces, text, orjson.dumps(text).decode())


def objects_in_one_fragment(size: int) -> Work:
    return _fed("{}" * size + '{"a":1}' * size + '"' + "{}" * size)


def objects_in_strings(size: int) -> Work:
    return _fed('{"a":1}', *(orjson.dumps('{"a":1}' * 5).decode() for _ in range(size)), *(["{"] * size))


def _fed(*pieces: str) -> Work:
    def work() -> None:
        calls = ToolCalls(OfferedNames())
        calls.feed({"index": 0, "function": {"name": "f"}})
        for piece in pieces:
            calls.feed({"index": 0, "function": {"arguments": piece}})
        calls.end(is_cut=False)
        assert len(calls.calls) == 1

    return work


def texts_in_arguments(size: int) -> Work:
    wholes = ['{"a": ["b", 1, ' + '{"c": "d"}, ' * size + "1]}", '{"a": "' + "\\d\n" * size + '"}']
    return lambda: [text_in(whole, "input") for whole in wholes]


def frame_in_small_reads(size: int) -> Work:
    def work() -> None:
        decoder = SSEDecoder()
        decoder.feed(b"data: ")
        for _ in range(size):
            assert not decoder.feed(b"a" * 256)
        assert len(decoder.feed(b"\n\n")[0]) == 256 * size

    return work


def halves_of_characters(size: int) -> Work:
    halves = rb"\\" * size + rb"\ud83d" * size
    frame = b'{"a": "%b", "b": "%b"}' % (halves, halves)
    return lambda: [SurrogateHalves().feed(frame), SurrogateHalves().feed(frame + b'"')]


def text_that_ends_again_and_again(size: int) -> Work:
    place = {"output_index": 0, "content_index": 0}
    item = {"type": "message", "content": [{"type": "output_text", "text": ""}]}
    steps = [
        {"type": "response.output_text.delta", **place, "delta": "a" * 3000},
        {"type": "response.output_text.done", **place, "text": ""},
        {"type": "response.content_part.done", **place},
    ]

    def work() -> None:
        replay = OutputReplay([])
        replay.take({"type": "response.output_item.added", "item": item})
        for _ in range(size):
            for step in steps:
                replay.take(step)

    return work


def frames_in_one_read(size: int) -> Work:
    data = b"data: {}\r\n\r\n" * size
    return lambda: SSEDecoder().feed(data)


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (many_parts, 2000),
        (long_text, 50_000),
        (deep_lists, 200),
        (calls_and_outputs_apart, 500),
        (calls_answered_backwards, 500),
        (reused_call_ids, 500),
        (messages_answered_backwards, 500),
        (messages_answered_by_name, 500),
        (tools_of_one_name, 300),
        (tools_of_long_names, 300),
        (expressions, 200),
        (searches_that_find, 500),
        (allowed_tools, 200),
        (compacted_users, 500),
        (truncated_history, 500),
        (reasoning_and_text, 1000),
        (tags_in_one_chunk, 10_000),
        (cited_text, 1000),
        (text_with_markers, 1000),
        (found_pages, 500),
        (arguments_in_pieces, 1000),
        (arguments_that_grow, 20_000),
        (objects_in_one_fragment, 5_000),
        (objects_in_strings, 1000),
        (texts_in_arguments, 5000),
        (frame_in_small_reads, 10_000),
        (frames_in_one_read, 10_000),
        (halves_of_characters, 5_000),
        (text_that_ends_again_and_again, 500),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_cpu_time_is_linear_in_the_size_of_the_request(
    make: Callable[[int], Work], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_limits, "MAX_ITEMS", 10**9)
    monkeypatch.setattr(json_limits, "MAX_TOOLS", 10**9)
    assert is_linear(make, size)


def test_quadratic_work_is_not_linear() -> None:
    def quadratic(size: int) -> Work:
        numbers = list(range(size))
        return lambda: [number for number in numbers if number + size in numbers]

    assert not is_linear(quadratic, 300)
