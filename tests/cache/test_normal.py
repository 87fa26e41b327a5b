"""The normal form of questions, and texts with the same words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.cache.normal import normalize, same_words


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is the capital of France?", "what is  the capital of France"),
        ("What is the capital of France?", " What is the capital of France ??\t"),
        ("Explain entropy.", "explain entropy"),
        ("Explain entropy!", "explain entropy…"),
        ("I can't log in", "I can\u2019t log in."),
        ("Ze\u0301ro", "zéro"),
        ("Name the pages 5–7", "Name the pages 5-7."),
        ("东京有多少人。", "东京有多少人"),
        ("x = [1, 2]", "  x = [1, 2]\n"),
    ],
)
def test_the_form_of_a_question_makes_no_difference(one: str, other: str) -> None:
    assert normalize(one) == normalize(other)
    assert same_words(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("He left", "He left?"),  # only a question mark makes it a question
        ("US exports", "us exports"),
        ("Is Turkey big?", "Is turkey big?"),
        ("What is 5!?", "What is 5?"),
        ("What is n!", "What is n"),
        ("Repeat: Hello!", "Repeat: Hello."),
        ('Spell "Hello!"', 'Spell "Hello"'),
        ("Fix this:\nX = 1", "Fix this:\nx = 1"),
        ("Print(x)", "print(x)"),
        ("What is 10²?", "What is 102?"),
        ("What does x++ do?", "What does ++x do?"),
        ("What is .net?", "What is net?"),
        ("Dog bites man", "Man bites dog"),
        ("?", "!"),
    ],
)
def test_texts_that_may_differ_in_meaning_have_different_forms(one: str, other: str) -> None:
    assert normalize(one) != normalize(other)
    assert not same_words(one, other)


def test_hyphens_between_words_are_a_difference_of_form_only_for_the_semantic_cache() -> None:
    one, other = "How do I change my e-mail?", "How do I change my e mail?"
    assert normalize(one) != normalize(other)
    assert same_words(one, other)
    assert not same_words("Was it -5 degrees?", "Was it 5 degrees?")


@pytest.mark.parametrize("piece", ["?", "? ", ".", "!", "a!", "a-", "\u2019", "a."])
def test_a_long_text_is_normalized_in_linear_time(piece: str) -> None:
    normalize("ab" + piece * (2_000_000 // len(piece)) + "c")  # a pattern that goes back and forth would take hours


@given(st.text())
def test_a_normal_form_is_its_own_normal_form_or_verbatim(text: str) -> None:
    assert normalize(text) == normalize(f" {text}  ".strip())
    assert same_words(text, text)
    assert normalize(text) or not text.strip()
