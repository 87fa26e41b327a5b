"""Compaction: replace history by a summary (OpenAI reference, "Compaction").

1. A ``compaction`` item holds the encrypted summary. Of the items before the last compaction, the model sees only system and
   developer messages; then the summary as a user message; then the items that follow. If only such messages and user
   messages precede it, the client has selected what to keep, as Codex does, and all of them are shown.
2. User messages at the end of the compacted items have no answer yet. They are not summarized but stored in the envelope,
   and follow the summary unchanged.
3. A compaction is made when the last item is a ``compaction_trigger`` (the compaction is then the only output), or when the
   request exceeds the number of tokens in ``context_management``. Then it is made before a turn, which may be any turn of a
   response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ...errors import BadRequest
from ..chat.messages import is_kept
from ..request import checks
from ..request.create import CreateResponse
from ..request.items import user_message
from ..types import Document, Item

TRIGGER = "compaction_trigger"
SUMMARY = "What follows is a summary of the conversation so far, which itself is no longer shown:"

_HINTS = frozenset({"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "service_tier"})
COMPACT_MEMBERS = _HINTS | {"model", "input", "instructions", "previous_response_id"}
_SUMMARY_MEMBERS = (
    _HINTS | {"instructions", "model", "stream", "temperature", "top_p", "truncation"} | {"safety_identifier", "user"}
)
# Members passed on to the upstream that would shape the summary or end it early.
_ANSWER_OPTIONS = frozenset(
    {"bad_words", "ebnf", "grammar", "ignore_eos", "json_schema", "logit_bias", "min_tokens", "prompt_logprobs", "regex"}
    | {"guided_choice", "guided_grammar", "guided_json", "guided_regex", "stop", "stop_token_ids", "structured_outputs"}
)
_RUN_MEMBERS = frozenset({"id", "status"})


@dataclass(frozen=True, slots=True)
class Compacted:
    """A compaction ``item`` (without its id) and the ``usage`` of making it."""

    item: Item
    usage: dict[str, Any] | None


# -- requests for a compaction ---------------------------------------------------------------------------------------------


def is_asked(items: Sequence[Item]) -> bool:
    """Whether the input ``items`` request a compaction only."""
    return bool(items) and items[-1]["type"] == TRIGGER


def threshold_of(request: CreateResponse, default: int) -> int | None:
    """The number of tokens above which the history of ``request`` is compacted. None: never.

    ``default`` applies if the request does not set a threshold for the compaction that it asks for.
    """
    wanted = [entry.get("compact_threshold", default) for entry in request.context_management]
    return min(wanted, default=None)


def create_body(body: Any) -> dict[str, Any]:
    """Convert the body of ``POST /v1/responses/compact`` to one that creates an unstored response. Raise ``BadRequest``."""
    if not isinstance(body, dict):
        raise BadRequest(f"The request body must be a JSON object, but is {checks.kind_of(body)}.", code="invalid_type")
    given = {name: value for name, value in body.items() if value is not None}
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
    """Split ``items``, everything that the model would see, into those to summarize and the user messages that follow.

    If there is nothing else to summarize, summarize these messages too. Raise ``BadRequest`` if there is nothing at all.
    """
    seen = [item for item in items if item["type"] != TRIGGER]
    end = _answered(seen)
    if not _can_summarize(seen[:end]):
        end = len(seen)
    if not _can_summarize(seen[:end]):
        raise BadRequest("There is nothing to compact.", param="input", code="nothing_to_compact")
    return seen[:end], seen[end:]


def can_shrink(items: Sequence[Item]) -> bool:
    """Whether a summary could replace anything before the last user messages."""
    return _can_summarize(items[: _answered(items)])


def _answered(items: Sequence[Item]) -> int:
    """The number of items before the user messages at the end."""
    return max((number for number, item in enumerate(items, 1) if item.get("role") != "user"), default=0)


def _can_summarize(items: Sequence[Item]) -> bool:
    return not all(is_kept(item) for item in items)


def summary_request(request: CreateResponse) -> CreateResponse:
    """Make the request for a summary of the history of ``request``: the same model, without options that shape the answer."""
    extra = {name: value for name, value in request.extra.items() if name not in _ANSWER_OPTIONS}
    members = {name: getattr(request, name) for name in _SUMMARY_MEMBERS}
    reasoning = {name: value for name, value in request.reasoning.items() if name != "summary"}
    return CreateResponse(items=[], extra=extra, **members, reasoning=reasoning, store=False)


def envelope(summary: str, waiting: Sequence[Item]) -> bytes:
    """The plain content of a compaction's ``encrypted_content``: the ``summary`` and the ``waiting`` messages."""
    messages = [{name: value for name, value in item.items() if name not in _RUN_MEMBERS} for item in waiting]
    return orjson.dumps({"summary": summary, "waiting": messages})


def document(run: Document, user_messages: Sequence[Item]) -> Document:
    """Return the ``response.compaction`` for a response whose output is the compaction.

    Its output is the whole input of the next request: all user messages, then the compaction.
    """
    return {
        "id": run["id"],
        "object": "response.compaction",
        "created_at": run["created_at"],
        "output": [*user_messages, *run["output"]],
        "usage": run["usage"],
    }


# -- what the model sees of it -----------------------------------------------------------------------------------------------


def open_last(
    items: Sequence[Item], open_: Callable[[str], bytes | None], *, offset: int = 0, keeps_foreign: bool = False
) -> list[Item]:
    """Open the last compaction and drop the items that it replaces.

    ``open_`` returns None for an envelope that was not sealed with our keys. Then raise ``BadRequest``; paths count from
    ``offset``, where the request's own input begins. With ``keeps_foreign``, return the items unchanged instead, because the
    upstream may be able to open it.
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
