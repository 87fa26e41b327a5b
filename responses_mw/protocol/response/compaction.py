"""Compaction: replace the history with a summary (OpenAI reference, "Compaction").

- A `compaction` item contains the encrypted summary. The model sees the summary as a user message, instead of the items before
  the last compaction. System messages, developer messages, `additional_tools` and configuration updates are not replaced.
- Some clients, such as Codex, choose which messages to keep, and send these before the compaction. Therefore, if only user
  messages and items of the kinds above precede the compaction, it replaces no messages.
- User messages at the end of the compacted items have not been answered yet. These messages are not summarized. They are
  encrypted together with the summary, and follow it unchanged. If there is nothing else to summarize, they are summarized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ...errors import BadRequest
from ...ids import RunIds
from .. import checks
from ..chat.request import GRAMMARS
from ..chat.truncation import is_kept
from ..request.create import CreateResponse
from ..request.items import user_message
from ..types import Document, Item

TRIGGER = "compaction_trigger"
DEFAULT_THRESHOLD = 100_000
"""Default of `compact_threshold`, in tokens. A history with more tokens is compacted."""
SUMMARY = "This is a summary of the conversation so far. The earlier messages are no longer available."

_HINTS = frozenset({"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "service_tier"})
COMPACT_MEMBERS = _HINTS | {"model", "input", "instructions", "previous_response_id"}
_SUMMARY_MEMBERS = (
    _HINTS | {"instructions", "model", "stream", "temperature", "top_p", "truncation"} | {"safety_identifier", "user"}
)
# Members passed on to the upstream that shape the answer or cut it short. They are not meant for a summary.
_ANSWER_OPTIONS = GRAMMARS | {
    *("bad_words", "ignore_eos", "logit_bias", "min_tokens", "prompt_logprobs", "stop", "stop_token_ids")
}
_RUN_MEMBERS = frozenset({"id", "status"})


@dataclass(frozen=True, slots=True)
class Compacted:
    """A compaction `item` without its id, and the `usage` of the request for its summary (None if unknown)."""

    item: Item
    usage: dict[str, Any] | None


# -- requests for a compaction ---------------------------------------------------------------------------------------------


def is_asked(items: Sequence[Item]) -> bool:
    """Return whether `items` end with a `compaction_trigger`, which requests a compaction instead of an answer."""
    return bool(items) and items[-1]["type"] == TRIGGER


def threshold_of(request: CreateResponse) -> int | None:
    """Return the lowest `compact_threshold` of `request` in tokens, or None if the request has no `context_management`."""
    return min((entry.get("compact_threshold", DEFAULT_THRESHOLD) for entry in request.context_management), default=None)


def create_body(body: Any) -> dict[str, Any]:
    """Convert the body of `POST /v1/responses/compact` to the body of a request for an unstored response.

    Raises `BadRequest` if `model` is missing, if a member is unknown, or if `image` asks for compressed images.
    """
    given = checks.body(body)
    if "model" not in given:
        checks.missing("model")
    image = checks.mapping(given.pop("image", {}), "image")
    if image.get("context_compression", "auto") == "enabled":
        checks.unsupported("image.context_compression", "images are shown to the model unchanged.")
    for name in sorted(given.keys() - COMPACT_MEMBERS):
        checks.unknown(name)
    return {**given, "store": False}


# -- making a summary --------------------------------------------------------------------------------------------------------


def split_history(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Split the items that the model sees into the items to summarize and the user messages at the end.

    If only user messages can be summarized, they are all summarized. Raises `BadRequest` if there is nothing to summarize.
    """
    seen = [item for item in items if item["type"] != TRIGGER]
    end = _answered(seen)
    if not _can_summarize(seen[:end]):
        end = len(seen)
    if not _can_summarize(seen[:end]):
        raise BadRequest("There is nothing to compact.", param="input", code="nothing_to_compact")
    return seen[:end], seen[end:]


def can_shrink(items: Sequence[Item]) -> bool:
    """Return whether a summary can replace at least one of the items before the final user messages."""
    return _can_summarize(items[: _answered(items)])


def _answered(items: Sequence[Item]) -> int:
    """Return the number of items before the final user messages."""
    return max((number for number, item in enumerate(items, 1) if item.get("role") != "user"), default=0)


def _can_summarize(items: Sequence[Item]) -> bool:
    return not all(is_kept(item) for item in items)


def summary_request(request: CreateResponse) -> CreateResponse:
    """Return a request for a summary, with the options of `request` except those that shape its answer, such as grammars."""
    extra = {name: value for name, value in request.extra.items() if name not in _ANSWER_OPTIONS}
    members = {name: getattr(request, name) for name in _SUMMARY_MEMBERS}
    reasoning = {name: value for name, value in request.reasoning.items() if name != "summary"}
    return CreateResponse(items=[], extra=extra, **members, reasoning=reasoning, store=False)


def envelope(summary: str, waiting: Sequence[Item]) -> bytes:
    """Return the plaintext of a compaction's `encrypted_content`: the `summary` and the unanswered (`waiting`) messages."""
    messages = [{name: value for name, value in item.items() if name not in _RUN_MEMBERS} for item in waiting]
    return orjson.dumps({"summary": summary, "waiting": messages})


def document(run: Document, items: Sequence[Item], ids: RunIds) -> Document:
    """Return the `response.compaction` for the document `run`. Its `output` is the whole input for the next request.

    The output begins with the user messages in `items`. Those from the envelope of an earlier compaction get ids from `ids`.
    """
    messages = [item for item in items if item["type"] == "message" and item["role"] == "user"]
    return {
        "id": run["id"],
        "object": "response.compaction",
        "created_at": run["created_at"],
        "output": [*({"id": ids.item("msg"), "status": "completed", **message} for message in messages), *run["output"]],
        "usage": run["usage"],
    }


# -- what the model sees of a compaction -------------------------------------------------------------------------------------


def open_last(
    items: Sequence[Item], open_: Callable[[str], bytes | None], *, offset: int = 0, keeps_foreign: bool = False
) -> list[Item]:
    """Decrypt the last compaction in `items`, if any, and return the items that the model sees.

    The items that the compaction replaces are left out. The user messages that were encrypted with the summary follow it,
    unless they also precede it.

    `open_` returns None if this server cannot decrypt the summary. With `keeps_foreign`, `items` are then returned unchanged,
    because the upstream may decrypt it. Otherwise, raises `BadRequest`. Errors refer to `items[offset]` as `input[0]`.
    """
    last = max((position for position, item in enumerate(items) if item["type"] == "compaction"), default=-1)
    content = open_(items[last]["encrypted_content"]) if last >= 0 else None
    if last < 0 or (content is None and keeps_foreign):
        return list(items)
    if content is None:
        if last < offset:
            checks.foreign_envelope(f"encrypted_content of '{items[last].get('id')}'", "input")
        path = f"input[{last - offset}].encrypted_content"
        checks.foreign_envelope(path, path)
    contents = orjson.loads(content)
    is_selected = all(is_kept(item) or item.get("role") == "user" for item in items[:last])
    before = [item for item in items[:last] if (is_selected or is_kept(item)) and item["type"] != "compaction"]
    seen = {_hashable(item.get("content")) for item in before}
    waiting = [item for item in contents["waiting"] if _hashable(item["content"]) not in seen]
    summary = user_message(f"{SUMMARY}\n\n{contents['summary']}")["content"]
    return [*before, {**items[last], "content": summary}, *waiting, *items[last + 1 :]]


def _hashable(content: Any) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SORT_KEYS)
