"""Which calls of the model count, and in which form and under which id they are given back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .forms import CallForm, Offered, function
from .items import CALL_ID_LENGTH
from .options import Options
from .toolcalls import ToolCall
from .tools import choice_names


class CallRules:
    """What the request allows, and how much of it is used up; for all turns of a run."""

    def __init__(self, options: Options) -> None:
        self.forms: Mapping[str, CallForm] = {}
        """The forms of the functions that are offered, by their names; a call of any other is a function call."""
        self._allowed = options.allowed
        self.has_left_out = False
        """Whether the turn had more calls than may be carried out here (``max_tool_calls``)."""
        self._options = options
        self._call_ids = set(options.used_call_ids)
        self._served = 0

    def offer(self, offered: Sequence[Offered], choice: Any) -> None:
        """``offered`` are the functions that the model may call, ``choice`` is the request's ``tool_choice``."""
        self.forms = {one.name: one.form for one in offered}
        if isinstance(choice, dict) and choice["type"] == "allowed_tools":
            self._allowed = choice_names(choice, offered)

    @property
    def is_exhausted(self) -> bool:
        """Whether no more calls may be carried out here."""
        return self._served == self._options.most_calls

    def decide(self, call: ToolCall, turn: Sequence[ToolCall]) -> CallForm | None:
        """How a call of the ``turn`` is given back; None for one that is left out. Decided once, when it has its name."""
        if not call.is_decided:
            call.is_decided = True
            call.form = self._form(call, turn)
        return call.form

    def _form(self, call: ToolCall, turn: Sequence[ToolCall]) -> CallForm | None:
        form = self.forms.get(call.name) or function(call.name)
        if form.members.get("approval_request_id"):
            return form  # it was the model's wish before, and is the client's now
        if self._allowed is not None and call.name not in self._allowed:
            return None  # allowed_tools is a hard limit
        if self._options.single_call and any(other.form for other in turn):
            return None  # parallel_tool_calls is false
        if form.served and self._served == self._options.most_calls:
            self.has_left_out = True
            return None
        self._served += form.served
        return form

    def call_id(self, given: str | None, mint: Callable[[], str]) -> str:
        """The upstream's id, unless it is missing, already used in the chain (TGI calls every call "0"), or longer than what
        a caller may send back."""
        usable = given and given not in self._call_ids and len(given) <= CALL_ID_LENGTH
        call_id = given if given and usable else mint()
        self._call_ids.add(call_id)
        return call_id
