"""The words of chunks are counted, and the counts are merged, selected and encoded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.files.words import (
    Words,
    count_words,
    decode_words,
    encode_words,
    merge_words,
    number_of,
    select_words,
    words_of,
)

TEXTS = st.lists(st.text("ab c", max_size=12), max_size=6)


def same(one: Words, other: Words) -> bool:
    names = ("lengths", "numbers", "ends", "chunks", "counts")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The café's menu, 3.5 EUR", ["the", "café", "s", "menu", "3", "5", "eur"]),
        ("STRASSE Straße", ["strasse", "strasse"]),
        ("max_bytes", ["max_bytes"]),
        ("東京都に住む", ["東京", "京都", "都に", "に住", "住む"]),
        ("日 vLLM日本語", ["日", "vllm", "日本", "本語"]),
        ("วันหยุด", ["วั", "ัน", "นห", "หย", "ยุ", "ุด"]),
        ("휴가 일수", ["휴가", "일수"]),
        ("x" * 100, ["x" * 64]),
        ("...", []),
    ],
)
def test_a_text_is_split_into_normalized_words(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def test_the_postings_of_a_word_name_the_chunks_that_contain_it() -> None:
    words = count_words(["a b a", "", "b c"])
    where = words.postings(number_of("a"))
    assert (words.chunks[where].tolist(), words.counts[where].tolist()) == ([0], [2])
    assert words.chunks[words.postings(number_of("b"))].tolist() == [0, 2]
    assert words.chunks[words.postings(number_of("d"))].tolist() == []
    assert words.lengths.tolist() == [3, 0, 2]


@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_merging_words_equals_counting_all_texts_together(parts: list[list[str]]) -> None:
    assert same(merge_words([count_words(part) for part in parts]), count_words([text for part in parts for text in part]))


@given(TEXTS, st.data())
def test_selecting_words_equals_counting_the_selected_texts(texts: list[str], data: st.DataObject) -> None:
    selected = [data.draw(st.booleans()) for _ in texts]
    kept = [text for text, is_kept in zip(texts, selected, strict=True) if is_kept]
    assert same(select_words(count_words(texts), np.array(selected, np.bool_)), count_words(kept))


@given(TEXTS)
def test_encoding_and_decoding_words_loses_nothing(texts: list[str]) -> None:
    words = count_words(texts)
    assert same(decode_words(encode_words(words), len(texts)), words)


def test_a_word_that_is_very_frequent_in_a_chunk_is_counted_up_to_a_maximum() -> None:
    assert count_words(["a " * 1000]).counts.tolist() == [255]


def test_damaged_words_are_refused() -> None:
    texts = ["a b", "b c d", "a"]
    data = encode_words(count_words(texts))
    for end in range(len(data)):
        with pytest.raises(ValueError, match=r"truncated|inconsistent"):
            decode_words(data[:end], len(texts))
    for damaged in (data + b"\0", data.replace(bytes(count_words(texts).numbers[:1]), b"\xff" * 4)):
        with pytest.raises(ValueError, match=r"inconsistent|in order"):
            decode_words(damaged, len(texts))
    with pytest.raises(ValueError, match="inconsistent"):
        decode_words(encode_words(count_words(["a", "b"]))[:8] + encode_words(count_words(["a", "b", "c"]))[8:], 2)


@given(st.binary(max_size=64), st.integers(0, 4))
def test_random_bytes_are_refused_or_consistent(data: bytes, count: int) -> None:
    try:
        words = decode_words(data, count)
    except ValueError:
        return
    assert all(chunk < count for chunk in words.chunks)
    assert len(words.counts) == len(words.chunks)
