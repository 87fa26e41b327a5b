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
    """Options of stored state. Maximum sizes are in bytes of uncompressed JSON. Those of chains also apply to conversations.

    recent_bytes   maximum memory for recently read chains in each process; 0 disables this cache
    owner_bytes    storage quota of each owner; 0 disables the quota
    patience       maximum seconds that a write is retried while Redis is unavailable
    """

    ttl_seconds: int = 7 * 24 * 60 * 60
    response_bytes: int = 32 * 1024 * 1024
    chain_bytes: int = 64 * 1024 * 1024
    chain_items: int = 10_000
    recent_bytes: int = 64 * 1024 * 1024
    owner_bytes: int = 0
    patience: float = 10.0


class Pointer(NamedTuple):
    """The segments that contain the history of a stored response.

    random    random part of the response's id
    segment   last segment of the history, which contains the response's turn
    length    number of turns of `segment` that belong to the history; the last one is the response's turn
    path      earlier segments, starting at the root, with the number of turns of each that belong to the history
              (`name:length,...`)
    """

    random: str
    segment: str
    length: int
    path: str

    @property
    def ranges(self) -> list[tuple[str, int]]:
        """The history's segments, starting at the root, and how many turns of each segment belong to the history."""
        steps = [step.partition(":") for step in self.path.split(",") if step]
        return [(name, int(length)) for name, _, length in steps] + [(self.segment, self.length)]


class Turn(NamedTuple):
    """The input and output of one response. `owner` is the random part of its id. `size` is the size of the JSON in bytes."""

    owner: str
    input: list[Item]
    output: list[Item]
    size: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A history of `items` that a new response continues. The new response's id contains `tag`.

    parent         the response that the new turn follows; None if the commit starts a new root
    turns          the stored turns of the history, which are copied to a new root if the parent no longer exists
    size           size of the items' JSON in bytes
    conversation   id of the conversation that the new items are appended to by the commit
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
        """Return an empty history with a new tag."""
        return cls(tag=new_tag(), items=[])

    @property
    def call_ids(self) -> frozenset[str]:
        """The `call_id`s of the tool calls in the history."""
        return frozenset(item["call_id"] for item in self.items if item.get("call_id") and not item["type"].endswith("_output"))


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored response: its complete `document`, and the `input` items of its own turn.

    If `lost`, call `JobService.settle`, because the lease of the running background response has expired, or because the
    place of the queued background response in the queue has not been checked recently.
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
    """A background response that is leased to the holder of `token`. The output of `document` is in the log.

    next_number     number of the next event in the log
    credential      the creator's encrypted credential; None after the credential has expired
    size            size of the request's JSON in bytes
    retries         number of retries after errors of the upstream since the job last made progress
    error           code and message of the upstream's last error
    retry_seconds   time left for further retries
    attempts        number of earlier attempts
    continuations   number of times that an interrupted answer was continued
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
    lost        the caller must end the job, because it has no attempts left or no worker has resumed it for ten minutes
    failed      the caller must end the job with its `error`, because the upstream was unavailable for too long
    cancelled   the caller must end the job as cancelled
    held        another worker holds the job for `left` more seconds
    waiting     the job waits for a worker; if its place in the queue should be checked, `unseen` is its owner
    done        the job has ended
    missing     the job does not exist, or belongs to another owner

    The first four verdicts have a `job`, and the name of the `worker` that held the job before.
    """

    verdict: str
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
    """Return up to `limit` of the `items` between the ids `after` and `before`, in `order` (`asc` or `desc`).

    `items` must be in ascending order. If the range has more than `limit` items, the page has its first items, or its last
    items if only `before` is given. Raises BadRequest if `after` or `before` is not the id of an item.
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
