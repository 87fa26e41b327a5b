"""Convert the deltas and messages of chat completions to plain ones.

In a plain delta, `content` and the reasoning are strings, and each citation is an annotation of the Responses API. Nearly every
delta of nearly every server is plain. Other forms:

- content as a list of parts, such as Mistral's `{"type": "thinking", "thinking": [{"type": "text", "text": "..."}]}`
- reasoning under other names, as a list or as an object (OpenRouter's `reasoning_details`, LiteLLM's `thinking_blocks`)
- `function_call`, which `tool_calls` has replaced
- citations as Chat Completions nests them (`{"type": "url_citation", "url_citation": {...}}`)

Members without a counterpart in a response, such as `audio`, are dropped and reported by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..citations import MAX_CITATIONS

_REASONING = ("reasoning", "reasoning_content", "reasoning_text", "reasoning_details", "thinking_blocks", "thinking")
"""Names of the reasoning. Servers that send several of them send the same text under each name."""
_PLAIN = frozenset({"role", "content", "reasoning", "reasoning_content", "refusal", "tool_calls"})
READ = _PLAIN | {*_REASONING, "annotations", "function_call"}
"""Names of the members that are read."""

_ORDER = ("reasoning", "content", "refusal")  # in which the assembler reads the texts of one delta
_THOUGHTS = ("text", "thinking", "reasoning", "reasoning_text", "reasoning_content", "content", "summary")
_MAX_DEPTH = 4  # maximum depth of the lists and objects around a text
_MAX_DROPPED, _MAX_NAME = 32, 64  # maximum number of different members that are reported, and length of their names


class Dropped(set[str]):
    """The names of dropped members. Their number and their lengths are limited, because the upstream chooses them."""

    def note(self, name: str) -> None:
        """Add `name`, unless there are too many names."""
        if len(self) < _MAX_DROPPED:
            self.add(name[:_MAX_NAME])


def is_plain(delta: dict[str, Any]) -> bool:
    """Return whether `delta` needs no conversion. Malformed texts need none either, because they are errors."""
    if not delta.keys() <= _PLAIN:
        return False
    is_nested = isinstance(delta.get("content"), (list, dict)) or isinstance(delta.get("reasoning"), (list, dict))
    return not (is_nested or isinstance(delta.get("reasoning_content"), (list, dict)))


def plain(delta: dict[str, Any], dropped: Dropped) -> list[dict[str, Any]]:
    """Convert `delta` to plain deltas, in the order of their output. Add the names of members that they lack to `dropped`.

    There are several if the content returns from text to reasoning.
    """
    deltas: list[dict[str, Any]] = [{}]
    for member, text in (*_reasoning(delta, dropped), *_content(delta.get("content"), dropped)):
        if any(later in deltas[-1] for later in _ORDER[_ORDER.index(member) + 1 :]):
            deltas.append({})
        known = deltas[-1].get(member)
        deltas[-1][member] = known + text if isinstance(known, str) and isinstance(text, str) else text
    last = deltas[-1]
    if delta.get("refusal"):
        last["refusal"] = delta["refusal"]
    if calls := delta.get("tool_calls") or legacy_call(delta):
        last["tool_calls"] = calls
    if delta.get("annotations"):
        last["annotations"] = list(_citations(delta["annotations"], dropped))
    for name, value in delta.items():
        if value and name not in READ:
            dropped.note(name)
    return deltas


def legacy_call(delta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the `function_call` of a delta or a message as a fragment, if there is one. `tool_calls` replaced this member."""
    function = delta.get("function_call")
    return [{"index": 0, "function": function}] if function else []


# -- texts -------------------------------------------------------------------------------------------------------------


def _reasoning(delta: dict[str, Any], dropped: Dropped) -> Iterator[tuple[str, Any]]:
    for name in _REASONING:
        value = delta.get(name)
        if not value:
            continue
        text = _thought(value) if isinstance(value, (list, dict)) else value
        if text:
            yield "reasoning", text
            return
        dropped.note(name)  # for example, encrypted reasoning


def _content(content: Any, dropped: Dropped) -> Iterator[tuple[str, Any]]:
    """Yield the texts of a delta's `content`, each with the member of a plain delta that it belongs to."""
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        if content:
            yield "content", content
        return
    for part in content:
        member, text = _part(part)
        if text:
            yield member, text
        elif not isinstance(part, dict) or part.get("text") != "":
            dropped.note(f"content.{part.get('type')}" if isinstance(part, dict) else "content")


def _part(part: Any) -> tuple[str, str]:
    if isinstance(part, str):
        return "content", part
    if not isinstance(part, dict):
        return "content", ""
    kind = str(part.get("type"))
    if "thinking" in kind or "reasoning" in kind:
        return "reasoning", _thought(part)
    member = "refusal" if kind == "refusal" else "text"
    text = part.get(member)
    return "refusal" if member == "refusal" else "content", text if isinstance(text, str) else ""


def _thought(value: Any, depth: int = _MAX_DEPTH) -> str:
    """Return the text in `value`, which may be nested in lists and objects."""
    if isinstance(value, str):
        return value
    if depth and isinstance(value, list):
        return "".join(_thought(one, depth - 1) for one in value)
    if depth and isinstance(value, dict):
        return next((text for name in _THOUGHTS if (text := _thought(value.get(name), depth - 1))), "")
    return ""


# -- citations ---------------------------------------------------------------------------------------------------------


def _citations(annotations: Any, dropped: Dropped) -> Iterator[dict[str, Any]]:
    """Yield the citations of web pages in a delta's `annotations`. Positions that are unknown are missing."""
    listed = annotations if isinstance(annotations, list) else [annotations]
    for annotation in listed[:MAX_CITATIONS]:
        citation = citation_of(annotation)
        if citation is not None:
            yield citation
        else:
            dropped.note("annotations")
    if len(listed) > MAX_CITATIONS:
        dropped.note("annotations")


def citation_of(annotation: Any) -> dict[str, Any] | None:
    """Return an annotation as the Responses API's `url_citation`, or None if it is another annotation or malformed."""
    if not isinstance(annotation, dict) or annotation.get("type") != "url_citation":
        return None
    nested = annotation.get("url_citation")
    given = nested if isinstance(nested, dict) else annotation
    url, title, start, end = (given.get(name) for name in ("url", "title", "start_index", "end_index"))
    if not (isinstance(url, str) and url):
        return None
    positions = {"start_index": start, "end_index": end} if _is_range(start, end) else {}
    return {"type": "url_citation", "url": url, "title": title if isinstance(title, str) and title else url, **positions}


def _is_range(start: Any, end: Any) -> bool:
    return type(start) is int and type(end) is int and 0 <= start <= end
