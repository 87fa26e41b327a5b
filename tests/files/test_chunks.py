"""Documents are split into chunks that overlap, at the ends of paragraphs, lines and sentences."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.files.chunks import Chunking, split

TEXTS = st.lists(st.sampled_from(["word", "end.", "x" * 200, "\n", "\n\n", " ", "é", "\t"]), max_size=300).map(" ".join)


def one(_word: str) -> int:
    return 1


def tokens(chunk: str) -> int:
    """Count the tokens of a text: one for each word."""
    return sum(-(-len(word) // 64) for word in chunk.split())


@given(TEXTS, st.integers(1, 50), st.floats(0, 0.5))
def test_no_word_is_lost_and_no_chunk_is_too_large(text: str, size: int, share: float) -> None:
    chunks = list(split(text, one, Chunking(size, int(size * share))))
    assert all(0 < tokens(chunk.text) <= size for chunk in chunks)
    end = 0
    for begin, chunk in chunks:
        assert text[begin:].startswith(chunk)
        assert not text[end:begin].strip()  # nothing is left out in between
        end = begin + len(chunk)
    assert not text[end:].strip()


def test_neighbours_share_up_to_the_overlap() -> None:
    words = [f"w{number}" for number in range(1000)]
    chunks = [chunk.text.split() for chunk in split(" ".join(words), one, Chunking(100, 50))]
    for before, after in pairwise(chunks):
        shared = set(before) & set(after)
        assert 37 <= len(shared) <= 50
    assert sorted({word for chunk in chunks for word in chunk}, key=words.index) == words


def test_a_chunk_ends_with_a_paragraph_rather_than_a_line_or_a_sentence() -> None:
    text = " ".join(["a"] * 75) + " b.\n\nc" + " d" * 5 + "\ne" + " f." * 60
    assert next(split(text, one, Chunking(100, 0))).text.endswith(" b.")
    text = " ".join(["a"] * 80) + " b.\nc" + " d" * 5 + ". e" + " f" * 60
    assert next(split(text, one, Chunking(100, 0))).text.endswith(" b.")
    text = " ".join(["a"] * 80) + " b. c" + " d" * 90
    assert next(split(text, one, Chunking(100, 0))).text.endswith(" b.")


def test_words_count_by_their_number_of_tokens() -> None:
    chunks = list(split(" ".join(["long"] * 10), len, Chunking(8, 0)))
    assert chunks == [(10 * number, "long long") for number in range(5)]
    assert list(split("word", lambda _: 100, Chunking(8, 0))) == [(0, "word")]  # it cannot be split
    mixed = split("a long b", {"a": 1, "long": 9, "b": 1}.__getitem__, Chunking(8, 0))
    assert [chunk.text for chunk in mixed] == ["a", "long", "b"]


@pytest.mark.parametrize("gap", [" ", "\n", "\t \n"])
def test_space_between_words_does_not_make_a_chunk_long(gap: str) -> None:
    text = (gap * 10_000).join(["a", "b", "c d e", "f"])
    assert max(len(chunk.text) for chunk in split(text, one, Chunking(100, 50))) < 10
    text = (gap * 500).join(["word"] * 1000)
    assert max(len(chunk.text) for chunk in split(text, one, Chunking(100, 50))) <= 100 * 2 * 64


def test_an_overlap_of_more_than_half_is_refused() -> None:
    with pytest.raises(ValueError, match="half"):
        Chunking(100, 51)


def test_an_empty_text_has_no_chunks() -> None:
    assert not list(split(" \n ", one))
