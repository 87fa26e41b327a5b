"""The values that the state layer takes and returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import BadRequest
from ..ids import new_tag

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Sizes are of JSON before compression. A conversation has the same maximums as a chain.

    ttl_seconds    lifetime of stored objects
    recent_bytes   maximum size of the chains that a process keeps in memory after reading them; 0 keeps none
    owner_bytes    quota of an owner; 0 sets none
    patience       seconds for which an idempotent write is retried while Redis is unavailable
    partitions     number of parts of the queue
    """

    ttl_seconds: int = 7 * 24 * 60 * 60
    response_bytes: int = 32 * 1024 * 1024
    chain_bytes: int = 64 * 1024 * 1024
    chain_items: int = 10_000
    recent_bytes: int = 64 * 1024 * 1024
    owner_bytes: int = 0
    patience: float = 10.0
    partitions: int = 8


@dataclass(frozen=True, slots=True)
class Pointer:
    """The place of a stored response: the end of its turn in a segment, and the segments before it (`name:length,...`)."""

    random: str
    segment: str
    length: int
    path: str

    @property
    def ranges(self) -> list[tuple[str, int]]:
        """The segments from the root on, with the number of turns in each."""
        steps = [step.partition(":") for step in self.path.split(",") if step]
        return [(name, int(length)) for name, _, length in steps] + [(self.segment, self.length)]


class Turn(NamedTuple):
    """The input and output of one response. `owner` is the random part of its id, `size` the size of its JSON in bytes."""

    owner: str
    input: list[Item]
    output: list[Item]
    size: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A history that a new response continues.

    `tag` is part of the new response's id. `items` are all earlier items in order. The rest is for the commit: the
    `parent` to append to, or the stored `turns` with which to start a new root; the `size` of the items' JSON in bytes;
    the `conversation` to append to, and the counter of its last item that was `seen`.
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
        """Return the empty history of a response without parent or conversation."""
        return cls(tag=new_tag(), items=[])

    @property
    def call_ids(self) -> frozenset[str]:
        """The `call_id` of every tool call in the history (not of the outputs that answer them)."""
        return frozenset(item["call_id"] for item in self.items if item.get("call_id") and not item["type"].endswith("_output"))


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored response: its whole `document`, and the `input` items of its own turn.

    `lost`: a background response whose lease nobody holds, or which has waited so long that its place in the queue should be
    checked.
    """

    document: dict[str, Any]
    input: list[Item]
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of a log, numbered `first` to `last`, as the bytes sent to clients. `final` ends the log."""

    first: int
    last: int
    data: bytes
    final: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A background response that the caller holds with `token`.

    `document` is the response without its output; `body` and `input` are the request; `credential` is encrypted, None
    if it has expired. `next_number` is the number of the next event; `size` the bytes of the request's JSON.

    `attempts` is the number of earlier attempts, `continuations` how often their answers were continued after an
    interruption. A job that was released after an error of the upstream has the number of `retries`, the last `error` (code
    and message), and `retry_seconds`, the time left for further retries.
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
    retries: int = 0
    error: dict[str, str] | None = None
    retry_seconds: float = 0.0
    attempts: int = 0
    continuations: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of taking a job. `verdict`:

    run         the caller runs the job
    lost        its worker was lost after the first output, or too often: the caller ends it
    failed      the upstream was unavailable for too long: the caller ends it with the job's `error`
    cancelled   the caller ends it as cancelled
    held        another worker holds it for `left` more seconds
    waiting     it waits for a worker
    done        it has ended
    missing     there is no such response (for this owner)

    The first four come with the `job`, and the `worker` that held it before. `unseen`: the owner of a waiting job whose
    place in the queue has not been checked recently (see `Queue.restore`).
    """

    verdict: str
    job: Job | None = None
    worker: str = ""
    left: float = 0.0
    unseen: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """Some `items` of a list in the requested order, and whether more follow."""

    items: list[Item]
    has_more: bool


def page(items: Sequence[Item], *, after: str | None, before: str | None, limit: int, order: str) -> Page:
    """Return up to `limit` items between the ids `after` and `before`, in `order` (`asc` or `desc`).

    With only `before`, return the last such items, otherwise the first. `items` are in ascending order. Raises BadRequest
    for a cursor that is not among them.
    """
    listed = list(items) if order == "asc" else list(reversed(items))
    ids = [item.get("id") for item in listed]
    first = _position(ids, after, "after") + 1 if after else 0
    end = _position(ids, before, "before") if before else len(listed)
    between = listed[first:end]
    some = between[-limit:] if before and not after else between[:limit]
    return Page(some, has_more=len(between) > limit)


def no_such_cursor(param: str, item_id: str) -> BadRequest:
    return BadRequest(f"Item with id '{item_id}' is not in this list.", param=param, code="invalid_cursor")


def _position(ids: Sequence[str | None], item_id: str, param: str) -> int:
    if item_id not in ids:
        raise no_such_cursor(param, item_id)
    return ids.index(item_id)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation without its items; `created_at` in Unix seconds."""

    id: str
    created_at: int
    metadata: dict[str, str]
