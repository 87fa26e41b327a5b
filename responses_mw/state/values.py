"""Options, arguments and results of the state layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import BadRequest
from ..ids import new_tag

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Options of stored state. Sizes of objects are in bytes of uncompressed JSON.

    ttl_seconds      lifetime of stored objects
    response_bytes   maximum size of a response
    chain_bytes      maximum size of a chain or a conversation
    chain_items      maximum number of items in a chain or a conversation
    recent_bytes     maximum memory for recently read chains in each process; 0 disables this cache
    owner_bytes      storage quota of each owner; 0 disables the quota
    patience         seconds for which a write is retried while Redis is unavailable
    partitions       number of partitions of the queue
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
    """Where the history of a stored response is.

    random    random part of the response's id
    segment   segment that contains the response's turn
    length    number of turns in this segment up to and including the response's turn
    path      earlier segments from the root on, with the number of turns in each (`name:length,...`)
    """

    random: str
    segment: str
    length: int
    path: str

    @property
    def ranges(self) -> list[tuple[str, int]]:
        """The names of all segments from the root on, with the number of the history's turns in each."""
        steps = [step.partition(":") for step in self.path.split(",") if step]
        return [(name, int(length)) for name, _, length in steps] + [(self.segment, self.length)]


class Turn(NamedTuple):
    """The input and output of one response.

    `owner` is the random part of the response's id. `size` is the size of the turn's JSON in bytes.
    """

    owner: str
    input: list[Item]
    output: list[Item]
    size: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A history that a new response continues.

    tag            part of the new response's id
    items          all earlier items in order
    parent         the response after which the new turn is appended; None if the commit starts a new root
    turns          the stored turns of the history, which are copied to a new root if the parent does not exist
    size           size of the items' JSON in bytes
    conversation   the conversation to which the commit appends the new items, if any
    seen           the counter of the conversation's last item in the history
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
        """The `call_id`s of the tool calls in the history. Tool outputs are ignored."""
        return frozenset(item["call_id"] for item in self.items if item.get("call_id") and not item["type"].endswith("_output"))


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored response: its complete `document`, and the `input` items of its own turn.

    `lost` is set for a background response that is in progress although its lease has expired, or that is queued and whose
    place in the queue should be checked.
    """

    document: dict[str, Any]
    input: list[Item]
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive events of a log, numbered `first` to `last`.

    `data` has the events as they are sent to clients. `final` is set for the last batch of a log.
    """

    first: int
    last: int
    data: bytes
    final: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A background response that is leased to the caller.

    token           identifies the lease
    next_number     number of the next event in the log
    document        the response without its output
    body, input     the request and its input items
    credential      the caller's encrypted credential; None if it has expired
    size            size of the request's JSON in bytes
    retries         number of retries after errors of the upstream since the job last made progress
    error           code and message of the last error of the upstream
    retry_seconds   time left for further retries
    attempts        number of earlier attempts
    continuations   how often an interrupted answer was continued
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
    """The result of `Jobs.take`. `verdict` is one of:

    run         the caller must run the job
    lost        the caller must end the job, because its attempts are used up or no worker has resumed it for ten minutes
    failed      the caller must end the job with its `error`, because the upstream was unavailable for too long
    cancelled   the caller must end the job as cancelled
    held        another worker holds the job for `left` more seconds
    waiting     the job is waiting for a worker
    done        the job has ended
    missing     the job does not exist, or belongs to another owner

    The first four verdicts come with the `job` and with the `worker` that held it before. For a waiting job whose place in
    the queue has not been checked recently, `unseen` is the owner, which `Queue.restore` needs.
    """

    verdict: str
    job: Job | None = None
    worker: str = ""
    left: float = 0.0
    unseen: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list, with `items` in the requested order. `has_more` is whether the requested range has more items."""

    items: list[Item]
    has_more: bool


def page(items: Sequence[Item], *, after: str | None, before: str | None, limit: int, order: str) -> Page:
    """Return up to `limit` of the `items` between the ids `after` and `before`, in `order` (`asc` or `desc`).

    `items` must be in ascending order. If the range has more than `limit` items, return the first ones, or the last ones if
    only `before` is given. Raises BadRequest if `after` or `before` is not the id of an item.
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
    """A conversation without its items. `created_at` is in Unix seconds."""

    id: str
    created_at: int
    metadata: dict[str, str]
