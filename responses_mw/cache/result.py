"""The results of a lookup: a hit, or the reason for a miss.

Reasons are labels of a metric, and appear in the access line and in the header `x-responses-cache`:

    uncacheable:<cause>   the request is never cached; `key.obstacle` names the causes
    refresh               the request asked not to look up an answer
    not_found             no answer to this text, nor to a similar text if the mode is semantic
    below_threshold       the nearest text is less similar than the threshold
    guard:<rule>          the nearest text differs; `guard.difference` names the rules
    too_long              the text is too long to be compared
    embedding_failed      the embeddings server failed, or did not answer in time
    unreadable            the stored answer is damaged, or sealed with another key
    failed                Redis failed, or did not answer in time
"""

from __future__ import annotations

from dataclasses import dataclass

from ..protocol.types import Chunk
from .embeddings import Computing
from .guard import Signature
from .key import Key
from .policy import Policy


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached answer as chat ``chunks``. ``kind`` is ``exact`` or ``semantic``; ``age`` is in seconds."""

    kind: str
    similarity: float
    age: int
    chunks: list[Chunk]

    @property
    def header(self) -> str:
        """The value of ``x-responses-cache``."""
        return f"{self.kind}; similarity={self.similarity:.4f}; age={self.age}"


@dataclass(slots=True)
class Miss:
    """No cached answer. Holds what is needed to store the new answer and to release the requests that wait for it."""

    key: Key
    policy: Policy
    generation: str | None = None
    """None if the cache failed: the answer is not stored."""
    token: str | None = None
    """Set while this request holds the flight, so that equal requests wait for it."""
    vector: Computing | None = None
    """The embedding of the text, until the answer is stored or given up."""
    signature: Signature | None = None
    """The signature of the text, once it has been computed."""
    reason: str = "not_found"
    nearest: float | None = None
    """Similarity of the nearest text, if the reason concerns that text."""

    @property
    def header(self) -> str:
        similarity = "" if self.nearest is None else f"; similarity={self.nearest:.4f}"
        threshold = f"; threshold={self.policy.threshold:.4f}" if self.reason == "below_threshold" else ""
        return f"miss; reason={self.reason}{similarity}{threshold}"

    def because(self, reason: str, nearest: float | None = None) -> None:
        """Record why there is no hit, unless a reason is recorded already."""
        if self.reason == "not_found":
            self.reason, self.nearest = reason, nearest


@dataclass(frozen=True, slots=True)
class Uncacheable:
    """A request that is never cached."""

    cause: str

    @property
    def reason(self) -> str:
        return f"uncacheable:{self.cause}"

    @property
    def header(self) -> str:
        return f"miss; reason={self.reason}"
