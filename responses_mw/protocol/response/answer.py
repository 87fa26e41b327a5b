"""The state of one answer of the upstream to the request of a turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ...errors import UpstreamBrokeOff, UpstreamError, UpstreamStartedOver
from ..chat.finish_reasons import Ending, ending_of
from ..chat.tool_calls import ToolCall, ToolCalls
from ..types import Item
from .events import OUTPUT_TEXT, EventTarget
from .seam import Seam
from .text import ThinkingSplitter

INCOMPLETE = "The upstream closed the connection before its answer was complete."

CUT_REASONS = {Ending.LIMIT: "max_output_tokens", Ending.FILTER: "content_filter"}
"""The reasons of an incomplete response."""

_CUT = tuple(CUT_REASONS)  # found by identity, while a dict would call the hash function of the enumeration

HeldText: TypeAlias = tuple[EventTarget, str, Any]  # the kind of a text, the text, and its log probabilities


@dataclass(slots=True)
class UpstreamAnswer:
    """Facts about the last answer that the run needs. The defaults are those of an upstream that runs the tools itself."""

    finish_reason: str | None = None
    asked: list[ToolCall] = field(default_factory=list)  # the calls that the server must execute
    has_client_calls: bool = False  # whether there are calls that the client executes
    has_left_out: bool = False  # whether there were more calls than `max_tool_calls` allows
    needs_answer: bool = False  # whether the answer is a draft whose calls, if any, are not executed
    excluded: list[str] = field(default_factory=list)  # names of the called functions that `tool_choice` excludes
    refused_calls: list[Item] = field(default_factory=list)
    """The calls to functions that nobody offers, each with an output. Only the model sees these items."""


class ChatAnswer(UpstreamAnswer):
    """A chat completion as received so far, including the parts that are not shown yet."""

    __slots__ = (
        *("direct", "ending", "has_bare_chunk", "has_output", "has_served_call", "held", "joined", "late", "seam"),
        *("shown", "splitter", "thinking", "tool_calls", "unoffered", "usage_is_last", "waiting_calls"),
    )

    def __init__(self, tool_calls: ToolCalls, thinking: EventTarget, think_tag: str | None) -> None:
        """`tool_calls` collects the calls. Reasoning is shown as `thinking`. `think_tag` is the tag around it, if any."""
        super().__init__()
        self.tool_calls = tool_calls
        self.shown = 0
        """Number of calls that have been opened or left out."""
        self.unoffered: list[ToolCall] = []
        """Calls that neither the client nor the server can execute."""
        self.has_served_call = False
        """Whether there is a call that the server executes, or may execute later."""
        self.ending: Ending | None = None
        self.has_output = False
        """Whether there has been any output, even if none of it is shown yet."""
        self.usage_is_last = self.has_bare_chunk = False
        """Whether the last chunk has usage, and whether any chunk has none."""
        self.splitter = ThinkingSplitter(think_tag) if think_tag else None
        self.held: list[HeldText] = []
        """White space that does not begin an item."""
        self.late: list[HeldText] = []
        """Text after a call that is not over."""
        self.joined: Seam | None = None
        self.seam: Seam | None = None
        """The same as `joined` until the text has passed it."""
        self.waiting_calls: list[Any] = []
        """Fragments of calls that follow text which the seam holds back."""
        self.show_thinking_as(thinking)

    def show_thinking_as(self, kind: EventTarget) -> None:
        self.thinking = kind
        # The kind of text in each member of a delta. Content that may contain reasoning tags is excluded.
        self.direct = {"reasoning": kind, "reasoning_content": kind}
        if self.splitter is None:
            self.direct["content"] = OUTPUT_TEXT

    def expect(self, seam: Seam) -> None:
        """Let all text pass `seam` first, because it should continue a message."""
        self.seam = self.joined = seam
        self.direct = {}  # until the seam is passed

    @property
    def repeats(self) -> bool:
        """Whether the answer repeats the interrupted one, because the upstream started over."""
        return self.joined is not None and self.joined.repeats

    def count_served(self) -> int:
        """Return the number of calls that the server executes or refuses."""
        return len(self.unoffered) + sum(bool(call.form and call.form.served) for call in self.tool_calls.calls)

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self, word: str) -> None:
        """Record the finish reason."""
        self.finish_reason, self.ending = word, ending_of(word)

    @property
    def has_ended(self) -> bool:
        """Whether the answer would be complete if the upstream ended its stream now, without saying that it is over."""
        if self.ending is Ending.FAULT:
            return False
        # Without a finish reason, an answer is complete if the last chunk has usage and another chunk has none.
        by_usage = self.usage_is_last and self.has_bare_chunk
        return self.ending is not None or (by_usage and self.has_output and not self.has_cut_call())

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended too early, and is not continued."""
        return self.ending in _CUT or (self.ending is Ending.UNKNOWN and self.has_cut_call())

    def has_cut_call(self) -> bool:
        return any(call.is_cut() for call in self.tool_calls.calls)

    def check_end(self, *, has_ended: bool, done: bool) -> None:
        """Check the answer at the end of the stream (see `ResponseBuilder.check_end`)."""
        if self.ending is Ending.FAULT:
            raise UpstreamBrokeOff("The upstream aborted its answer.")
        if self.ending is Ending.LIMIT and self.repeats:
            # The limit was reduced by the tokens of the interrupted answer, which the new answer contains as well.
            raise UpstreamStartedOver("The upstream started a new answer, which was cut before the limit.")
        if has_ended:
            return
        if not done or self.has_cut_call():
            raise UpstreamBrokeOff(INCOMPLETE)
        if not self.has_output:
            raise UpstreamError("The upstream ended its answer without any output.")
