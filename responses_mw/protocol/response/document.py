"""The response object: as created and as shown to clients, its token counts, and the base class of what builds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from ..chat.chunks import Text, ToolCall
from ..request.create import CreateResponse
from ..request.items import ID_PREFIXES
from ..tool_kinds.form import OfferedFunction
from ..types import Chunk, Document, Item, Tool
from .events import ADDED, Emitter, Event, NullEmitter, emit_done, terminal_type
from .replay import Phase, Takeover
from .text import Source

_ECHOED = (
    *("background", "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "store", "tool_choice", "truncation", "user", "metadata"),
)
_ECHOED_IF_SET = ("prompt", "prompt_cache_options", "prompt_cache_retention")
_DEFAULTS = {
    "parallel_tool_calls": True,
    "service_tier": "default",
    "temperature": 1.0,
    "top_logprobs": 0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""The values that the document shows for parameters that are not set."""


def create(request: CreateResponse, *, response_id: str, model: str, created_at: int) -> Document:
    """Create the document of a new run, with every member that the Open Responses specification requires.

    ``model`` is the request's model, or the upstream's only one. ``created_at`` is in seconds since the epoch.
    """
    wanted = request.text.get("format", {"type": "text"})
    if wanted["type"] == "json_schema":  # always has a description and ``strict``
        wanted = {"description": None, "strict": False, **wanted}
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "usage": None,
        "conversation": {"id": request.conversation} if request.conversation else None,
        "reasoning": {"effort": None, "summary": None, **request.reasoning},
        "text": {**request.text, "format": wanted},
        "tools": [_echo(tool) for tool in request.tools],
        **{name: getattr(request, name) for name in _ECHOED},
        **{name: value for name in _ECHOED_IF_SET if (value := getattr(request, name)) is not None},
        **{name: default if getattr(request, name) is None else getattr(request, name) for name, default in _DEFAULTS.items()},
    }


def _echo(tool: Tool) -> Tool:
    """Return a tool as the document shows it. A function always has a description, parameters and ``strict``."""
    if tool["type"] != "function":
        return tool
    return {**tool, **{name: tool.get(name) for name in ("description", "parameters", "strict")}}


def output_text(document: Document) -> str:
    """The concatenated text of the answer, as the SDKs compute it."""
    return "".join(
        part["text"]
        for item in document["output"]
        if item["type"] == "message"
        for part in item.get("content") or ()
        if part.get("type") == "output_text" and isinstance(part.get("text"), str)
    )


def shown(item: Item, include: frozenset[str]) -> Item:
    """Remove the members that are shown only on request by ``include``. They are stored in any case."""
    kind = item["type"]
    if kind == "web_search_call":
        hidden = frozenset({"results", "sources"}) - {wanted.rpartition(".")[2] for wanted in include if kind in wanted}
        action = {name: value for name, value in item.get("action", {}).items() if name not in hidden}
        return {**{name: value for name, value in item.items() if name not in hidden}, "action": action}
    if kind == "code_interpreter_call" and "code_interpreter_call.outputs" not in include:
        return {**item, "outputs": None}
    return item


def whole(document: Document, include: frozenset[str] = frozenset()) -> Document:
    """The document as shown to clients, with ``output_text``, which is computed and never stored."""
    output = [shown(item, include) for item in document["output"]]
    return {**document, "output": output, "output_text": output_text(document)}


def end(document: Document, number: int) -> Event:
    """Return the terminal event of a run that ended with `document`."""
    kind = terminal_type(document)
    return Event(kind, {"type": kind, "response": whole(document), "sequence_number": number})


# -- usage: the token counts of many servers in one shape ----------------------------------------------------------------

_MAX_COUNT = 2**53 - 1
"""Maximum of a count. Not every client can read larger numbers."""


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _count(holder: Any, *names: str) -> int:
    """Return the first valid count that ``holder`` has under ``names``, otherwise 0. Servers omit what they do not know."""
    given = (holder.get(name) for name in names) if isinstance(holder, dict) else ()
    return next(filter(_is_count, given), 0)


def usage_of_chat(usage: dict[str, Any]) -> dict[str, Any]:
    """Convert a chat ``usage`` to a ``ResponseUsage``. All of its details are required, so unknown ones are 0."""
    prompt, completion = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    of_prompt, of_completion = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": _count(of_prompt, "cached_tokens"),
            "cache_write_tokens": _count(of_prompt, "cache_write_tokens", "created_cache_tokens"),
        },
        "output_tokens": completion,
        "output_tokens_details": {
            # SGLang reports them beside the counts, other servers in the details.
            "reasoning_tokens": _count(of_completion, "reasoning_tokens") or _count(usage, "reasoning_tokens"),
        },
        "total_tokens": _count(usage, "total_tokens") or prompt + completion,
    }


def usage_of_responses(given: Any) -> dict[str, Any] | None:
    """Return the usage of an upstream's response with all details that the SDKs require; None if it has no counts."""
    if not isinstance(given, dict) or not all(_is_count(given.get(name)) for name in ("input_tokens", "output_tokens")):
        return None
    return {
        **given,
        "input_tokens_details": _details(given, "input_tokens_details", "cached_tokens", "cache_write_tokens"),
        "output_tokens_details": _details(given, "output_tokens_details", "reasoning_tokens"),
        "total_tokens": _count(given, "total_tokens") or given["input_tokens"] + given["output_tokens"],
    }


def _details(usage: dict[str, Any], name: str, *counts: str) -> dict[str, Any]:
    details = usage.get(name)
    given = {name: value for name, value in details.items() if value is not None} if isinstance(details, dict) else {}
    return {**given, **{name: _count(given, name) for name in counts}}


def add_usage(total: dict[str, Any] | None, usage: dict[str, Any]) -> dict[str, Any]:
    """Return ``total`` plus the ``usage`` of another turn. Counts are added; other members take the value in ``usage``."""
    if total is None:
        return usage
    merged = {**total, **usage}
    for name, value in usage.items():
        before = total.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            merged[name] = add_usage(before, value)
        elif type(value) is int and type(before) is int:
            merged[name] = before + value
    return merged


class UsageSum:
    """The usage of a run: the sum of its turns. A turn that was interrupted and continued counts once."""

    def __init__(self) -> None:
        self.reported: dict[str, Any] | None = None
        """The last usage that the upstream reported for the turn. Repeated reports are cumulative."""
        self._turn_before: dict[str, Any] | None = None
        self._part: dict[str, Any] | None = None
        self._is_known = True

    def continues(self, part: dict[str, Any] | None) -> None:
        """Set the chat usage of the answer that the next one continues; None if it is not known."""
        self._part = usage_of_chat(part) if part else None
        self._is_known &= part is not None

    def with_turn(self, total: dict[str, Any] | None) -> dict[str, Any] | None:
        """Add the turn to the ``total`` of the turns before it. Return None if the usage of a part is not known."""
        if not self.reported or not self._is_known:
            return total if self._is_known else None
        usage = usage_of_chat(self.reported)
        if self._part:
            usage = _with_part(usage, self._part)
        before, self.reported, self._part, self._turn_before = self._turn_before, None, None, usage
        if before is None:
            return add_usage(total, usage)
        # As in vLLM, the tokens of tool results are the growth of the prompt minus the previous answer.
        grown = usage["input_tokens"] - before["input_tokens"] - before["output_tokens"]
        details = {**usage["output_tokens_details"], "tool_output_tokens": max(grown, 0)}
        return add_usage(total, {**usage, "output_tokens_details": details})


def _with_part(usage: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return the usage of an answer in two parts. ``usage`` is the second part's, whose prompt contained the first part."""
    prompt, answer = part["input_tokens"], part["output_tokens"] + usage["output_tokens"]
    return {
        "input_tokens": prompt,
        "input_tokens_details": {name: min(count, prompt) for name, count in usage["input_tokens_details"].items()},
        "output_tokens": answer,
        "output_tokens_details": part["output_tokens_details"],  # the continuation of a text has no reasoning
        "total_tokens": prompt + answer,
    }


# -- the response as it is built -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """Options of the request that affect its events."""

    summary: bool = False
    open_reasoning: bool = False
    """Whether reasoning events have the names of the Open Responses specification instead of OpenAI's."""
    logprobs: bool = False
    think_tag: str | None = None
    single_call: bool = False
    """Whether to leave out further calls, if the upstream ignores ``parallel_tool_calls``."""
    max_calls: int | None = None
    """Maximum number of calls that the server executes."""
    include: frozenset[str] = frozenset()
    used_call_ids: frozenset[str] = frozenset()
    seal: Callable[[str], str] | None = None
    """Makes the ``encrypted_content`` of a reasoning item from its text. None if it is not requested."""


class IdSource(Protocol):
    """A source of ids (``responses_mw.ids.RunIds``). The protocol itself makes no random numbers."""

    def item(self, prefix: str) -> str: ...


class ResponseBuilder(ABC):
    """A response being built. Methods return the events they cause, in order.

    `Assembler` builds the output from chat chunks, `ResponsesPassthrough` from the events of an upstream's own Responses API.
    The members about calls and interruptions keep their defaults if the upstream runs the tools itself.
    """

    finish_reason: str | None = None
    asked: Sequence[ToolCall] = ()
    """The calls of the last turn that the server executes."""
    has_client_calls: bool = False
    """Whether the last turn has calls that the client executes."""
    has_left_out: bool = False
    """Whether the last turn had more calls than `max_tool_calls` allows."""
    sources: Sequence[Source] = ()
    """The sources that the answer may cite."""
    turn_begins_at: int = 0
    """Number of items before those of the turn."""

    def __init__(self, document: Document, ids: IdSource, options: ResponseOptions) -> None:
        """`document` is the response as created; `response` is its current state."""
        self.response = document
        self._ids = ids
        self._options = options
        self._emitter: Emitter = Emitter()

    # Beginning and end

    def discard_events(self) -> None:
        """Emit only the events that hold the document. Call this before the first event."""
        self._emitter = NullEmitter()

    def start(self, *, queued: bool = False) -> list[Event]:
        """Emit ``response.created``, then ``queued`` (the run waits for a worker) or ``in_progress``."""
        self.response["status"] = "queued" if queued else "in_progress"
        self._lifecycle("response.created", "response.queued" if queued else "response.in_progress")
        return self._emitter.drain()

    def resume(self, number: int) -> list[Event]:
        """Start a queued run whose next event has this ``number``. Emit ``in_progress``, unless another worker already did."""
        self._emitter.next_number = number
        self.response["status"] = "in_progress"
        if number == 2:  # after created and queued
            self._lifecycle("response.in_progress")
        return self._emitter.drain()

    def take_over(self, takeover: Takeover, number: int) -> list[Event]:
        """Continue the output of another worker. The next event has this ``number``.

        Text stays open; any other open item is closed as ``incomplete``.
        """
        raise NotImplementedError

    def conclude(self, completed_at: int) -> None:
        """Complete the document after the last turn."""
        self.response.update(status="completed", completed_at=completed_at)

    def fail(self, code: str, message: str) -> None:
        """Mark the document as failed, even if it was concluded before."""
        error = {"code": code, "message": message}
        self.response.update(status="failed", completed_at=None, incomplete_details=None, error=error)

    def terminal(self) -> list[Event]:
        """Emit the event that ends the stream. Called again after the document has changed, it uses the same number."""
        number = self._emitter.next_number
        self._lifecycle(terminal_type(self.response))
        self._emitter.next_number = number
        return self._emitter.drain()

    def _lifecycle(self, *events: str) -> None:
        """Emit events that hold the document as it is now."""
        self._emitter.emit(*events, response=whole(self.response, self._options.include))

    # Turns

    @abstractmethod
    def offer(self, offered: Sequence[OfferedFunction], choice: Any) -> None:
        """Set the functions that the model may call. `choice` is the request's `tool_choice`."""

    @abstractmethod
    def feed(self, *chunks: Chunk | Text) -> list[Event]:
        """Take what the upstream sent. Raises `UpstreamError` if it is malformed."""

    @abstractmethod
    def end_turn(self) -> list[Event]:
        """Finish the turn, up to the first call that the server executes."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the turn fed so far is complete, even if the upstream's stream ends here."""

    @property
    def phase(self) -> Phase:
        """What the client has seen of the turn. The default says that the turn cannot be continued."""
        return Phase.FIXED

    def break_off(self) -> list[Event]:
        """Prepare for another answer to the turn. Text stays open; any other open item is closed as ``incomplete``."""
        raise NotImplementedError

    def join(self, text: str, *, is_trimmed: bool, usage: dict[str, Any] | None) -> None:
        """Expect an answer that continues `text`, the message so far.

        If `is_trimmed`, the upstream does not see the white space at its end. `usage` is the chat usage of the answer so far;
        None if it is not known.
        """
        raise NotImplementedError

    @property
    def is_exhausted(self) -> bool:
        """Whether `max_tool_calls` allows no further call."""
        return False

    @property
    def awaited(self) -> Item:
        """The item of the call whose result `settle` takes next."""
        raise NotImplementedError

    def settle(self, members: Mapping[str, Any], *, failed: bool = False) -> list[Event]:
        """Add the result of the next of the `asked` calls; ``members`` are the parts of it that its item shows."""
        raise NotImplementedError

    # Items that arrive whole

    def list_tools(self, listings: Iterable[Item]) -> list[Event]:
        """Add the tools of MCP servers as items before the first turn, given the ``server_label`` and ``tools`` of each."""
        for listing in listings:
            added = {"type": "mcp_list_tools", "server_label": listing["server_label"], "tools": []}
            item, output_index = self._add_item(added)
            place = {"item_id": item["id"], "output_index": output_index}
            self._emitter.emit("response.mcp_list_tools.in_progress", **place)
            item |= listing
            self._emitter.emit("response.mcp_list_tools.completed", **place)
            emit_done(self._emitter, item, output_index)
        return self._emitter.drain()

    def add_whole(self, item: Item, usage: dict[str, Any] | None) -> list[Event]:
        """Add a complete item. ``usage`` counts the tokens used to make it."""
        item, output_index = self._add_item(item)
        emit_done(self._emitter, item, output_index)
        if usage:
            self.response["usage"] = add_usage(self.response["usage"], usage)
        return self._emitter.drain()

    def _add_item(self, item: Item) -> tuple[Item, int]:
        """Add an item. The only place that assigns an item's id and ``output_index``."""
        output = self.response["output"]
        item = {"id": self._ids.item(ID_PREFIXES[item["type"]]), **item}
        output.append(item)
        self._emitter.emit(ADDED, output_index=len(output) - 1, item=item)
        return item, len(output) - 1
