"""The response object, its token usage, and the base class of the builders that produce its output."""

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
"""Values that the document shows for parameters that the client did not set."""


def create(request: CreateResponse, *, response_id: str, model: str, created_at: int) -> Document:
    """Create the document of a new run, with every member that the Open Responses specification requires.

    `model` is the model of the request or, by default, the upstream's only model. `created_at` is in seconds since the epoch.
    """
    wanted = request.text.get("format", {"type": "text"})
    if wanted["type"] == "json_schema":  # the document always has a description and `strict`
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
    """Return a tool as the document shows it. A function always has a description, parameters and `strict`."""
    if tool["type"] != "function":
        return tool
    return {**tool, **{name: tool.get(name) for name in ("description", "parameters", "strict")}}


def output_text(document: Document) -> str:
    """Return the concatenated text of the answer, as the SDKs compute it."""
    return "".join(
        part["text"]
        for item in document["output"]
        if item["type"] == "message"
        for part in item.get("content") or ()
        if part.get("type") == "output_text" and isinstance(part.get("text"), str)
    )


def shown(item: Item, include: frozenset[str]) -> Item:
    """Return an item as clients see it. Search results, sources and code outputs are removed unless `include` lists them."""
    kind = item["type"]
    if kind == "web_search_call":
        hidden = frozenset({"results", "sources"}) - {wanted.rpartition(".")[2] for wanted in include if kind in wanted}
        action = {name: value for name, value in item.get("action", {}).items() if name not in hidden}
        return {**{name: value for name, value in item.items() if name not in hidden}, "action": action}
    if kind == "code_interpreter_call" and "code_interpreter_call.outputs" not in include:
        return {**item, "outputs": None}
    return item


def whole(document: Document, include: frozenset[str] = frozenset()) -> Document:
    """Return the document as shown to clients, with `output_text`, which is computed here and never stored."""
    output = [shown(item, include) for item in document["output"]]
    return {**document, "output": output, "output_text": output_text(document)}


def end(document: Document, number: int) -> Event:
    """Return the terminal event of a run that ended with `document`. `number` is the sequence number of the event."""
    kind = terminal_type(document)
    return Event(kind, {"type": kind, "response": whole(document), "sequence_number": number})


# -- usage: the token counts of many servers in one shape ----------------------------------------------------------------

_MAX_COUNT = 2**53 - 1
"""Maximum token count. Not every client can read larger integers."""


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _count(holder: Any, *names: str) -> int:
    """Return the first valid count among the members `names` of `holder`, or 0 if there is none."""
    given = (holder.get(name) for name in names) if isinstance(holder, dict) else ()
    return next(filter(_is_count, given), 0)


def usage_of_chat(usage: dict[str, Any]) -> dict[str, Any]:
    """Convert a chat `usage` to a `ResponseUsage`. Unknown details are 0, because clients require all details."""
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
            # SGLang reports reasoning tokens beside the other counts, not in the details.
            "reasoning_tokens": _count(of_completion, "reasoning_tokens") or _count(usage, "reasoning_tokens"),
        },
        "total_tokens": _count(usage, "total_tokens") or prompt + completion,
    }


def usage_of_responses(given: Any) -> dict[str, Any] | None:
    """Return the usage of an upstream's response, with all details that the SDKs require.

    Return None if the counts of input or output tokens are missing or invalid.
    """
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
    """Return `total` plus the `usage` of another turn. Counts are added. Other members are taken from `usage`."""
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
    """The sum of the usage of a run's turns. An interrupted turn and its continuation count as one turn."""

    def __init__(self) -> None:
        self.reported: dict[str, Any] | None = None
        """The last usage that the upstream reported for the turn. Repeated reports are cumulative."""
        self._turn_before: dict[str, Any] | None = None
        self._part: dict[str, Any] | None = None
        self._is_known = True

    def continues(self, part: dict[str, Any] | None) -> None:
        """Set the chat usage of the interrupted answer that the next answer continues, or None if this usage is unknown."""
        self._part = usage_of_chat(part) if part else None
        self._is_known &= part is not None

    def with_turn(self, total: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return `total`, which is the usage of the earlier turns, plus the usage of the current turn.

        The current turn's usage is added only once. Return None if the usage of an interrupted answer is unknown.
        """
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
    """Return the usage of an answer in two parts.

    `part` is the usage of the first part. `usage` is the usage of the second part, whose prompt contained the first part.
    """
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
    """Options of a request that affect the events of its response."""

    summary: bool = False
    open_reasoning: bool = False
    """Whether reasoning events have the names of the Open Responses specification instead of OpenAI's."""
    logprobs: bool = False
    think_tag: str | None = None
    single_call: bool = False
    """Whether a turn may have only one call. Further calls are left out, because upstreams may ignore `parallel_tool_calls`."""
    max_calls: int | None = None
    """Maximum number of calls that the server executes."""
    include: frozenset[str] = frozenset()
    used_call_ids: frozenset[str] = frozenset()
    seal: Callable[[str], str] | None = None
    """Encrypts the text of a reasoning item as its `encrypted_content`. None if the request does not ask for encryption."""


class IdSource(Protocol):
    """A source of ids (`responses_mw.ids.RunIds`). The `protocol` package itself generates no random numbers."""

    def item(self, prefix: str) -> str: ...


class ResponseBuilder(ABC):
    """Builds a response from the answers of the upstream. Methods return the events that they emit, in order.

    `Assembler` builds the output from chat chunks, `ResponsesPassthrough` from the events of an upstream's own Responses API.
    `ResponsesPassthrough` does not override the members for calls and interruptions, because the upstream runs the tools.
    """

    finish_reason: str | None = None
    asked: Sequence[ToolCall] = ()
    """The calls of the last turn that the server must execute."""
    has_client_calls: bool = False
    """Whether the last turn has calls that the client executes."""
    has_left_out: bool = False
    """Whether the last turn had more calls than `max_tool_calls` allows."""
    sources: Sequence[Source] = ()
    """The sources that the answer may cite."""
    turn_begins_at: int = 0
    """Number of items before the current turn."""

    def __init__(self, document: Document, ids: IdSource, options: ResponseOptions) -> None:
        """`document` is the newly created response. It is updated in place, and available as `response`."""
        self.response = document
        self._ids = ids
        self._options = options
        self._emitter: Emitter = Emitter()

    # Beginning and end

    def discard_events(self) -> None:
        """Discard all events except those that contain the document. This must be called before the first event."""
        self._emitter = NullEmitter()

    def start(self, *, queued: bool = False) -> list[Event]:
        """Start the response and emit `response.created`.

        The second event is `response.queued` if the run is `queued` until a worker takes it, otherwise `response.in_progress`.
        """
        self.response["status"] = "queued" if queued else "in_progress"
        self._lifecycle("response.created", "response.queued" if queued else "response.in_progress")
        return self._emitter.drain()

    def resume(self, number: int) -> list[Event]:
        """Start a queued run. `number` is the number of its next event.

        Emit `response.in_progress`, unless another worker has already emitted this event.
        """
        self._emitter.next_number = number
        self.response["status"] = "in_progress"
        if number == 2:  # after created and queued
            self._lifecycle("response.in_progress")
        return self._emitter.drain()

    def take_over(self, takeover: Takeover, number: int) -> list[Event]:
        """Continue the output of another worker. `number` is the number of the next event.

        An open output text stays open, so that it can be continued. Any other open item is closed as `incomplete`.
        """
        raise NotImplementedError

    def conclude(self, completed_at: int) -> None:
        """Complete the document after the last turn."""
        self.response.update(status="completed", completed_at=completed_at)

    def fail(self, code: str, message: str) -> None:
        """Mark the document as failed, even after `conclude`."""
        error = {"code": code, "message": message}
        self.response.update(status="failed", completed_at=None, incomplete_details=None, error=error)

    def terminal(self) -> list[Event]:
        """Emit the event that ends the stream.

        The document may change after this event. A second call then emits the event again, with the same number.
        """
        number = self._emitter.next_number
        self._lifecycle(terminal_type(self.response))
        self._emitter.next_number = number
        return self._emitter.drain()

    def _lifecycle(self, *events: str) -> None:
        """Emit events that contain the current document."""
        self._emitter.emit(*events, response=whole(self.response, self._options.include))

    # Turns

    @abstractmethod
    def offer(self, offered: Sequence[OfferedFunction], choice: Any) -> None:
        """Set the functions that the model may call. `choice` is the request's `tool_choice`."""

    @abstractmethod
    def feed(self, *chunks: Chunk | Text) -> list[Event]:
        """Process chunks or events of the upstream's answer. Raises `UpstreamError` if the answer is malformed."""

    @abstractmethod
    def end_turn(self) -> list[Event]:
        """End the turn. Close its items up to the first call that the server executes.

        Later items are emitted after `settle` adds the result of this call. Raises `UpstreamError` if the upstream's answer is
        incomplete or unusable.
        """

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the turn is complete if the upstream's stream ends now."""

    @property
    def phase(self) -> Phase:
        """What the client has seen of the turn. The default means that the turn cannot be continued."""
        return Phase.FIXED

    def break_off(self) -> list[Event]:
        """Prepare for another answer to the interrupted turn.

        An open output text stays open, so that it can be continued. Any other open item is closed as `incomplete`.
        """
        raise NotImplementedError

    def join(self, text: str, *, is_trimmed: bool, usage: dict[str, Any] | None) -> None:
        """Expect an answer that continues `text`, which is the message so far.

        If `is_trimmed`, the upstream does not see the white space at the end of `text`. `usage` is the chat usage of the answer
        so far, or None if the usage is unknown.
        """
        raise NotImplementedError

    @property
    def is_exhausted(self) -> bool:
        """Whether `max_tool_calls` allows no further call."""
        return False

    @property
    def awaited(self) -> Item:
        """The item of the call whose result must be passed to `settle` next."""
        raise NotImplementedError

    def settle(self, members: Mapping[str, Any], *, failed: bool = False) -> list[Event]:
        """Add the result of the next call in `asked`. `members` are the members of the result that the call's item shows."""
        raise NotImplementedError

    # Items that arrive whole

    def list_tools(self, listings: Iterable[Item]) -> list[Event]:
        """Add an `mcp_list_tools` item for each MCP server, before the first turn.

        Each listing contains the `server_label` and the `tools` of one server.
        """
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
        """Add a complete item. `usage`, the tokens used to make the item, is added to the usage of the response."""
        item, output_index = self._add_item(item)
        emit_done(self._emitter, item, output_index)
        if usage:
            self.response["usage"] = add_usage(self.response["usage"], usage)
        return self._emitter.drain()

    def _add_item(self, item: Item) -> tuple[Item, int]:
        """Add an item to the output, with a new id, and emit its `added` event. Return the item and its `output_index`."""
        output = self.response["output"]
        item = {"id": self._ids.item(ID_PREFIXES[item["type"]]), **item}
        output.append(item)
        self._emitter.emit(ADDED, output_index=len(output) - 1, item=item)
        return item, len(output) - 1
