"""The forms that calls have: to the chat model every tool is a function; to the client each has an item and events of its own.

What differs between two kinds of call is a cell of this table (OpenAI reference, "Streaming events").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..types import Tool


@dataclass(frozen=True, slots=True)
class CallForm:
    """How the calls of one function stand as items and in events."""

    item: str
    """Type of the item; ``prefix`` begins its id."""
    prefix: str
    members: Mapping[str, Any] = field(default_factory=dict)
    """What every such item has from the beginning, beside id, type and status: ``name``, ``namespace``, ``server_label``."""
    text: str | None = None
    """The member that grows while the model writes. None: nothing is shown before the call is whole."""
    events: str = ""
    """``response.<events>.delta`` and ``.done`` tell of the text."""
    done: tuple[str, ...] = ()
    """The members of the item that the ``.done`` event repeats."""
    argument: str | None = None
    """The member of the function's arguments that is the text. None: the arguments, as they are."""
    made: Callable[[str], dict[str, Any]] | None = None
    """Members of the item that are made of the whole arguments."""
    begins: tuple[str, ...] = ()
    """``response.<...>``: events after ``output_item.added``."""
    runs: tuple[str, ...] = ()
    """Events when the call begins to be carried out."""
    ends: tuple[str, ...] = ()
    """Events when it is over: if it went well, and if it failed."""
    served: bool = False
    """Whether the call is carried out here; else by the client, which finds it by its ``call_id``."""


def function(name: str, **members: Any) -> CallForm:
    """A function of the client's; ``members`` is its ``namespace``, if it is in one."""
    return CallForm(
        item="function_call",
        prefix="fc",
        members={"name": name, **members},
        text="arguments",
        events="function_call_arguments",
        done=("name", "arguments"),
    )


@dataclass(frozen=True, slots=True)
class Offered:
    """A function that the model may call, as ``tools`` have it, and the form in which its calls are given back."""

    function: Tool
    form: CallForm

    @property
    def name(self) -> str:
        return str(self.function["name"])
