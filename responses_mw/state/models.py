"""Data classes for the options, arguments and results of the state layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from ..errors import BadRequest
from ..ids import new_tag
from ..protocol.types import Item


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Options of stored state. Sizes are in bytes. All except `chain_memory` are sizes of uncompressed JSON.

    ttl_seconds      time to live of stored objects
    response_bytes   maximum size of a response with its input
    chain_bytes      maximum size of a history or conversation
    chain_items      maximum number of items of a history or conversation
    chain_memory     maximum memory of the decoded items of a history or conversation; small values take more than their JSON
    owner_bytes      storage quota of each owner, including overhead; 0 disables the quota
    patience         maximum seconds that a write is retried while Redis is unavailable
    """

    ttl_seconds: int = 7 * 24 * 60 * 60
    response_bytes: int = 32 * 1024 * 1024
    chain_bytes: int = 64 * 1024 * 1024
    chain_items: int = 10_000
    chain_memory: int = 512 * 1024 * 1024
    owner_bytes: int = 0
    patience: float = 10.0


class Pointer(NamedTuple):
    """The segments that contain the history of a stored response. A segment is a list of turns in Redis.

    random    random part of the response's id
    segment   last segment of the history, which contains the response's turn
    length    number of turns of `segment` that belong to the history; the last one is the response's turn
    path      earlier segments, the oldest first, as `name:length,...`
    """

    random: str
    segment: str
    length: int
    path: str

    @property
    def ranges(self) -> list[tuple[str, int]]:
        """The name of each segment, the oldest first, and the number of its turns that belong to the history."""
        steps = [step.partition(":") for step in self.path.split(",") if step]
        return [(name, int(length)) for name, _, length in steps] + [(self.segment, self.length)]


class StoredTurn(NamedTuple):
    """The input and output of one response. `random` is the random part of its id. `size` is the JSON's size in bytes."""

    random: str
    input: list[Item]
    output: list[Item]
    size: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A history of `items` that a new response continues. The new response's id contains `tag`.

    parent         the response that the new turn follows; None if the commit starts a new segment
    turns          the stored turns of the history; the commit copies them to a new segment if it cannot extend the parent's
    size           size of the items' JSON in bytes
    conversation   id of the conversation to which the commit appends the new items; None if there is none
    seen           number of the conversation's last item in the history; the items are numbered from 1
    """

    tag: str
    items: list[Item]
    parent: Pointer | None = None
    turns: Sequence[StoredTurn] = ()
    size: int = 0
    conversation: str | None = None
    seen: int = 0

    @classmethod
    def new(cls) -> Chain:
        """Return an empty history with a new tag."""
        return cls(tag=new_tag(), items=[])

    @property
    def call_ids(self) -> frozenset[str]:
        """The `call_id`s of the tool calls in the history."""
        return frozenset(item["call_id"] for item in self.items if item.get("call_id") and not item["type"].endswith("_output"))


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored response: its `document`, and the `input` items of its own turn. The output is empty until the response ends.

    If `lost` is true, the background response is running without a valid lease, or is waiting and has not been checked
    recently. In this case, call `JobService.settle`.
    """

    document: dict[str, Any]
    input: list[Item]
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """The events `first` to `last` of a log, encoded as server-sent events. `final` is set for the last batch of a log."""

    first: int
    last: int
    data: bytes
    final: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A background response that a process has leased with `token`. The output so far is in the log, not in `document`.

    next_number     number of the next event in the log
    credential      the creator's encrypted credential and tools; None if they have expired or were lost
    size            size of the request's JSON in bytes
    retries         number of retries after upstream errors since the job last made progress
    error           code and message of the upstream's last error; None if there was none
    retry_seconds   time left for further retries; 0 if `retries` is 0
    attempts        number of earlier attempts since the last output
    continuations   number of attempts to continue an interrupted answer
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


class TakeReason(Enum):
    """Why a job is taken."""

    RUN = "run"
    SETTLE = "settle"
    """Finalize a job that was lost or has failed."""
    CANCEL = "cancel"
    """Finalize the job even if another worker runs it."""


class JobVerdict(Enum):
    """What the caller of `Jobs.take` must do. The first four verdicts come with the job."""

    RUN = b"run"
    """Run the job."""
    LOST = b"lost"
    """Finalize the job, because it has no attempts left or no worker resumed it for ten minutes."""
    FAILED = b"failed"
    """Finalize the job with its `error`, because the upstream kept failing."""
    CANCELLED = b"cancelled"
    """Finalize the job as cancelled."""
    HELD = b"held"
    """Wait, because another process has leased the job for `left` more seconds, or is cancelling it."""
    WAITING = b"waiting"
    """Leave the job to a worker. If `unseen` is not empty, pass it to `Queue.restore` as the owner."""
    DONE = b"done"
    """Do nothing, because the job has ended."""
    MISSING = b"missing"
    """Do nothing, because the job does not exist, or belongs to another owner."""
    NEWER = b"newer"
    """A newer release wrote the job. `Jobs.take` raises `NewerRecord`."""


class Requeued(NamedTuple):
    """A job that `Jobs.requeue` made available. `worker` has lost its lease, or is "" if no worker held one."""

    owner: str
    worker: str


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of `Jobs.take`.

    `worker` is the worker that held the lease before. It is "" if there was none, or if that worker released the job.
    """

    verdict: JobVerdict
    job: Job | None = None
    worker: str = ""
    left: float = 0.0
    unseen: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list, with `items` in the requested order. `has_more` is set if the requested range has further items."""

    items: list[Item]
    has_more: bool


def page(items: Sequence[Item], *, after: str | None, before: str | None, limit: int, order: str) -> Page:
    """Return a page of the `items` between the ids `after` and `before`, in `order` (`asc` or `desc`).

    `items` must be in ascending order. The page has up to `limit` items. They are the first items of the range, or its last
    ones if only `before` is set. Raises BadRequest if `after` or `before` is not the id of an item.
    """
    listed = list(items) if order == "asc" else list(reversed(items))
    places = {item.get("id"): place for place, item in reversed(list(enumerate(listed)))}
    for param, item_id in (("after", after), ("before", before)):
        if item_id and item_id not in places:
            raise no_such_cursor(param, item_id)
    between = listed[places[after] + 1 if after else 0 : places[before] if before else None]
    some = between[-limit:] if before and not after else between[:limit]
    return Page(some, has_more=len(between) > limit)


def no_such_cursor(param: str, item_id: str) -> BadRequest:
    return BadRequest(f"Item with id '{item_id}' is not in this list.", param=param, code="invalid_cursor")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation without its items. `created_at` is in Unix seconds."""

    id: str
    created_at: int
    metadata: dict[str, str]
