"""Who asks, and what is known of him within one request."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..auth import ANONYMOUS

REFUSALS = frozenset({401, 403})
"""Statuses by which a server refuses a credential."""


@dataclass(slots=True)
class Standing:
    """Whether a caller has been accepted: by a key of ours, by the upstream's word lately, or by its answer to this request."""

    is_known: bool = False
    """He has a key of ours: what the upstream says is about the operator's credential, not about his."""
    is_accepted: bool = False
    is_refused: bool = False
    _has_chatted: bool = False

    def chat_accepted(self) -> None:
        """The upstream has begun an answer for him."""
        self._has_chatted = self.is_accepted = True
        self.is_refused = False

    def chat_refused(self) -> None:
        """The upstream has refused him in place of an answer. It counts only where there was none before."""
        if not (self.is_known or self._has_chatted):
            self.is_accepted, self.is_refused = False, True


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: ``owner`` is whose the request is; ``headers`` go on to the upstream; ``scope`` is the ASGI scope that a call
    in this process inherits from."""

    owner: str = ANONYMOUS
    headers: dict[str, str] = field(default_factory=dict)
    scope: MutableMapping[str, Any] | None = None
    standing: Standing = field(default_factory=Standing, compare=False)

    def again(self) -> Caller:
        """The same caller in another request of his: he has to be accepted again, unless he has a key of ours."""
        is_known = self.standing.is_known
        return replace(self, standing=Standing(is_known=is_known, is_accepted=is_known))
