"""The built-in embeddings."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from responses_mw.embeddings import NoEmbedding
from responses_mw.embeddings.static import DIMENSION, StaticEmbedder
from responses_mw.embeddings.tokenizer import MAX_WORD, Tokenizer
from responses_mw.embeddings.vector import Vector

REFERENCE = {
    "How do I reset my password?": [1128, 437, 306, 10092, 590, 4800, 29973],
    "Zurücksetzen: geht’s?": [16318, 3675, 842, 2256, 29901, 25440, 30010, 29879, 29973],
    "パスワードをリセット 🙂": [
        29871, 30715, 30255, 31028, 30185, 30335, 30396, 30303, 30885, 30317, 30279, 29871, 243, 162, 156, 133
    ],
    "x = [1, 2.50]; y_i != `z`": [
        921, 353, 518, 29896, 29892, 29871, 29906, 29889, 29945, 29900, 1385, 343, 29918, 29875, 2804, 421, 29920, 29952
    ],
}  # fmt: skip
"""The ids that the original tokenizer returns with Hugging Face's `tokenizers`."""


async def embed(*texts: str) -> list[Vector]:
    return await StaticEmbedder().embed(texts)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from responses_mw.embeddings import static

    return static._table().tokenizer


@pytest.mark.parametrize("text", REFERENCE)
def test_the_tokens_equal_those_of_the_original_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == REFERENCE[text]


def test_white_space_does_not_change_the_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("  How\u00a0do\n\tI ") == tokenizer.encode("How do I")


def test_each_byte_of_an_unknown_character_is_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\U0001f9ff")[-4:] == [3 + byte for byte in "\U0001f9ff".encode()]
    assert tokenizer.encode("\ud800")[-1] == tokenizer.encode("?")[-1] or 3 + ord("?") in tokenizer.encode("\ud800")


def test_a_long_word_is_tokenized_in_pieces(tokenizer: Tokenizer) -> None:
    word = "abc" * 5000
    assert len(tokenizer.encode(word)) >= len(word) / MAX_WORD
    assert tokenizer.encode(word)[:3] == tokenizer.encode(word[:500])[:3]


async def test_vectors_have_length_one_and_the_stated_dimension() -> None:
    [one, other] = await embed("Hi", "The capital of France is Paris." * 50)
    for vector in (one, other):
        assert vector.dtype == np.float32
        assert len(vector) == DIMENSION == StaticEmbedder.dimension
        assert float(np.linalg.norm(vector)) == pytest.approx(1)


async def test_a_paraphrase_is_nearer_than_another_question() -> None:
    asked, paraphrase, other, unrelated = await embed(
        "How do I reset my password?",
        "I forgot my password, how do I reset it?",
        "How do I change my address?",
        "Why is the sky blue?",
    )
    assert asked @ paraphrase > 0.8 > asked @ other > asked @ unrelated


async def test_a_blank_text_has_no_vector() -> None:
    with pytest.raises(NoEmbedding, match="blank"):
        await embed("A text", " \n ")


async def test_a_long_text_leaves_the_event_loop_free() -> None:
    await embed("loaded")
    turns, embedding = 0, asyncio.create_task(embed("one more word " * 50_000))
    while not embedding.done():
        turns += 1
        await asyncio.sleep(0)
    [long] = embedding.result()
    [short] = await embed("one more word")
    assert long == pytest.approx(short, abs=1e-4)
    assert turns > 2  # inline, the task would have ended in the first turn
