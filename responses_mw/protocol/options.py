"""What of a request shapes the events of its response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """What of the request shapes the events. ``allowed`` and ``single_call`` enforce what an upstream may ignore."""

    summary: bool = False
    open_reasoning: bool = False
    """Whether the events of reasoning have the names of the Open Responses specification, not OpenAI's."""
    logprobs: bool = False
    think_tag: str | None = None
    allowed: frozenset[str] | None = None
    single_call: bool = False
    most_calls: int | None = None
    """How many calls are carried out here, at most."""
    include: frozenset[str] = frozenset()
    used_call_ids: frozenset[str] = frozenset()
    seal: Callable[[str], str] | None = None
    """Makes a reasoning item's ``encrypted_content`` out of its text, where that was asked for."""


DEFAULTS = Options()
