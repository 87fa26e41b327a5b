"""The caller of a request, and whether its credential is accepted."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..auth import ANONYMOUS

REFUSALS = frozenset({401, 403})
"""Statuses by which a server refuses a credential."""


@dataclass(slots=True)
class Standing:
    """Whether a caller is accepted: by one of our keys, by a recent check at the upstream, or by its answer to this request."""

    is_known: bool = False
    """The caller has one of our keys. A refusal by the upstream then concerns the operator's credential."""
    is_accepted: bool = False
    is_refused: bool = False
    _has_chatted: bool = False

    def chat_accepted(self) -> None:
        """Record that the upstream began an answer for the caller."""
        self._has_chatted = self.is_accepted = True
        self.is_refused = False

    def chat_refused(self) -> None:
        """Record that the upstream refused the caller. Ignored after an answer has begun."""
        if not (self.is_known or self._has_chatted):
            self.is_accepted, self.is_refused = False, True


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request.

    ``owner`` owns what the request stores, ``headers`` are forwarded to the upstream, and in-process calls inherit ``scope``.
    """

    owner: str = ANONYMOUS
    headers: dict[str, str] = field(default_factory=dict)
    scope: MutableMapping[str, Any] | None = None
    standing: Standing = field(default_factory=Standing, compare=False)

    def again(self) -> Caller:
        """Return the caller for another request. It must be accepted again unless it has one of our keys."""
        is_known = self.standing.is_known
        return replace(self, standing=Standing(is_known=is_known, is_accepted=is_known))
