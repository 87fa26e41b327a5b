"""The fast path for frames that differ only in their text. It returns the same chunks as the parser."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.protocol.chat.chunks import DeltaFastPath, SurrogateHalves
from responses_mw.protocol.response.builder import ResponseOptions
from responses_mw.protocol.sse import encode
from tests.protocol.runs import PLAIN, assembler, chunk, fragment

TEXTS = st.text(min_size=1) | st.sampled_from(
    [" the", "\n", '"', "\\", "\\u0041", "}]}", '"}}]}', "é", "漢字", "\u2028", "\x7f", " "]
)
MEMBERS = st.sampled_from(["content", "reasoning", "reasoning_content"])


def _chunk(member: str, text: str, **others: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"role": "assistant", member: text}, "logprobs": None, "finish_reason": None}
    return {"id": "chatcmpl-1", "choices": [choice], **others}


def _frame(chunk: dict[str, Any], *, spaced: bool = False, ascii_only: bool = False) -> bytes:
    separators = (", ", ": ") if spaced else (",", ":")
    return json.dumps(chunk, separators=separators, ensure_ascii=ascii_only).encode(errors="surrogatepass")


def _read(frame: bytes) -> bytes:
    return b"data: " + frame + b"\n\n"


@given(st.lists(st.tuples(MEMBERS, TEXTS, st.integers(0, 1)), max_size=12), st.booleans(), st.booleans())
def test_the_fast_path_returns_the_same_chunks_as_the_parser(
    told: list[tuple[str, str, int]], spaced: bool, ascii_only: bool
) -> None:
    shortcut = DeltaFastPath()
    for member, text, created in told:
        chunk = _chunk(member, text, created=created)
        frame = _frame(chunk, spaced=spaced, ascii_only=ascii_only)
        read = shortcut.text(frame)
        assert read in (None, (member, text))
        assert shortcut.text(_read(frame), is_read=True) == read
        if read is None:
            shortcut.learn(frame, chunk)


@pytest.mark.parametrize("member", ["content", "reasoning", "reasoning_content"])
@pytest.mark.parametrize("spaced", [True, False])
def test_the_fast_path_is_used_from_the_second_frame_on(member: str, spaced: bool) -> None:
    shortcut = DeltaFastPath()
    first = _chunk(member, "Hel")
    shortcut.learn(_frame(first, spaced=spaced), first)
    assert shortcut.text(_frame(_chunk(member, "lo"), spaced=spaced)) == (member, "lo")
    assert shortcut.text(_frame(_chunk(member, "schön"), spaced=spaced)) == (member, "schön")
    assert shortcut.text(_read(_frame(_chunk(member, "lo"), spaced=spaced)), is_read=True) == (member, "lo")


@pytest.mark.parametrize("text", ["", 'a "word"', "back\\slash", "line\nbreak", "bell\x07"])
def test_a_text_with_json_escapes_is_parsed(text: str) -> None:
    shortcut = DeltaFastPath()
    first = _chunk("content", "Hel")
    shortcut.learn(_frame(first), first)
    assert shortcut.text(_frame(_chunk("content", text))) is None


@pytest.mark.parametrize(
    "read",
    [
        _read(_frame(_chunk("content", "x")))[:-1],
        _read(_frame(_chunk("content", "x"))) * 2,
        _read(_frame(_chunk("content", "?")).replace(b"?", b"\xff")),
        _read(_frame(_chunk("content", "?")).replace(b"?", b"\x01")),
        b"",
    ],
    ids=["cut", "two", "not UTF-8", "control character", "empty"],
)
def test_data_that_is_not_one_complete_valid_frame_is_parsed(read: bytes) -> None:
    shortcut = DeltaFastPath()
    first = _chunk("content", "Hel")
    shortcut.learn(_frame(first), first)
    assert shortcut.text(read, is_read=True) is None
    assert shortcut.text(read.removeprefix(b"data: ")) is None


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": None},
        {"choices": []},
        {"choices": [None]},
        {"choices": [{"delta": None}]},
        {"choices": [{"delta": {"content": ["x"]}}]},
        {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]},
        {"choices": [{"delta": {"content": "x"}, "logprobs": {"content": []}}]},
        {"choices": [{"index": 1, "delta": {"content": "x"}}]},
        {"choices": [{"delta": {"content": "x", "reasoning": "x"}}]},
        {"choices": [{"delta": {"content": "x", "tool_calls": [{}]}}]},
        {"choices": [{"delta": {"refusal": "x"}}]},
        {"choices": [{"delta": {"content": "x"}}], "usage": {"prompt_tokens": 1}},
    ],
)
def test_a_chunk_with_more_than_a_text_is_no_template(chunk: dict[str, Any]) -> None:
    shortcut = DeltaFastPath()
    shortcut.learn(_frame(chunk), chunk)
    assert shortcut.text(_frame(chunk)) is None


def test_a_chunk_with_a_duplicate_member_is_no_template() -> None:
    shortcut = DeltaFastPath()
    chunk = _chunk("content", "x", message={"content": "x"})
    shortcut.learn(_frame(chunk), chunk)
    assert shortcut.text(_frame(_chunk("content", "y", message={"content": "x"}))) is None


def test_the_fast_path_is_switched_off_for_a_server_whose_frames_never_repeat() -> None:
    shortcut = DeltaFastPath()
    for created in range(20):
        chunk = _chunk("content", "x", created=created)
        assert shortcut.text(_frame(chunk)) is None
        shortcut.learn(_frame(chunk), chunk)
    assert shortcut.text(_frame(_chunk("content", "y", created=7))) == ("content", "y")


_CHARACTERS = 'a"\\u\u00e9\U0001f600\U0001f601\ufeff'
_HALVES = st.text(st.sampled_from([*_CHARACTERS, "\ud83d", "\ude00"]), max_size=8)


def _cut(text: str, cuts: set[int]) -> list[str]:
    """Cut a text by UTF-16 code units, as a server of another language does."""
    encoded = text.encode("utf-16-le", "surrogatepass")
    ends = [0, *sorted(cut for cut in cuts if 2 * cut < len(encoded)), len(encoded) // 2]
    return [encoded[2 * begin : 2 * end].decode("utf-16-le", "surrogatepass") for begin, end in pairwise(ends)]


def _joined(frames: list[bytes]) -> list[Any]:
    halves = SurrogateHalves()
    whole = [whole for frame in frames for whole in halves.feed(frame)] + halves.flush()
    return [orjson.loads(frame) for frame in whole]


@given(st.text(st.sampled_from(_CHARACTERS), max_size=8), st.sets(st.integers(0, 15)), MEMBERS, st.booleans())
def test_text_split_between_code_units_is_joined(text: str, cuts: set[int], member: str, upper: bool) -> None:
    frames = [json.dumps(_chunk(member, piece)).encode() for piece in _cut(text, cuts)]
    if upper:
        frames = [re.sub(rb"ud[89a-f]..", lambda half: b"u" + half[0][1:].upper(), frame) for frame in frames]
    assert "".join(chunk["choices"][0]["delta"][member] for chunk in _joined(frames)) == text


@given(_HALVES, st.sets(st.integers(0, 15)))
def test_each_unpaired_half_of_a_character_is_replaced(text: str, cuts: set[int]) -> None:
    frames = [json.dumps({"delta": piece, "logprobs": [[piece, "\\"], piece]}).encode() for piece in _cut(text, cuts)]
    told = _joined(frames)
    assert "".join(chunk["delta"] for chunk in told) == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert len(told) == len(frames)


def test_half_a_character_delays_chunks_without_text_only_briefly() -> None:
    halves = SurrogateHalves()
    assert halves.feed(rb'{"choices":[{"delta":{"content":"a\ud83d"}}]}') == []
    empty = b'{"choices":[{"delta":{"content":""}}]}'
    released = [halves.feed(empty) for _ in range(100)]
    first = next(at for at, frames in enumerate(released) if frames)
    assert first < 30
    assert released[first] == [rb'{"choices":[{"delta":{"content":"a\ufffd"}}]}', *[empty] * (first + 1)]
    assert released[first + 1 :] == [[empty]] * (99 - first)


@pytest.mark.parametrize(
    "between",
    [
        {"choices": [], "usage": {"prompt_tokens": 1}},
        {"choices": [{"index": 0, "delta": {}}]},
        {"choices": [{"index": 0, "delta": {"role": "assistant"}}]},
        {"choices": [{"index": 0, "delta": {"content": None}}], "error": None},
        {"type": "keepalive"},
    ],
)
def test_a_chunk_without_text_does_not_separate_the_halves_of_a_character(between: dict[str, Any]) -> None:
    cut = [{"choices": [{"delta": {"content": half}}]} for half in ("a\ud83d", "\ude00b")]
    told = _joined([json.dumps(chunk).encode() for chunk in (cut[0], between, cut[1])])
    assert told == [{"choices": [{"delta": {"content": "a"}}]}, between, {"choices": [{"delta": {"content": "\U0001f600b"}}]}]


@pytest.mark.parametrize(
    "frame",
    [
        b"[DONE]",
        b'{"error": {"message": "overloaded"}}',
        b'{"object":"error","message":"overloaded"}',
        b'{"type":"error","message":"overloaded"}',
        b'{"type":"response.completed","response":{"output":[]}}',
        rb'{"type":"response.incomplete","response":{"output_text":"a\ud83d"}}',
    ],
)
def test_half_a_character_does_not_delay_the_end_of_the_answer(frame: bytes) -> None:
    halves = SurrogateHalves()
    assert halves.feed(rb'{"choices":[{"delta":{"content":"a\ud83d"}}]}') == []
    whole = frame.replace(rb"\ud83d", rb"\ufffd")
    assert halves.feed(frame) == [rb'{"choices":[{"delta":{"content":"a\ufffd"}}]}', whole]
    assert not halves.is_holding


def test_half_a_character_delays_its_chunk_only_until_the_next_chunk() -> None:
    halves = SurrogateHalves()
    assert halves.feed(rb'{"choices":[{"delta":{"content":"a\ud83d"}}]}') == []
    assert halves.is_holding
    assert halves.feed(b"[DONE]") == [rb'{"choices":[{"delta":{"content":"a\ufffd"}}]}', b"[DONE]"]
    assert not halves.is_holding


_PLAIN_TEXTS = st.text(min_size=1).filter(lambda text: text.isprintable() and not set(text) & {'"', "\\"})
_OTHERS = st.sampled_from(
    [
        chunk(content='a "quote"'),
        chunk(content="<think>"),
        chunk(reasoning="Hm", logprobs=None),
        chunk(tool_calls=[fragment(0, "{}", name="f")]),
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
    ]
)
_FORMS = [PLAIN, ResponseOptions(summary=True), ResponseOptions(open_reasoning=True), ResponseOptions(think_tag="think")]


@given(st.lists(st.tuples(MEMBERS, _PLAIN_TEXTS) | _OTHERS, max_size=12), st.sampled_from(_FORMS))
def test_a_delta_built_from_bytes_equals_the_encoded_event(told: list[Any], options: ResponseOptions) -> None:
    quick, plain = assembler(options), assembler(options)
    frames, events = encode(quick.start()), plain.start()
    for one in told:
        delta = quick.delta(one) if isinstance(one, tuple) else None
        frames += encode(quick.feed(one)) if delta is None else delta
        events += plain.feed(one)
        assert quick.ended == plain.ended
    for one in (quick, plain):
        one.fail("server_error", "It broke.")
    assert frames + encode(quick.terminal()) == encode(events + plain.terminal())


def test_only_a_text_that_continues_the_open_text_uses_the_fast_path() -> None:
    assembling = assembler()
    assert assembling.delta(("content", "Hel")) is None
    assembling.feed(("content", "Hel"))
    delta = assembling.delta(("content", "lo"))
    assert delta is not None
    assert b'"delta":"lo","logprobs":[],"sequence_number":3}' in delta
    assert assembling.delta(("reasoning", "Hm")) is None
    assembling.feed(chunk(finish_reason="stop"))
    assembling.end_turn()
    assert assembling.delta(("content", "more")) is None
