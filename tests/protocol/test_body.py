"""JSON of clients: too large bodies are refused before they are decoded, and invalid JSON is refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.errors import BadRequest, TooLarge
from responses_mw.protocol import json_limits
from responses_mw.protocol.json_limits import MAX_VALUES, decode, has_more_values, memory, memory_bound

texts = st.text(alphabet='a",[{\\é', max_size=6)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


def number_of(value: Any) -> int:
    """Return the number of members and elements. An empty list or object counts as one."""
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return max(len(inner), 1) + sum(map(number_of, inner))


@given(value=values, at_once=st.integers(1, 9))
def test_values_are_counted_in_the_encoded_text_but_not_within_strings(value: Any, at_once: int) -> None:
    number, data = number_of(value), orjson.dumps(value)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_limits, "_CHUNK_SIZE", at_once)
        assert not has_more_values(data, number)
        assert number == 0 or has_more_values(data, number - 1)


@pytest.mark.parametrize("value", ["[]", "{}", "1", '"a"', "[1,2]"])
def test_a_body_with_too_many_values_is_refused_before_it_is_decoded(value: str) -> None:
    cut = f'{{"input": "Hi", "x": [{",".join([value] * (MAX_VALUES + 1))}'.encode()  # no JSON: who decoded it would say so
    with pytest.raises(TooLarge) as caught:
        decode(cut)
    assert (caught.value.status, caught.value.code) == (413, "request_too_many_values")


def test_a_long_text_counts_as_one_value() -> None:
    written = {"input": 'a, "b", [c], {d}: \\ ' * MAX_VALUES}
    assert decode(orjson.dumps(written)) == written


@pytest.mark.parametrize(
    "data",
    [b"NaN", b"-Infinity", b"1e999", b'"\\ud800"', b'{"\\udc00": 1}', b'"\xed\xa0\x80"', b"[" * 5000, b"\xef\xbb\xbf{}", b""],
)
def test_invalid_json_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(data)
    assert caught.value.code == "invalid_json"


def test_duplicate_members_and_large_numbers_are_decoded_so_that_they_can_be_encoded() -> None:
    decoded = decode(b'{"a": 1, "a": 2, "big": 123456789012345678901234567890, "most": 18446744073709551615}')
    assert orjson.loads(orjson.dumps(decoded)) == {"a": 2, "big": 1.2345678901234568e29, "most": 18446744073709551615}


def test_json_that_is_nested_too_deeply_is_refused() -> None:
    assert decode(b"[" * 64 + b"]" * 64)
    with pytest.raises(TooLarge, match="deeper than 64"):
        decode(b"[" * 66 + b"]" * 66)


@pytest.mark.parametrize("element", ["{}", "[]", '{"a":{}}', '"ab"', "1.5", '{"type":"input_text","text":"hi"}'])
def test_the_memory_of_small_values_is_not_underestimated(element: str) -> None:
    text = f"[{','.join([element] * 10_000)}]".encode()
    tracemalloc.start()
    value = orjson.loads(text)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken <= memory(value, len(text)) <= memory_bound(value, text) <= 10 * taken


def test_the_estimated_memory_of_texts_is_about_their_size() -> None:
    texts = [
        "words without end, " * 50,
        "if (a[0]) {b(c, d);}" * 50,
        "one comma in each sentence of some length, as in prose. " * 50,
    ]
    for value in texts:
        text = orjson.dumps([value])
        assert len(text) <= memory([value], len(text)) <= 1.3 * len(text)
        assert memory([value], len(text)) <= memory_bound([value], text) <= 4 * len(text)
