"""Keep the summaries of the last responses of the deployment, and find them by id, time and other facts.

The summaries are in capped streams, one for each shard. All responses of a history are in one shard. Each process writes its
summaries in batches, four times a second. A process that is killed, or cannot reach Redis, loses those that it has not written.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, Self, TypeAlias
from zlib import crc32

import orjson

from ..errors import BadRequest
from ..tasks import in_background
from ..telemetry.context import WarningLimit
from ..telemetry.summaries import SUMMARIES
from .client import Client, Value
from .errors import Missing, StateUnavailable
from .schema import RECENT_SHARDS, recent_key, response_address

logger = logging.getLogger(__name__)

INTERVAL = 0.25
BATCH = 500  # maximum number of summaries in one round trip
TRIM_INTERVAL = 60.0
PAGE = 500  # number of summaries of each shard that are read at a time
MAX_SCANNED = 50_000
"""Maximum number of summaries that one call reads."""
FAILED = frozenset({"failed", "refused", "interrupted"})
"""The statuses of responses that did not succeed."""
OWNER_PREFIX = 8
"""Minimum length of a prefix that identifies an owner."""

Summary: TypeAlias = dict[str, Any]
"""A summary of a response (see `telemetry.summaries`)."""
Ends: TypeAlias = list[str]
"""The id of the last entry of each stream that has been read."""
Entry: TypeAlias = tuple[bytes, dict[bytes, bytes]]

_SHARDS = range(RECENT_SHARDS)
_NUMBER = int, float, type(None)
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("id", "status", "kind", "owner", "model", "key", "request", "previous", "conversation", "endpoint"), str),
    **dict.fromkeys(("error_code", "cause", "cache", "cache_reason", "unstored", "replica", "trace_id"), str),
    **dict.fromkeys(("seconds", "first_token", "tokens_in", "tokens_out", "tokens_cached", "tokens_reasoning"), _NUMBER),
    **dict.fromkeys(("turns", "continuations", "tool_calls", "tool_errors", "upstream_status"), _NUMBER),
    "ended": (int, float),
    "tools": list,
}
"""The types of members of summaries."""
_REQUIRED = frozenset({"id", "status", "kind", "ended"})


class Position(NamedTuple):
    """The place of a summary. Places are ordered by time."""

    ms: int
    number: int
    shard: int

    def __str__(self) -> str:
        return f"{self.ms}-{self.number}-{self.shard}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the position with this `str`. Raises BadRequest if there is none."""
        parts = text.split("-")
        if len(parts) != len(cls._fields) or not all(part.isdecimal() and len(part) < 16 for part in parts):
            raise BadRequest("Invalid 'before': use the 'next' of a page.", param="before", code="invalid_cursor")
        return cls(*map(int, parts))


@dataclass(frozen=True, slots=True)
class RecentFilter:
    """Criteria for responses. A response must meet all criteria that are set.

    statuses         the status is one of these
    kinds            how the response was requested is one of these: json, stream, websocket, background
    model            name of the model
    owner            owner id, at least the first 8 characters of it, or name of the API key
    tool             kind of a server-side tool that was called
    cache            result of the cache lookup
    reason           why the cache had no answer
    error            code of the error
    previous         id of the response that the response continues
    conversation     id of the conversation
    request          id of the request (`x-request-id`)
    in_conversation  only responses that belong to a conversation
    unstored         only responses that were not stored
    since, until     the response ended in this period, in Unix seconds
    """

    statuses: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()
    model: str = ""
    owner: str = ""
    tool: str = ""
    cache: str = ""
    reason: str = ""
    error: str = ""
    previous: str = ""
    conversation: str = ""
    request: str = ""
    in_conversation: bool = False
    unstored: bool = False
    since: float = 0.0
    until: float = 0.0

    def matches(self, summary: Summary) -> bool:
        equal = (
            ("model", self.model),
            ("cache", self.cache),
            ("cache_reason", self.reason),
            ("error_code", self.error),
            ("previous", self.previous),
            ("conversation", self.conversation),
            ("request", self.request),
        )
        return (
            (not self.statuses or summary.get("status") in self.statuses)
            and (not self.kinds or summary.get("kind") in self.kinds)
            and all(not value or summary.get(name) == value for name, value in equal)
            and (not self.tool or self.tool in summary.get("tools", ()))
            and (not self.unstored or summary.get("stored") is False)
            and (not self.in_conversation or bool(summary.get("conversation")))
            and (not self.owner or self._is_owner(summary))
            and (not self.until or summary.get("ended", 0.0) <= self.until)
        )

    def _is_owner(self, summary: Summary) -> bool:
        owner: str = summary.get("owner", "")
        is_prefix = len(self.owner) >= OWNER_PREFIX and owner.startswith(self.owner)
        return is_prefix or self.owner in (owner, summary.get("key"))

    def texts(self) -> list[tuple[bytes, ...]]:
        """Return tuples of JSON texts. A matching summary contains a text of each tuple, so others need not be decoded."""
        wanted = [self.model, self.tool, self.cache, self.reason, self.error, self.previous, self.conversation]
        wanted += [self.request, self.owner]
        members = [b'"conversation":'] if self.in_conversation else []
        members += [orjson.dumps(text)[1:-1] for text in wanted if text]
        listed = [tuple(map(orjson.dumps, texts)) for texts in (self.statuses, self.kinds) if texts]
        return [*((member,) for member in members), *listed]

    @property
    def is_all(self) -> bool:
        """Whether every response since `since` matches."""
        return self == RecentFilter(since=self.since)


ALL = RecentFilter()


@dataclass(frozen=True, slots=True)
class RecentPage:
    """Summaries, the latest first. `next` is the position after which the next page begins, or None at the end."""

    summaries: list[Summary]
    next: Position | None


class Recent:
    """The summaries of the last responses. Methods that read raise StateUnavailable if Redis fails."""

    def __init__(self, client: Client) -> None:
        self._client = client

    # -- writing -----------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def recording(self, replica: str, *, maximum: int, seconds: int) -> AsyncIterator[None]:
        """Write the summaries of this process until the context exits. `replica` is the name of the process.

        Of all responses, about the last `maximum` are kept, for at most `seconds`.
        """
        SUMMARIES.replica = replica
        with SUMMARIES.collecting():
            try:
                async with in_background(self._record(maximum), self._trim(seconds)):
                    yield
            finally:
                await self._flush(maximum, WarningLimit())

    async def _record(self, maximum: int) -> None:
        warnings = WarningLimit()
        while True:
            await asyncio.sleep(INTERVAL)
            await self._flush(maximum, warnings)

    async def _flush(self, maximum: int, warnings: WarningLimit) -> None:
        while batch := SUMMARIES.take(BATCH):
            try:
                await self.add(batch, maximum)
            except StateUnavailable as error:
                level = logging.WARNING if warnings.is_due() else logging.DEBUG
                logger.log(level, "the summaries of %d responses are lost: %s", len(batch), error.message)

    async def add(self, batch: Sequence[tuple[str, bytes]], maximum: int) -> None:
        """Add encoded summaries, each with the id of its response."""
        limit: tuple[Value, ...] = ("MAXLEN", "~", max(1, maximum // RECENT_SHARDS))
        await self._client.pipeline([("XADD", recent_key(_shard(name)), *limit, "*", "s", text) for name, text in batch])

    async def _trim(self, seconds: int) -> None:
        """Remove old summaries periodically, also if no further responses are made."""
        while True:
            try:
                await self.trim(seconds)
            except StateUnavailable as error:
                logger.debug("could not remove old summaries: %s", error.message)
            await asyncio.sleep(TRIM_INTERVAL)

    async def trim(self, seconds: int) -> None:
        """Remove all summaries that are older than `seconds`."""
        oldest, keys = int((time.time() - seconds) * 1000), [recent_key(shard) for shard in _SHARDS]
        trims: list[tuple[Value, ...]] = [("XTRIM", key, "MINID", oldest) for key in keys]
        await self._client.pipeline([*trims, *[("PEXPIRE", key, seconds * 1000) for key in keys]])

    # -- reading -----------------------------------------------------------------------------------------------------------

    async def page(self, wanted: RecentFilter = ALL, *, before: Position | None = None, limit: int = 100) -> RecentPage:
        """Return up to `limit` summaries that match, the latest first, beginning after the position `before`.

        A page may be shorter although there is a next one, because one call reads at most `MAX_SCANNED` summaries.
        """
        found: list[Summary] = []
        texts, is_all, scanned, oldest = wanted.texts(), wanted.is_all, 0, int(wanted.since * 1000)
        last = before
        async for place, text in self._backwards(_SHARDS, before):
            if place.ms < oldest:
                break
            if len(found) == limit or scanned == MAX_SCANNED:
                return RecentPage(latest_first(found), last)
            last, scanned = place, scanned + 1
            if not _has_all(text, texts) or (summary := _decoded(text)) is None:
                continue
            if is_all or wanted.matches(summary):
                found.append(summary)
        return RecentPage(latest_first(found), None)

    async def ends(self) -> Ends:
        """Return the ends of the streams, for `after`."""
        replies = await self._client.pipeline([("XREVRANGE", recent_key(shard), "+", "-", "COUNT", 1) for shard in _SHARDS])
        return [reply[0][0].decode() if reply else "0-0" for reply in replies]

    async def after(self, ends: Ends, wanted: RecentFilter = ALL) -> tuple[list[Summary], Ends]:
        """Return the matching summaries that were added after `ends`, the oldest first, and the new ends.

        One call reads at most `PAGE` summaries of each shard.
        """
        commands = [
            ("XRANGE", recent_key(shard), f"({end}", "+", "COUNT", PAGE) for shard, end in zip(_SHARDS, ends, strict=True)
        ]
        replies = await self._client.pipeline(commands)
        entries = [entry for shard, reply in zip(_SHARDS, replies, strict=True) for entry in _entries(reply, shard)]
        found = [_decoded(text) for _, text in sorted(entries)]
        moved = [reply[-1][0].decode() if reply else end for reply, end in zip(replies, ends, strict=True)]
        return [summary for summary in found if summary is not None and wanted.matches(summary)], moved

    async def find(self, response_id: str) -> Summary | None:
        """Return the latest summary of a response, or None if there is none."""
        text = orjson.dumps(response_id)
        async for _, found in self._backwards([_shard(response_id)], None):
            if text in found and (summary := _decoded(found)) and summary.get("id") == response_id:
                return summary
        return None

    async def of_request(self, request_id: str) -> str:
        """Return the id of the only response of a request, or "" if there is none, or if it has several, as a WebSocket."""
        found = (await self.page(RecentFilter(request=request_id), limit=2)).summaries if request_id else []
        return str(found[0]["id"]) if len(found) == 1 else ""

    async def children(self, response_id: str, limit: int = 20) -> list[Summary]:
        """Return the summaries of responses that continue a response, the latest first."""
        found: list[Summary] = []
        text = orjson.dumps(response_id)
        async for _, entry in self._backwards([_shard(response_id)], None):
            if text in entry and (summary := _decoded(entry)) and summary.get("previous") == response_id:
                found.append(summary)
                if len(found) == limit:
                    break
        return found

    async def _backwards(self, shards: Sequence[int], before: Position | None) -> AsyncIterator[tuple[Position, bytes]]:
        """Iterate over the encoded summaries of some shards, the latest first."""
        read: dict[int, deque[tuple[Position, bytes]]] = {shard: deque() for shard in shards}
        starts = {shard: _start(shard, before) for shard in shards}
        while read:
            if empty := [shard for shard, entries in read.items() if not entries]:
                replies = await self._client.pipeline(
                    [("XREVRANGE", recent_key(shard), starts[shard], "-", "COUNT", PAGE) for shard in empty]
                )
                for shard, reply in zip(empty, replies, strict=True):
                    read[shard].extend(_entries(reply, shard))
                    if not reply:
                        del read[shard]
                    else:
                        starts[shard] = f"({reply[-1][0].decode()}"
                continue
            while entries := max(read.values(), key=_first):
                yield entries.popleft()
                if not entries:
                    break


def _first(entries: deque[tuple[Position, bytes]]) -> Position:
    return entries[0][0]


def _has_all(text: bytes, texts: Sequence[tuple[bytes, ...]]) -> bool:
    for alternatives in texts:  # twice as fast as all(any(...))
        for one in alternatives:
            if one in text:
                break
        else:
            return False
    return True


def read_ends(text: str) -> Ends:
    """Return the ends that are joined by dots in `text`. Raises BadRequest if it is invalid."""
    ends = text.split(".")
    if len(ends) != RECENT_SHARDS or not all(re.fullmatch(r"[0-9]{1,15}-[0-9]{1,15}", end) for end in ends):
        raise BadRequest("Invalid 'after': use the value in a page.", param="after", code="invalid_cursor")
    return ends


def latest_first(summaries: list[Summary]) -> list[Summary]:
    """Sort summaries by the end of their responses. A batch of a process may have written them in another order."""
    return sorted(summaries, key=lambda summary: -float(summary.get("ended", 0)))


def _start(shard: int, before: Position | None) -> str:
    """Return the end of the range of stream ids of a shard that precede the position `before`."""
    if before is None:
        return "+"
    return f"{'' if shard < before.shard else '('}{before.ms}-{before.number}"


def _entries(reply: Sequence[Entry], shard: int) -> list[tuple[Position, bytes]]:
    return [(_position(entry_id, shard), fields.get(b"s", b"")) for entry_id, fields in reply]


def _position(entry_id: bytes, shard: int) -> Position:
    ms, _, number = entry_id.partition(b"-")
    return Position(int(ms), int(number), shard)


def _shard(response_id: str) -> int:
    try:
        tag = response_address(response_id).tag
    except Missing:  # no id of ours
        tag = response_id
    return crc32(tag.encode()) % RECENT_SHARDS


def _decoded(text: bytes) -> Summary | None:
    """Decode a summary. Return None if it is damaged."""
    try:
        summary = orjson.loads(text)
    except ValueError:
        return None
    return summary if isinstance(summary, dict) and _is_valid(summary) else None


def _is_valid(summary: Summary) -> bool:
    """Return whether a summary has all required members, and these have the types that readers rely on."""
    if not summary.keys() >= _REQUIRED:
        return False
    # a third of the time of a generator expression, which took half of the time for reading many summaries
    return all(map(isinstance, summary.values(), map(_TYPES.get, summary, repeat(object))))
