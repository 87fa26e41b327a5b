"""The readers of event logs in this process.

A follower has a cursor and no buffer. At the end of the log, it gets announced batches directly. If its client is slow, it
reads from the log when the client is ready, so a slow client costs no memory. All followers read in one round trip, and
followers of the same response share one subscription.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, islice

from ..errors import BadRequest
from ..protocol import sse
from ..protocol.response.document import end
from ..protocol.types import Document
from ..state import Batch, Damaged, Missing, State, StateUnavailable
from ..state.jobs import PAGE, announced
from ..state.schema import response_address

logger = logging.getLogger(__name__)

POLL = 2.0
"""Seconds after which a response is checked without a message, because a message may be lost."""
PATIENCE = 60.0
_PAUSE = 0.5
TOGETHER = 100
"""Maximum number of logs read in one round trip."""

Settle = Callable[[str], Awaitable[None]]
_Wanted = dict[tuple[str, int], list[asyncio.Future[list[Batch]]]]
"""Futures of the readers, by response id and the number of the event after which they read."""


class _Cursor:
    """The position of one follower: after event `number`."""

    __slots__ = ("_began", "_news", "_waiter", "is_at_end", "is_behind", "is_compressed", "number")

    def __init__(self, number: int) -> None:
        self.number = self._began = number
        self.is_at_end = False
        """Whether the follower has passed the final batch or must stop."""
        self.is_compressed = False
        """Whether the follower reads the compressed form of the log."""
        self.is_behind = False
        """Whether the log has more batches after the page that was read last."""
        self._news = False
        self._waiter: asyncio.Future[Batch | None] | None = None

    def announce(self, batch: Batch | None) -> None:
        """Announce `batch`. None announces that the log may have grown."""
        if batch is not None and batch.last <= self.number and not batch.final:
            return
        if self._waiter is None or self._waiter.done():
            self._news = True
        else:
            self._waiter.set_result(batch if batch is not None and batch.first == self.number + 1 else None)

    @property
    def has_moved(self) -> bool:
        return self.number > self._began

    async def news(self) -> Batch | None:
        """Wait for an announcement. Return the next batch, or None if it must be read from the log."""
        if not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            batch = await self._waiter
            if batch is not None:
                return batch
        self._news = False
        return None

    def passed(self, batch: Batch) -> Batch:
        """Move past `batch` and return the part of it that is new."""
        rest = _after(batch, self.number)
        self.number = max(self.number, batch.last)
        self.is_at_end = batch.final
        return rest


class _Log:
    """The followers of one response, and their common subscription."""

    __slots__ = ("cursors", "subscription")

    def __init__(self) -> None:
        self.cursors: list[_Cursor] = []
        self.subscription = ExitStack()

    def announce(self, batch: Batch | None) -> None:
        for cursor in self.cursors:
            cursor.announce(batch)

    def on_message(self, message: bytes) -> None:
        self.announce(announced(message))


class Followers:
    """All followers of this process. `run` must be running; `close` ends them, so that clients continue at another replica."""

    def __init__(self, state: State, *, patience: float = PATIENCE) -> None:
        """`patience` is how many seconds a follower waits for an unavailable Redis before it ends."""
        self._state = state
        self._patience = patience
        self._closed = False
        self._followed: dict[str, _Log] = {}
        self._active: set[str] = set()
        self._wanted: _Wanted = {}
        self._asked = asyncio.Event()

    async def follow(self, document: Document, after: int) -> AsyncGenerator[Batch, None]:
        """Yield the batches of a background response after event number `after`: those in the log, then new ones.

        The last batch is `final`, unless this process stops or Redis remains unavailable; clients then reconnect. The first
        batch may be empty. Before it, raises `BadRequest` if the log has expired and `StateUnavailable` if it cannot be read.
        """
        cursor = _Cursor(after)
        with self._following(document["id"], cursor):
            batches = await self._read_on(document, cursor, first=True)
            if not batches:
                yield Batch(after + 1, after, b"")  # tells the client that it is connected
                batches = await self._next(document, cursor)
            while batches:
                for batch in batches:
                    if batch.first > cursor.number + 1:
                        yield _broken(document, cursor.number + 1, "events are missing in its log")
                        return
                    yield cursor.passed(batch)
                batches = await self._next(document, cursor)

    async def run(self, settle: Settle) -> None:
        """Read for all followers. Call `settle` for responses without new events, to finalize those whose worker was lost."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read())
                group.create_task(self._poll(settle))
        finally:
            _cancel(self._wanted)

    def close(self) -> None:
        """End all followers without a terminal event."""
        self._closed = True
        for log in self._followed.values():
            log.announce(None)

    @contextmanager
    def _following(self, response_id: str, cursor: _Cursor) -> Iterator[None]:
        log = self._followed.get(response_id)
        if log is None:
            address = response_address(response_id)
            log = self._followed[response_id] = _Log()
            log.subscription.enter_context(self._state.wakeups.on(address.events, log.on_message))
        log.cursors.append(cursor)
        try:
            yield
        finally:
            log.cursors.remove(cursor)
            if not log.cursors:
                del self._followed[response_id]
                log.subscription.close()

    async def _next(self, document: Document, cursor: _Cursor) -> list[Batch]:
        """Wait for the next batches. Return an empty list if the follower must end."""
        batches: list[Batch] = []
        while not (batches or cursor.is_at_end or self._closed):
            batch = None if cursor.is_behind else await cursor.news()
            batches = [batch] if batch is not None else await self._read_on(document, cursor)
        if batches:
            self._active.add(document["id"])
        return batches

    async def _read_on(self, document: Document, cursor: _Cursor, *, first: bool = False) -> list[Batch]:
        """Return the next batches, or an empty list if there are none yet or no more will follow."""
        deadline = asyncio.get_running_loop().time() + self._patience
        while not (self._closed or cursor.is_at_end):
            try:
                batches = await self._page(document["id"], cursor)
                return batches or await self._at_end(document, cursor, first=first)
            except StateUnavailable as error:
                if first:
                    raise
                if isinstance(error, Damaged):
                    return [_broken(document, cursor.number + 1, error.reason)]
                cursor.is_at_end = asyncio.get_running_loop().time() > deadline
                await asyncio.sleep(_PAUSE)
        return []

    async def _at_end(self, document: Document, cursor: _Cursor, *, first: bool) -> list[Batch]:
        """Check at the end of the log whether the response has ended. Return its last batches, or none while it is running."""
        number = cursor.number
        try:
            last = await self._state.jobs.end(document["id"])
        except Missing:
            return [_lost(document, number + 1)]
        if last is None:
            return []
        if last <= number:  # Redis may have lost events that were read here, and the end with them
            return [_lost(document, number + 1) if cursor.has_moved else Batch(number + 1, number, b"", final=True)]
        batches = await self._page(document["id"], cursor)  # it may have ended between the two reads
        if not batches:
            cursor.is_compressed = True
            batches = await self._page(document["id"], cursor)
        if not batches and first:
            message = f"The events of response '{document['id']}' have expired; the response itself can still be retrieved."
            raise BadRequest(message, param="stream", code="stream_expired")
        cursor.is_at_end = not batches
        return batches

    async def _page(self, response_id: str, cursor: _Cursor) -> list[Batch]:
        """Read one page after the cursor, from the log or its compressed form."""
        if cursor.is_compressed:
            batches = await self._state.jobs.compressed(response_id, cursor.number)
            cursor.is_behind = bool(batches)
        else:
            batches = await self._batches(response_id, cursor.number)
            cursor.is_behind = len(batches) == PAGE
        return batches

    async def _batches(self, response_id: str, number: int) -> list[Batch]:
        future: asyncio.Future[list[Batch]] = asyncio.get_running_loop().create_future()
        self._wanted.setdefault((response_id, number), []).append(future)
        self._asked.set()
        return await future

    async def _read(self) -> None:
        """Read for all followers that asked during the last round trip, once per position."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            while self._wanted:
                places = list(islice(self._wanted, TOGETHER))
                await self._answer({place: self._wanted.pop(place) for place in places})

    async def _answer(self, wanted: _Wanted) -> None:
        try:
            logs = await self._state.jobs.logs(list(wanted))
        except Exception as error:  # noqa: BLE001 (raised in each of the readers)
            for future in chain.from_iterable(wanted.values()):
                if not future.done():
                    future.set_exception(error)
        else:
            for futures, batches in zip(wanted.values(), logs, strict=True):
                _resolve(futures, batches)
        finally:
            _cancel(wanted)

    async def _poll(self, settle: Settle) -> None:
        """Check the responses that had no new batch since the last check."""
        while True:
            await asyncio.sleep(POLL)
            silent = self._followed.keys() - self._active
            self._active.clear()
            for response_id in silent:
                await self._look_after(response_id, settle)

    async def _look_after(self, response_id: str, settle: Settle) -> None:
        try:
            await settle(response_id)
        except StateUnavailable:
            logger.debug("response %s cannot be finalized yet", response_id)
        except Exception:
            logger.exception("could not finalize response %s", response_id)
        if log := self._followed.get(response_id):
            log.announce(None)


def _resolve(futures: list[asyncio.Future[list[Batch]]], batches: list[Batch] | Damaged) -> None:
    for future in futures:
        if future.done():
            continue
        if isinstance(batches, Damaged):
            future.set_exception(batches)
        else:
            future.set_result(batches)


def _cancel(wanted: _Wanted) -> None:
    """Cancel the futures that have no result, because no task reads for them any more."""
    for future in chain.from_iterable(wanted.values()):
        future.cancel()


def _lost(document: Document, number: int) -> Batch:
    """Make the terminal event of a response that is no longer in Redis."""
    return _failed(document, number, "The response was deleted, or the state store lost it.")


def _broken(document: Document, number: int, reason: str) -> Batch:
    """Make the terminal event of a response whose log cannot be read any further."""
    logger.error("response %s cannot be followed beyond event %d: %s", document["id"], number - 1, reason)
    return _failed(document, number, f"The events of the response cannot be read: {reason}.")


def _failed(document: Document, number: int, message: str) -> Batch:
    """Make a terminal event. Its number is valid for this follower only."""
    error = {"code": "server_error", "message": message}
    return Batch(number, number, sse.encode([end({**document, "status": "failed", "error": error}, number)]), final=True)


def _after(batch: Batch, number: int) -> Batch:
    """Return the batch without the events up to `number`."""
    if batch.first > number:
        return batch
    return Batch(number + 1, batch.last, sse.skip(batch.data, number + 1 - batch.first), final=batch.final)
