"""Compaction: a summary that takes the place of the history before it (OpenAI reference, "Compaction").

1. A ``compaction`` item holds the summary, sealed. Of what stands before the last of them, the model is given the instructions
   only (system and developer messages); then the summary, as a user's message; then what follows. Where nothing but these and
   a user's messages stands before it, the client has chosen what is to be kept, as Codex does: then it is shown.
2. The user's messages at the end of what is compacted have had no answer yet. They are not summed up: they travel in the
   envelope and follow the summary word for word.
3. It is made where the last item is a ``compaction_trigger`` (the item is then all that the response has), and where
   ``context_management`` sets a number of tokens that the request is above: before a turn of the model's, also in the middle
   of a response, after the results of tools that we carry out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import orjson

from ...errors import BadRequest
from ..chat.truncation import is_kept
from ..request import checks
from ..request.create import CreateResponse
from ..request.items import user_message
from ..types import Document, Item

Open = Callable[[str], bytes | None]
"""What is in an envelope, or None where it is not one of ours."""

TRIGGER = "compaction_trigger"
SUMMARY = "What follows is a summary of the conversation so far, which itself is no longer shown:"

_PASSED_ON = frozenset(
    {"model", "input", "instructions", "previous_response_id", "prompt_cache_key", "prompt_cache_options"}
    | {"prompt_cache_retention", "service_tier"}
)
# Of the members that go to the upstream as they are: those that would shape the summary, or end it early.
_OF_THE_ANSWER = frozenset(
    {"bad_words", "ebnf", "grammar", "ignore_eos", "json_schema", "logit_bias", "min_tokens", "prompt_logprobs", "regex"}
    | {"guided_choice", "guided_grammar", "guided_json", "guided_regex", "stop", "stop_token_ids", "structured_outputs"}
)
_FROM_ONE_RUN = frozenset({"id", "status"})


@dataclass(frozen=True, slots=True)
class Compacted:
    """A compaction ``item`` (without its id), and the ``usage`` that making it took."""

    item: Item
    usage: dict[str, Any] | None


# -- what is asked ---------------------------------------------------------------------------------------------------------


def is_asked(items: Sequence[Item]) -> bool:
    """Whether the input ``items`` ask for a compaction and nothing else."""
    return bool(items) and items[-1]["type"] == TRIGGER


def threshold_of(request: CreateResponse, default: int) -> int | None:
    """Above how many tokens ``request`` wants its history compacted; ``default`` where it does not say. None: never."""
    wanted = [entry.get("compact_threshold", default) for entry in request.context_management]
    return min(wanted, default=None)


def create_body(body: Any) -> dict[str, Any]:
    """The body of ``POST /v1/responses/compact`` as that of a create that is not stored. Raises ``BadRequest``."""
    if not isinstance(body, dict):
        raise BadRequest(f"The request body must be a JSON object, but is {checks.kind_of(body)}.", code="invalid_type")
    given = {name: value for name, value in body.items() if value is not None}
    if "model" not in given:
        checks.missing("model")
    image = checks.mapping(given.pop("image", {}), "image")
    if image.get("context_compression", "auto") == "enabled":
        checks.unsupported("image.context_compression", "images are shown to the model as they are.")
    for name in sorted(given.keys() - _PASSED_ON):
        checks.unknown(name)
    return {**given, "store": False}


# -- making a summary --------------------------------------------------------------------------------------------------------


def parted(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """What of ``items``, all that the model would see, is to be summed up; and the user's messages that follow it as they are.

    Where nothing but these could be summed up, they are. Raises ``BadRequest`` where there is nothing at all.
    """
    seen = [item for item in items if item["type"] != TRIGGER]
    end = len(seen)
    while end and seen[end - 1].get("role") == "user":
        end -= 1
    if not _has_matter(seen[:end]):
        end = len(seen)
    if not _has_matter(seen[:end]):
        raise BadRequest("There is nothing to compact.", param="input", code="nothing_to_compact")
    return seen[:end], seen[end:]


def can_shrink(items: Sequence[Item]) -> bool:
    """Whether anything stands before the user's last messages that a summary could replace."""
    last = max((position for position, item in enumerate(items) if item.get("role") != "user"), default=-1)
    return _has_matter(items[: last + 1])


def _has_matter(items: Sequence[Item]) -> bool:
    return not all(is_kept(item) for item in items)


def asking(request: CreateResponse, most_tokens: int) -> CreateResponse:
    """The request for a summary of what ``request`` stands on: to the same model, without what shapes the answer itself.

    ``most_tokens`` is how long it may be; 0 leaves that to the model.
    """
    asked = CreateResponse(items=[], extra={name: value for name, value in request.extra.items() if name not in _OF_THE_ANSWER})
    kept = (
        "instructions",
        "model",
        "safety_identifier",
        "service_tier",
        "stream",
        "temperature",
        "top_p",
        "truncation",
        "user",
    )
    hints = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
    reasoning = {name: value for name, value in request.reasoning.items() if name != "summary"}
    members = {name: getattr(request, name) for name in (*kept, *hints)}
    return replace(asked, **members, reasoning=reasoning, store=False, max_output_tokens=most_tokens or None)


def envelope(summary: str, waiting: Sequence[Item]) -> bytes:
    """What a compaction item's ``encrypted_content`` is made of: the ``summary``, and the messages still ``waiting``."""
    messages = [{name: value for name, value in item.items() if name not in _FROM_ONE_RUN} for item in waiting]
    return orjson.dumps({"summary": summary, "waiting": messages})


def document(run: Document) -> Document:
    """The ``response.compaction`` of a response whose output is the compaction. That is all of the next window: OpenAI's has
    the user's messages before it, which our item holds as far as they wait for an answer."""
    return {
        "id": run["id"],
        "object": "response.compaction",
        "created_at": run["created_at"],
        "output": run["output"],
        "usage": run["usage"],
    }


# -- what the model sees of it -----------------------------------------------------------------------------------------------


def opened(items: Sequence[Item], open_: Open, *, offset: int = 0, keeps_foreign: bool = False) -> list[Item]:
    """``items`` as the model is to see them: the last compaction opened, and before it the instructions only.

    Raises ``BadRequest`` for an envelope that cannot be opened; its path counts from ``offset``, where the own input begins.
    With ``keeps_foreign`` all stays as it is then: the upstream may know it.
    """
    positions = [position for position, item in enumerate(items) if item["type"] == "compaction"]
    if not positions:
        return list(items)
    last = positions[-1]
    content = open_(items[last]["encrypted_content"])
    if content is None and keeps_foreign:
        return list(items)
    if content is None:
        _refuse(items[last], last - offset)
    told = orjson.loads(content)
    before = _kept(items[:last])
    shown = {_written(item.get("content")) for item in before}
    waiting = [item for item in told["waiting"] if _written(item["content"]) not in shown]
    summary = user_message(f"{SUMMARY}\n\n{told['summary']}")["content"]
    return [*before, {**items[last], "content": summary}, *waiting, *items[last + 1 :]]


def _written(content: Any) -> bytes:
    """A content as something that a set can hold."""
    return orjson.dumps(content, option=orjson.OPT_SORT_KEYS)


def _kept(items: Sequence[Item]) -> list[Item]:
    """What the model is given of the ``items`` before a compaction."""
    is_chosen = all(is_kept(item) or item.get("role") == "user" for item in items)
    return [item for item in items if (is_chosen or is_kept(item)) and item["type"] != "compaction"]


def _refuse(item: Item, index: int) -> NoReturn:
    where = f"input[{index}].encrypted_content" if index >= 0 else f"encrypted_content of '{item.get('id')}'"
    param = where if index >= 0 else "input"
    message = f"The encrypted content '{where}' could not be verified: it was not made by this server, or its key is gone."
    raise BadRequest(message, param=param, code="invalid_encrypted_content")
