"""The guard: differences between similar questions that are visible in any language."""

from __future__ import annotations

import inspect

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.cache import guard, normal
from responses_mw.cache.guard import RULES, difference
from responses_mw.cache.normal import same_words
from tests.support.paths import DATA


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("How do I reset my password?", "I forgot my password, how do I reset it?"),
        ("Where can I find my invoices?", "How do I download my bills?"),
        ("Wie setze ich mein Passwort zurück?", "Passwort vergessen, was tun?"),
        ("How tall is Mont Blanc?", "What is the height of Mont Blanc?"),
        ("Who wrote 'Faust'?", 'Who is the author of "Faust"?'),
        ("What happened in ١٩٨٩?", "What happened in 1989?"),
        ("I can't log in", "I cannot log in"),
        ("東京はどこですか", "東京の場所は"),
    ],
)
def test_paraphrases_are_left_to_the_judge(one: str, other: str) -> None:
    assert difference(one, other) is None


@pytest.mark.parametrize(
    ("one", "other", "rule"),
    [
        ("What happened in 1989?", "What happened in 1998?", "numbers"),
        ("from 5 to 10 apples", "from 10 to 5 apples", "numbers"),
        ("What is 10² in words?", "What is 10³ in words?", "numbers"),
        ("三个苹果", "五个苹果", "numbers"),
        ("Version 3.5?", "Version 3.6?", "numbers"),
        ("Who sang 'Help'?", "Who sang 'Yesterday'?", "quoted"),
        ("Who sang «Help»?", "Who sang “Yesterday”?", "quoted"),
        ("Delete /tmp/a please", "Delete /tmp/b please", "literals"),
        ("Is a@x.org known?", "Is b@x.org known?", "literals"),
        ("How do I use --force here?", "How do I use --all here?", "literals"),
        ("What is H2O?", "What is D2O?", "literals"),
        ("Explain max_tokens", "Explain min_tokens", "literals"),
        ("Is it 5 $?", "Is it 5 €?", "symbols"),
        ("Learn C++", "Learn C", "symbols"),
        ("Can I eat it?", "Can I not eat it?", "negations"),
        ("Why doesn't it start?", "Why does it start?", "negations"),
        ("Kann ich das essen?", "Kann ich das nicht essen?", "negations"),
        ("Kaffee mit Milch", "Kaffee ohne Milch", "negations"),
        ("Puedo entrar", "No puedo entrar", "negations"),
        ("Можно войти?", "Нельзя ли не входить?", "negations"),
        ("可以吃吗", "不可以吃吗", "negations"),
        ("What does f(x) do?", "What does g(x) do?", "code"),
        ("a = 1", "What is a?", "code"),
    ],
)
def test_a_visible_difference_is_refused(one: str, other: str, rule: str) -> None:
    assert difference(one, other) == rule
    assert difference(other, one) == rule
    assert rule in RULES


@given(st.text(), st.text())
def test_the_guard_is_reflexive_and_symmetric(one: str, other: str) -> None:
    assert difference(one, one) is None
    assert difference(one, other) == difference(other, one)


@pytest.mark.parametrize("name", ["cache_pairs.jsonl", "cache_pairs_heldout.jsonl"])
def test_without_a_judge_no_trap_is_a_hit_and_the_guard_refuses_few_paraphrases(name: str) -> None:
    pairs = [orjson.loads(line) for line in (DATA / name).read_bytes().splitlines()]
    for pair in pairs:
        if not pair["same"]:
            assert difference(pair["one"], pair["other"]) or not same_words(pair["one"], pair["other"]), pair
    paraphrases = [pair for pair in pairs if pair["same"]]
    refused = [pair for pair in paraphrases if difference(pair["one"], pair["other"])]
    assert len(refused) <= 0.05 * len(paraphrases), refused


def test_the_guard_and_its_words_have_at_most_200_lines() -> None:
    assert sum(len(inspect.getsource(module).splitlines()) for module in (guard, normal)) <= 200
