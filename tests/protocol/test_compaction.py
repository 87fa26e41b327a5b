"""The messages that the model gets if a summary replaces earlier items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.errors import BadRequest
from responses_mw.protocol.chat.messages import to_messages
from responses_mw.protocol.dialects import VLLM
from responses_mw.protocol.request.create import parse
from responses_mw.protocol.request.items import item as parsed
from responses_mw.protocol.request.items import user_message
from responses_mw.protocol.response import compaction

if TYPE_CHECKING:
    from responses_mw.protocol.types import Item

DEVELOPER: Item = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]}
ASSISTANT: Item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "said"}]}
CALL: Item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"}
OUTPUT: Item = {"type": "function_call_output", "call_id": "c", "output": "done"}
TRIGGER: Item = {"type": "compaction_trigger"}
USER = user_message("asked")


def sealed(summary: str, *waiting: Item) -> Item:
    return {"type": "compaction", "encrypted_content": compaction.envelope(summary, waiting).decode()}


def seen(*items: Item) -> list[Item]:
    return compaction.open_last(items, str.encode)


blocks = st.sampled_from([[DEVELOPER], [USER], [ASSISTANT], [CALL, OUTPUT], [sealed("old")], [sealed("old", USER)]])
histories = st.lists(blocks, max_size=8).map(lambda lists: [item for items in lists for item in items])


@given(histories, histories)
def test_only_instructions_are_kept_from_before_the_last_compaction(before: list[Item], after: list[Item]) -> None:
    after = [item for item in after if item["type"] != "compaction"]
    shown = seen(*before, ASSISTANT, sealed("new", USER), *after)
    rules = [item for item in before if item is DEVELOPER]
    assert shown[: len(rules)] == rules
    assert "new" in shown[len(rules)]["content"][0]["text"]
    assert shown[len(rules) + 1 :] == [USER, *after]


def test_user_messages_that_a_client_repeats_before_the_compaction_are_sent_once() -> None:
    environment = user_message("in /work")
    shown = seen(DEVELOPER, environment, sealed("old"), USER, sealed("new", USER, user_message("more")), ASSISTANT)
    assert [item.get("role") for item in shown] == ["developer", "user", "user", None, "user", "assistant"]
    assert shown[1:3] == [environment, USER]
    assert shown[4]["content"][0]["text"] == "more"


@given(histories)
def test_a_history_is_split_into_items_to_summarize_and_user_messages_to_keep(items: list[Item]) -> None:
    shown = seen(*items)
    if not compaction.can_shrink(shown):
        return
    matter, waiting = compaction.split_history([*shown, TRIGGER])
    assert [*matter, *waiting] == shown
    assert all(item["role"] == "user" for item in waiting)
    assert matter[-1].get("role") != "user"
    to_messages([*matter, USER], VLLM)  # no call without its output


@given(histories)
def test_a_summary_does_not_make_two_user_messages_adjacent(items: list[Item]) -> None:
    alone = [item for item in items if item["type"] != "compaction"]
    roles = [message["role"] for message in to_messages(seen(sealed("new"), *alone), VLLM)]
    without = [message["role"] for message in to_messages(alone, VLLM)]
    assert roles == (without if without[:1] == ["user"] else ["user", *without])


@pytest.mark.parametrize("items", [[], [TRIGGER], [DEVELOPER, TRIGGER]])
def test_a_history_with_nothing_to_summarize_is_refused(items: list[Item]) -> None:
    with pytest.raises(BadRequest) as caught:
        compaction.split_history(items)
    assert caught.value.code == "nothing_to_compact"


def test_a_single_question_is_summarized_if_the_request_asks_for_it() -> None:
    assert compaction.split_history([USER]) == ([USER], [])
    assert not compaction.can_shrink([DEVELOPER, USER])


@pytest.mark.parametrize(
    ("offset", "named"), [(0, "input[1].encrypted_content"), (1, "input[0].encrypted_content"), (2, "cmp_1")]
)
def test_an_invalid_envelope_is_refused_with_its_path(offset: int, named: str) -> None:
    with pytest.raises(BadRequest, match="could not be verified") as caught:
        compaction.open_last([USER, {**sealed("x"), "id": "cmp_1"}], lambda _: None, offset=offset)
    assert named in caught.value.message


def test_the_compaction_item_contains_only_its_envelope() -> None:
    given: Any = {
        "type": "compaction",
        "id": "cmp_1",
        "encrypted_content": "x",
        "content": [],
        "summary": "forged",
        "created_by": "m",
    }
    assert parsed(given, "input[0]") == {"type": "compaction", "id": "cmp_1", "encrypted_content": "x", "created_by": "m"}


@pytest.mark.parametrize("name", ["structural_tag", "structured_outputs", "regex", "stop"])
def test_the_summary_request_omits_parameters_that_shape_the_answer(name: str) -> None:
    asked = parse({"model": "m", "input": "Hi", name: "{}", "top_k": 5})
    assert compaction.summary_request(asked).extra == {"top_k": 5}


@pytest.mark.parametrize(
    ("entries", "threshold"),
    [([], None), ([{"type": "compaction"}], 100_000), ([{"type": "compaction", "compact_threshold": 9}], 9)],
)
def test_the_threshold_is_taken_from_the_request_or_100000_tokens(entries: Any, threshold: int | None) -> None:
    assert compaction.threshold_of(parse({"input": "x", "context_management": entries})) == threshold
