"""Convert the readable reasoning of an upstream's own Responses API: content to a summary, and back.

Servers of open models (vLLM, llama.cpp) accept ``reasoning.summary``, but still send the reasoning as content. Many clients
show only summaries, so content becomes a summary, as it does for Chat Completions. An item that has a summary is not changed.
"""

from __future__ import annotations

from typing import Any

from ..types import Item, Part
from .events import ADDED, DONE, OPEN_REASONING_TEXT, PARTS, REASONING_TEXT, SUMMARY_TEXT
from .text import logprobs_of

_TEXTS = {
    f"{kind.stem}.{step}": f"{SUMMARY_TEXT.stem}.{step}"
    for kind in (REASONING_TEXT, OPEN_REASONING_TEXT)
    for step in ("delta", "done")
}
_PARTS = {f"{PARTS['content']}.{step}": f"{PARTS['summary']}.{step}" for step in ("added", "done")}


def with_summary(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event of the upstream in which the content of reasoning items is their summary."""
    kind = event["type"]
    if kind in _TEXTS:
        return _renamed(event, _TEXTS[kind])
    if kind in _PARTS and _is_reasoning(event.get("part")):
        return {**_renamed(event, _PARTS[kind]), "part": _part(event["part"])}
    if kind in (ADDED, DONE):
        return {**event, "item": summarized(event.get("item"))}
    response = event.get("response")
    if isinstance(response, dict) and isinstance(response.get("output"), list):
        return {**event, "response": {**response, "output": [summarized(item) for item in response["output"]]}}
    return event


def summarized(item: Any) -> Any:
    """Return a reasoning item with its content as its summary, and anything else unchanged."""
    if not isinstance(item, dict) or item.get("type") != "reasoning" or item.get("summary"):
        return item
    content = item.get("content") or []
    if not isinstance(content, list) or not all(map(_is_reasoning, content)):
        return item
    return {**_without(item, "content"), "summary": [_part(part) for part in content]}


def readable(item: Item) -> Item:
    """Return a reasoning item with its summary as its content, as the upstream sent it."""
    return {**item, "summary": [], "content": [{"type": REASONING_TEXT.part, "text": text_of(item)}]}


def text_of(item: Item) -> str:
    """Return the text of an upstream's reasoning item, which may be malformed: its content, otherwise its summary."""
    for name in ("content", "summary"):
        parts = item.get(name)
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if text := "\n".join(text for text in texts if isinstance(text, str)):
            return text
    return ""


def without_hidden_logprobs(output: list[Item]) -> list[Item]:
    """Return the items of a whole answer with the log probabilities of the text only. vLLM also reports the reasoning's."""
    thoughts = "\n".join(filter(None, (text_of(item) for item in output if item["type"] == "reasoning")))
    return [_visible(item, thoughts) if item["type"] == "message" else item for item in output]


def _visible(message: Item, thoughts: str) -> Item:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_visible_part(part, thoughts) for part in content]}


def _visible_part(part: Any, thoughts: str) -> Any:
    if not (isinstance(part, dict) and isinstance(part.get("logprobs"), list)):
        return part
    kept = logprobs_of(part.get("text"), {"content": part["logprobs"]}, after=thoughts)
    return {**part, "logprobs": kept["content"] if kept else []}


def _is_reasoning(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == REASONING_TEXT.part


def _part(part: Part) -> Part:
    return {**part, "type": SUMMARY_TEXT.part}


def _renamed(event: dict[str, Any], kind: str) -> dict[str, Any]:
    renamed = {**_without(event, REASONING_TEXT.index), "type": kind}
    if REASONING_TEXT.index in event:
        renamed[SUMMARY_TEXT.index] = event[REASONING_TEXT.index]
    return renamed


def _without(value: dict[str, Any], name: str) -> dict[str, Any]:
    return {member: held for member, held in value.items() if member != name}
