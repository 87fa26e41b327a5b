"""What the state layer takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..ids import new_tag

__all__ = ["VERSION", "Batch", "Bounds", "Chain", "Conversation", "Item", "Job", "Page", "Pointer", "Stored", "Taken", "Turn"]

# The form of records, turns and items that this release writes. It changes only by addition; a higher one is refused.
VERSION = 1

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that is stored, as JSON, before compression; a conversation is bounded as a chain is.

    ``recent_bytes`` is the most that a process keeps in memory of the chains that it has read; 0 keeps nothing.
    """

    response_bytes: int = 16 * 1024 * 1024
    chain_bytes: int = 64 * 1024 * 1024
    chain_items: int = 10_000
    recent_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where a stored response stands: the end of its turn in a segment, and the segments before (``name:length,...``)."""

    random: str
    segment: str
    length: int
    path: str

    @property
    def ranges(self) -> list[tuple[str, int]]:
        """The segments from the root on, and how many turns of each."""
        steps = [step.partition(":") for step in self.path.split(",") if step]
        return [(name, int(length)) for name, _, length in steps] + [(self.segment, self.length)]


class Turn(NamedTuple):
    """What one response was given and answered. ``owner`` is the random part of its id, ``size`` that of its JSON in bytes."""

    owner: str
    input: list[Item]
    output: list[Item]
    size: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A history that a new response stands on.

    ``tag`` is for the new response's id. ``items`` are all earlier items in order. The rest is for the commit: the ``parent``
    to append to, or else the stored ``turns`` to begin a new root with; the ``size`` of the items' JSON in bytes; the
    ``conversation`` to append to, and the counter of the last item of it that was ``seen``.
    """

    tag: str
    items: list[Item]
    parent: Pointer | None = None
    turns: Sequence[Turn] = ()
    size: int = 0
    conversation: str | None = None
    seen: int = 0

    @classmethod
    def new(cls) -> Chain:
        """The empty history of a response without parent or conversation."""
        return cls(tag=new_tag(), items=[])

    @property
    def call_ids(self) -> frozenset[str]:
        """The ``call_id`` of every tool call in the history (not of the outputs that answer them)."""
        return frozenset(item["call_id"] for item in self.items if item.get("call_id") and not item["type"].endswith("_output"))


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored response: its whole ``document``, and the ``input`` items of its own turn.

    ``lost``: it is a background response to be settled: nobody has its lease, or it has waited so long that its place in the
    queue is worth a look.
    """

    document: dict[str, Any]
    input: list[Item]
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Some events of a log, numbered from ``first`` to ``last``, as the bytes that a client gets. ``final`` ends the log."""

    first: int
    last: int
    data: bytes
    final: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A background response in the hands of the holder of ``token``.

    ``document`` is the response without its output; ``body`` and ``input`` are the request; ``credential`` is sealed, None if
    it has expired. ``next_number`` is that of the next event; ``size`` the
    bytes of the request's JSON.
    """

    response_id: str
    owner: str
    token: str
    next_number: int
    document: dict[str, Any]
    body: dict[str, Any]
    input: list[Item]
    credential: str | None
    size: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of taking a job. ``verdict``:

    run         the job is to be run
    lost        its worker was lost after the first output, or too often: its end is to be written
    cancelled   its end is to be written, as cancelled
    held        another has it, for ``left`` more seconds
    waiting     it waits for a worker
    done        it has ended
    missing     there is no such response (for this owner)

    The first three come with the ``job``, and with the ``worker`` that had it before. ``unseen``: it waits, and nobody has
    looked for its place in the queue for long (``Queue.restore``); the owner of it.
    """

    verdict: str
    job: Job | None = None
    worker: str = ""
    left: float = 0.0
    unseen: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """Some ``items`` of a list, in the order asked for, and whether more come after them."""

    items: list[Item]
    has_more: bool


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation without its items; ``created_at`` in Unix seconds."""

    id: str
    created_at: int
    metadata: dict[str, str]
