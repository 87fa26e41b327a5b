"""Gather all data about a response: its summary, record and items, and the responses before and after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..protocol.types import Item
from ..state import Damaged, Missing, NewerRecord, State
from ..state.recent import FAILED, Summary
from ..state.record import Record, read_record


@dataclass(frozen=True, slots=True)
class ResponseReport:
    """All data about a response.

    summary    its entry in the index of recent responses; empty if there is none
    record     its stored record; None if it is not stored
    document   the response with its output; None if it is not available
    input      its own input items, without the history
    hidden     why the document is not available, or ""
    children   summaries of the responses that continue it
    """

    id: str
    summary: Summary = field(default_factory=dict)
    record: Record | None = None
    document: dict[str, Any] | None = None
    input: Sequence[Item] = ()
    hidden: str = ""
    children: Sequence[Summary] = ()

    @property
    def status(self) -> str:
        if self.document is not None:
            return str(self.document["status"])
        return str(self.record.status if self.record is not None else self.summary.get("status", ""))

    @property
    def owner(self) -> str:
        return self.record.owner if self.record is not None else str(self.summary.get("owner", ""))

    @property
    def previous(self) -> str:
        known = self.document.get("previous_response_id") if self.document is not None else None
        return str(known or self.summary.get("previous", ""))

    @property
    def error(self) -> dict[str, Any]:
        """The error of the response, with `code` and, if it is known, `message`."""
        if self.document is not None and self.document.get("error"):
            return dict(self.document["error"])
        return {"code": self.summary["error_code"]} if self.summary.get("error_code") else {}

    def as_json(self, *, content: bool) -> dict[str, Any]:
        """Return the report as a JSON object. Without `content`, the items have only their type, role and size."""
        shown: dict[str, Any] = {
            "id": self.id,
            "status": self.status,
            "owner": self.owner,
            "previous": self.previous or None,
            "summary": self.summary or None,
            "record": asdict(self.record) if self.record is not None else None,
            "hidden": self.hidden or None,
            "next": [child["id"] for child in self.children],
        }
        if self.document is None:
            return shown
        if content:
            return shown | {"input": list(self.input), "response": self.document}
        output = self.document.get("output") or ()
        error = {"code": self.error.get("code")} if self.error else None
        return shown | {"error": error, "input": list(map(outline, self.input)), "output": list(map(outline, output))}


async def report_of(state: State, response_id: str) -> ResponseReport | None:
    """Return the report of a response, or None if there is no data about it. Raises StateUnavailable if Redis fails."""
    summary = await state.recent.find(response_id) or {}
    record = await read_record(state.client, response_id)
    if record is None and not summary:
        return None
    children = await state.recent.children(response_id)
    if record is None:
        return ResponseReport(response_id, summary, hidden=_reason(summary), children=children)
    if record.is_temporary:
        hidden = "it has store: false, and is kept only for a short time"
        return ResponseReport(response_id, summary, record, hidden=hidden, children=children)
    try:
        stored = await state.responses.get(response_id, record.owner)
    except Missing:
        return ResponseReport(response_id, summary, record, hidden="it was deleted", children=children)
    except (Damaged, NewerRecord) as error:
        return ResponseReport(response_id, summary, record, hidden=error.message, children=children)
    return ResponseReport(response_id, summary, record, stored.document, stored.input, children=children)


def _reason(summary: Summary) -> str:
    if summary.get("stored") is False:
        return f"it was not stored ({summary.get('unstored', 'unknown reason')})"
    if "stored" not in summary and summary.get("status") in FAILED:
        return "nothing was stored, because it failed"
    return "it was deleted, or has expired"


def outline(item: Item) -> dict[str, Any]:
    """Return the type, role and size of an item, without its content."""
    shown = {
        name: item[name] for name in ("id", "type", "role", "name", "status", "call_id") if isinstance(item.get(name), str)
    }
    return {**shown, "characters": len(text_of(item))}


def text_of(item: Item) -> str:
    """Return the readable texts of an item as one text."""
    return "\n".join(texts_of(item))


def texts_of(item: Item) -> list[str]:
    """Return the readable texts of an item: those of a message or of reasoning, or the arguments and result of a call."""
    given = [item[name] for name in ("arguments", "input", "code") if isinstance(item.get(name), str)]
    if isinstance(action := item.get("action"), dict) and isinstance(action.get("query"), str):
        given.append(action["query"])
    if item.get("type") == "mcp_list_tools":
        given.append(", ".join(str(tool.get("name")) for tool in item.get("tools") or () if isinstance(tool, dict)))
    said = _text_in(item.get("content") or item.get("summary"))
    results = (_text_in(item.get(name)) for name in ("output", "outputs", "error"))
    return [text for text in (*given, said, *results) if text]


def _text_in(value: Any) -> str:
    """Return a text, or join the texts of content parts, one on each line."""
    if isinstance(value, str):
        return value
    parts = [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []
    return "\n".join(
        str(part.get("text") or part.get("refusal") or part.get("logs") or f"[{part.get('type')}]") for part in parts
    )
