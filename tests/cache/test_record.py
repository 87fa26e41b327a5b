"""What is kept of an answer is told again as it was: the same items, texts and usage, in a whole stream of its own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.cache.entry import VERSION, Entry, Key, pack, replay, texts_of, unpack
from responses_mw.cache.guard import signature
from responses_mw.crypto import Sealer
from tests.cache.asking import ALICE, BOB, SECRET, answered, asked, run

KEY = Key(ALICE, "p" * 40, "What?", "e" * 40)
PLAIN, SEALING = Sealer(), Sealer([SECRET])

texts = st.text(min_size=1, max_size=30).filter(lambda text: bool(text.strip()))
answers = st.lists(texts, min_size=1, max_size=4).map(
    lambda texts: [("reasoning" if n % 2 else "content", text) for n, text in enumerate(reversed(texts))][::-1]
)


def without_ids(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: member for name, member in item.items() if name != "id"} for item in document["output"]]


@given(answers, st.sampled_from([{}, {"reasoning": {"summary": "auto"}}]))
def test_a_replayed_answer_differs_only_in_its_ids(texts: list[tuple[str, str]], fields: dict[str, Any]) -> None:
    first = run(asked(**fields), _chunks(texts))[1]
    kept = texts_of(first)
    assert kept is not None
    _, again = run(asked(**fields), replay(kept))
    assert without_ids(again) == without_ids(first)
    assert again["id"] != first["id"]
    assert not {item["id"] for item in again["output"]} & {item["id"] for item in first["output"]}
    assert texts_of(again) == kept


def _chunks(texts: list[tuple[str, str]]) -> list[dict[str, Any]]:
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {kind: text}}]} for kind, text in texts]
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": 1}}
    return [*chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage}]


FAILED = {**answered(), "status": "failed", "error": {"code": "server_error", "message": "no"}}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"}


@pytest.mark.parametrize(
    "document",
    [
        FAILED,
        answered(finish="length"),
        answered(finish="content_filter"),
        answered(("refusal", "No.")),
        answered(("content", "Well,"), ("refusal", "no.")),
        answered(("reasoning", "Hm")),
        answered(("content", "")),
        answered(("content", "  ")),
        {**answered(), "output": [CALL]},
        {**answered(), "output": [*answered()["output"], CALL]},
        {**answered(), "output": [*answered()["output"], *answered()["output"]]},
        {**answered(), "output": []},
    ],
)  # fmt: skip
def test_failed_cut_and_refused_answers_and_tool_calls_are_not_kept(document: dict[str, Any]) -> None:
    assert texts_of(document) is None


def test_of_an_answer_that_another_made_nothing_is_kept_that_would_come_in_another_form() -> None:
    def relayed(item: dict[str, Any], *, summary: bool) -> bool:
        document = answered(("reasoning", "Hm"), ("content", "Hi"))
        document["output"][0] = {"type": "reasoning", "id": "rs_1", "summary": [], **item}
        return texts_of(document, summary=summary) is not None

    content = {"content": [{"type": "reasoning_text", "text": "Hm"}]}
    summed_up = {"summary": [{"type": "summary_text", "text": "Hm"}]}
    assert (relayed(content, summary=False), relayed(content, summary=True)) == (True, False)
    assert (relayed(summed_up, summary=False), relayed(summed_up, summary=True)) == (False, True)
    assert not relayed({**summed_up, "encrypted_content": "theirs"}, summary=True)


@pytest.mark.parametrize(
    "more",
    [
        {"phase": "final_answer"},
        {"status": "incomplete"},
        {"content": [{"type": "output_text", "text": "Hi", "annotations": [{"type": "url_citation"}]}]},
        {"content": [{"type": "output_text", "text": "Hi", "logprobs": [{"token": "Hi"}]}]},
        {"content": [{"type": "output_text", "text": "Hi", "of_theirs": 1}]},
    ],
)
def test_an_answer_with_more_in_it_than_texts_is_not_kept(more: dict[str, Any]) -> None:
    document = answered()
    document["output"][0].update(more)
    assert texts_of(document) is None


def entry() -> Entry:
    texts = (("reasoning", "Hm"), ("content", "confidential"))
    return Entry(ALICE, KEY.exact, texts, answered()["usage"], 60, signature("What?"))


def unreadable(blob: bytes, owner: str, exact: str, sealer: Sealer) -> bool:
    try:
        unpack(blob, owner, exact, sealer)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("sealer", [PLAIN, SEALING], ids=["plain", "sealed"])
def test_a_record_is_read_as_it_was_kept(sealer: Sealer) -> None:
    assert unpack(pack(entry(), sealer), ALICE, KEY.exact, sealer) == entry()


def test_nothing_of_a_sealed_record_can_be_read() -> None:
    packed = pack(entry(), SEALING)
    assert b"confidential" not in packed
    assert unreadable(packed, ALICE, KEY.exact, Sealer(["another secret of thirty-two characters"]))


@pytest.mark.parametrize("sealer", [PLAIN, SEALING], ids=["plain", "sealed"])
def test_a_record_is_of_use_only_where_it_belongs(sealer: Sealer) -> None:
    packed = pack(entry(), sealer)
    assert unreadable(packed, ALICE, "f" * 40, sealer)
    assert unreadable(packed, BOB, KEY.exact, sealer)


def test_with_keys_a_record_that_is_not_sealed_is_not_believed() -> None:
    assert unreadable(pack(entry(), PLAIN), ALICE, KEY.exact, SEALING)


@given(
    st.binary(max_size=60)
    | st.binary(max_size=60).map(lambda junk: b"C" + junk)
    | st.binary(max_size=60).map(lambda junk: b"S" + junk)
)
def test_junk_is_unreadable_and_nothing_worse(junk: bytes) -> None:
    for sealer in (PLAIN, SEALING):
        assert unreadable(junk, ALICE, KEY.exact, sealer)


def test_a_record_of_another_version_is_not_read() -> None:
    packed = pack(entry(), PLAIN).replace(b'"v":%d' % VERSION, b'"v":0')
    assert unreadable(packed, ALICE, KEY.exact, PLAIN)
