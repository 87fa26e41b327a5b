"""Records of the cache: how answers are stored and replayed, and which records are rejected."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.cache.entry import VERSION, Entry, Key, items_of, pack, unpack
from responses_mw.crypto import Sealer
from responses_mw.ids import RunIds
from tests.cache.asking import ALICE, BOB, SECRET, answered, asked, replay, run

KEY = Key(ALICE, "p" * 40, "What?", "e" * 40)
PLAIN, SEALING = Sealer(), Sealer([SECRET])

texts = st.text(min_size=1, max_size=30).filter(lambda text: bool(text.strip()))
answers = st.lists(texts, min_size=1, max_size=4).map(
    lambda texts: [("reasoning" if n % 2 else "content", text) for n, text in enumerate(reversed(texts))][::-1]
)


@given(answers, st.sampled_from([{}, {"reasoning": {"summary": "auto"}}]))
def test_a_replayed_answer_differs_only_in_its_ids(texts: list[tuple[str, str]], fields: dict[str, Any]) -> None:
    """The events equal those of an upstream that sends each text as one chunk."""
    ids = RunIds().response
    events, first = run(asked(**fields), _chunks(texts), RunIds(response=ids))
    kept = items_of(first)
    assert kept is not None
    again, document = replay(asked(**fields), kept, RunIds(response=ids))
    assert again[:-1] == events[:-1]
    assert document == {**first, "usage": None}
    assert items_of(document) == kept
    other = replay(asked(**fields), kept)[1]
    assert not {item["id"] for item in other["output"]} & {item["id"] for item in first["output"]}


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
        {**answered(), "output": []},
    ],
)  # fmt: skip
def test_failed_truncated_and_refused_answers_and_tool_calls_are_not_stored(document: dict[str, Any]) -> None:
    assert items_of(document) is None


def test_reasoning_is_stored_unless_only_the_upstream_can_decrypt_it() -> None:
    def kept(**item: Any) -> bool:
        document = answered(("reasoning", "Hm"), ("content", "Hi"))
        document["output"][0] = {"type": "reasoning", "id": "rs_1", "summary": [], **item}
        return items_of(document) is not None

    content = [{"type": "reasoning_text", "text": "Hm"}]
    summary = [{"type": "summary_text", "text": "Hm"}]
    assert kept(content=content)
    assert kept(summary=summary, content=None, status=None)
    assert kept(summary=summary, content=content, encrypted_content="")
    assert not kept(summary=summary, encrypted_content="theirs")
    assert kept(summary=summary, encrypted_content="rmw1.key.ours")


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
def test_answers_with_more_than_plain_text_are_not_stored(more: dict[str, Any]) -> None:
    document = answered()
    document["output"][0].update(more)
    assert items_of(document) is None


def entry(**changes: Any) -> Entry:
    items = items_of(answered(("reasoning", "Hm"), ("content", "confidential")))
    assert items is not None
    return replace(Entry(ALICE, KEY.exact, items, answered()["usage"], 60, "What?"), **changes)


def unreadable(blob: bytes, owner: str, exact: str, sealer: Sealer) -> bool:
    try:
        unpack(blob, owner, exact, sealer)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("sealer", [PLAIN, SEALING], ids=["plain", "encrypted"])
def test_unpacking_a_record_restores_the_entry(sealer: Sealer) -> None:
    assert unpack(pack(entry(), sealer), ALICE, KEY.exact, sealer) == entry()


def test_an_encrypted_record_is_unreadable_without_its_key() -> None:
    packed = pack(entry(), SEALING)
    assert b"confidential" not in packed
    assert unreadable(packed, ALICE, KEY.exact, Sealer(["another secret of thirty-two characters"]))


@pytest.mark.parametrize("sealer", [PLAIN, SEALING], ids=["plain", "encrypted"])
def test_a_record_is_bound_to_its_owner_and_its_key(sealer: Sealer) -> None:
    packed = pack(entry(), sealer)
    assert unreadable(packed, ALICE, "f" * 40, sealer)
    assert unreadable(packed, BOB, KEY.exact, sealer)


def test_unencrypted_records_are_rejected_if_secret_keys_are_configured() -> None:
    assert unreadable(pack(entry(), PLAIN), ALICE, KEY.exact, SEALING)


@given(
    st.binary(max_size=60)
    | st.binary(max_size=60).map(lambda junk: b"C" + junk)
    | st.binary(max_size=60).map(lambda junk: b"S" + junk)
)
def test_junk_is_rejected_without_another_error(junk: bytes) -> None:
    for sealer in (PLAIN, SEALING):
        assert unreadable(junk, ALICE, KEY.exact, sealer)


MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]}
DEEP = orjson.loads('{"a":' * 300 + "1" + "}" * 300)


@pytest.mark.parametrize(
    "members",
    [
        {"type": "function_call"},
        {"type": ["message"]},
        {"id": ""},
        {"status": "incomplete"},
        {"role": "user"},
        {"role": None},
        {"content": "Hi"},
        {"content": {"type": "output_text"}},
        {"content": ["Hi"]},
        {"content": []},
        {"content": [{"type": "output_text", "text": 5}]},
        {"content": [{"type": ["output_text"], "text": "Hi"}]},
        {"content": [{"type": "refusal", "text": "Hi"}]},
        {"content": [{"type": "output_text", "text": "Hi", "annotations": [5]}]},
        {"summary": 5},
        {"encrypted_content": "theirs"},
        {"more": DEEP},
    ],
)
def test_a_record_with_an_unexpected_item_is_rejected(members: dict[str, Any]) -> None:
    assert unpack(pack(entry(items=[MESSAGE]), PLAIN), ALICE, KEY.exact, PLAIN).items == [MESSAGE]
    changed = record(items=[{**MESSAGE, **members}])
    assert unreadable(changed, ALICE, KEY.exact, PLAIN)


@pytest.mark.parametrize("items", [[], [5], None, [{"type": "reasoning", "summary": [], "content": 5}, MESSAGE]])
def test_a_record_without_an_answer_is_rejected(items: Any) -> None:
    assert unreadable(record(items=items), ALICE, KEY.exact, PLAIN)


@pytest.mark.parametrize("members", [{"input_tokens": "1"}, {"input_tokens": 2**60}, {"input_tokens": None}, {"more": DEEP}])
def test_a_record_with_malformed_usage_is_rejected(members: dict[str, Any]) -> None:
    assert unreadable(record(usage={**answered()["usage"], **members}), ALICE, KEY.exact, PLAIN)
    assert unreadable(record(usage=[members]), ALICE, KEY.exact, PLAIN)


@pytest.mark.parametrize("number", [2**70, float("inf"), float("nan")])
def test_numbers_in_an_accepted_record_can_be_encoded_as_json(number: float) -> None:
    changed = record(usage={**answered()["usage"], "more": number})
    if not unreadable(changed, ALICE, KEY.exact, PLAIN):
        assert orjson.loads(orjson.dumps(unpack(changed, ALICE, KEY.exact, PLAIN).usage))["more"] == number


def record(**members: Any) -> bytes:
    """Return a packed entry with changed members."""
    return b"C" + json.dumps({**orjson.loads(pack(entry(), PLAIN)[1:]), **members}).encode()


def test_a_record_of_another_version_is_rejected() -> None:
    packed = pack(entry(), PLAIN).replace(b'"v":%d' % VERSION, b'"v":0')
    assert unreadable(packed, ALICE, KEY.exact, PLAIN)
