"""The readers of event logs in this process.

A follower has a cursor and no buffer. Where it stands at the log's end, what is announced there comes straight to it; where its
client has not yet taken what came before, it reads on in the log afterwards, so a slow one costs nothing. What many of them
want to read is asked for in one round trip, and a process subscribes to a response once, whoever follows it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, islice

from ..errors import BadRequest
from ..protocol import sse
from ..protocol.response.replay import end
from ..protocol.types import Document
from ..state import Batch, Missing, State, StateUnavailable
from ..state.jobs import announced
from ..state.keys import response_address

logger = logging.getLogger(__name__)

# A wake-up may be lost: after so many seconds every follower looks for itself.
POLL = 2.0
PATIENCE = 60.0
_PAUSE = 0.5
# So many logs are read in one round trip.
TOGETHER = 100

Settle = Callable[[str], Awaitable[None]]
_Wanted = dict[tuple[str, int], list[asyncio.Future[list[Batch]]]]
"""Who waits for what comes in which log after which number."""


class _Cursor:
    """Where one follower stands: after the event with that ``number``."""

    __slots__ = ("_began", "_news", "_waiter", "is_at_end", "number")

    def __init__(self, number: int) -> None:
        self.number = self._began = number
        self.is_at_end = False
        """Whether it has passed the final batch, or goes no further."""
        self._news = False
        self._waiter: asyncio.Future[Batch | None] | None = None

    def tell(self, batch: Batch | None) -> None:
        """There may be more in the log; it is known that there is this ``batch``."""
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
        """The next batch as soon as it is announced; None if there may be more, and the log is to be looked at."""
        if not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            batch = await self._waiter
            if batch is not None:
                return batch
        self._news = False
        return None

    def passed(self, batch: Batch) -> Batch:
        """What of the next batch lies after the cursor, which moves behind it."""
        rest = _after(batch, self.number)
        self.number = max(self.number, batch.last)
        self.is_at_end = batch.final
        return rest


class _Log:
    """A response that is followed, by whom, and the one subscription for all of them."""

    __slots__ = ("cursors", "subscription")

    def __init__(self) -> None:
        self.cursors: list[_Cursor] = []
        self.subscription = ExitStack()

    def tell(self, batch: Batch | None) -> None:
        for cursor in self.cursors:
            cursor.tell(batch)

    def hear(self, message: bytes) -> None:
        self.tell(announced(message))


class Followers:
    """``run`` must run while there are any; ``close`` ends them all, so that they go on at another replica."""

    def __init__(self, state: State, *, patience: float = PATIENCE) -> None:
        """A follower waits ``patience`` seconds for a Redis that is away; then its client had better ask another replica."""
        self._state = state
        self._patience = patience
        self._closed = False
        self._followed: dict[str, _Log] = {}
        self._heard_of: set[str] = set()
        self._wanted: _Wanted = {}
        self._asked = asyncio.Event()

    async def follow(self, document: Document, after: int) -> AsyncGenerator[Batch, None]:
        """The batches of a background response from the event after that number on: what there is, then what comes.

        The last one is ``final``; if there is none, this process closes, or the log cannot be read any more: the client learns
        why when it asks again. The first may be empty. Raises ``BadRequest`` at once if the log has expired.
        """
        cursor = _Cursor(after)
        with self._following(document["id"], cursor):
            batches = await self._read_on(document, cursor, first=True)
            if not batches:
                yield Batch(after + 1, after, b"")  # the client sees that it is connected
                batches = await self._next(document, cursor)
            while batches:
                for batch in batches:
                    yield cursor.passed(batch)
                batches = await self._next(document, cursor)

    async def run(self, settle: Settle) -> None:
        """Reads for all followers, and looks after what they follow; ``settle`` ends a response whose worker was lost."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read())
                group.create_task(self._poll(settle))
        finally:
            _cancel(self._wanted)

    def close(self) -> None:
        """Ends all followers, without a terminal event."""
        self._closed = True
        for log in self._followed.values():
            log.tell(None)

    @contextmanager
    def _following(self, response_id: str, cursor: _Cursor) -> Iterator[None]:
        log = self._followed.get(response_id)
        if log is None:
            address = response_address(response_id)
            assert address is not None
            log = self._followed[response_id] = _Log()
            log.subscription.enter_context(self._state.wakeups.on(address.events, log.hear))
        log.cursors.append(cursor)
        try:
            yield
        finally:
            log.cursors.remove(cursor)
            if not log.cursors:
                del self._followed[response_id]
                log.subscription.close()

    async def _next(self, document: Document, cursor: _Cursor) -> list[Batch]:
        """The next batches as soon as there are any; none where it goes no further."""
        batches: list[Batch] = []
        while not (batches or cursor.is_at_end or self._closed):
            batch = await cursor.news()
            batches = [batch] if batch is not None else await self._read_on(document, cursor)
        if batches:
            self._heard_of.add(document["id"])
        return batches

    async def _read_on(self, document: Document, cursor: _Cursor, *, first: bool = False) -> list[Batch]:
        """The next batches; none if there are none yet, or none will come."""
        deadline = asyncio.get_running_loop().time() + self._patience
        while not (self._closed or cursor.is_at_end):
            try:
                batches = await self._batches(document["id"], cursor.number)
                return batches or await self._at_end(document, cursor, first=first)
            except StateUnavailable:
                if first:
                    raise
                cursor.is_at_end = asyncio.get_running_loop().time() > deadline
                await asyncio.sleep(_PAUSE)
        return []

    async def _at_end(self, document: Document, cursor: _Cursor, *, first: bool) -> list[Batch]:
        """What follows where the log has nothing more: an end, if the response has ended or is no more."""
        number = cursor.number
        try:
            last = await self._state.jobs.end(document["id"])
        except Missing:
            return [_lost(document, number + 1)]
        if last is None:
            return []
        if last <= number:  # a part of the log that was read here may be lost, and the end with it
            return [_lost(document, number + 1) if cursor.has_moved else Batch(number + 1, number, b"", final=True)]
        batches = await self._batches(document["id"], number)  # it may have ended between the two looks
        if not batches and first:
            message = f"The events of response '{document['id']}' have expired; the response itself can still be retrieved."
            raise BadRequest(message, param="stream", code="stream_expired")
        cursor.is_at_end = not batches
        return batches

    async def _batches(self, response_id: str, number: int) -> list[Batch]:
        future: asyncio.Future[list[Batch]] = asyncio.get_running_loop().create_future()
        self._wanted.setdefault((response_id, number), []).append(future)
        self._asked.set()
        return await future

    async def _read(self) -> None:
        """Asks for what all followers want that came while the last answer was under way; once for those at the same place."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            while self._wanted:
                places = list(islice(self._wanted, TOGETHER))
                await self._answer({place: self._wanted.pop(place) for place in places})

    async def _answer(self, wanted: _Wanted) -> None:
        try:
            logs = await self._state.jobs.logs(list(wanted))
        except Exception as error:  # noqa: BLE001 (each of them is told)
            for future in chain.from_iterable(wanted.values()):
                if not future.done():
                    future.set_exception(error)
        else:
            for futures, batches in zip(wanted.values(), logs, strict=True):
                for future in futures:
                    if not future.done():
                        future.set_result(batches)
        finally:
            _cancel(wanted)

    async def _poll(self, settle: Settle) -> None:
        """Looks after those responses that nothing was heard of since the last time."""
        while True:
            await asyncio.sleep(POLL)
            silent = self._followed.keys() - self._heard_of
            self._heard_of.clear()
            for response_id in silent:
                await self._look_after(response_id, settle)

    async def _look_after(self, response_id: str, settle: Settle) -> None:
        try:
            await settle(response_id)
        except StateUnavailable:
            logger.debug("response %s cannot be settled now", response_id)
        except Exception:
            logger.exception("a background response cannot be settled")
        if log := self._followed.get(response_id):
            log.tell(None)


def _cancel(wanted: _Wanted) -> None:
    """Those that have no answer get none: nobody reads for them any more."""
    for future in chain.from_iterable(wanted.values()):
        future.cancel()


def _lost(document: Document, number: int) -> Batch:
    """The end of a response that the store has lost, or a part of it. It has that number for this follower only."""
    error = {"code": "server_error", "message": "The response was lost: the state store has lost it, or it was deleted."}
    return Batch(number, number, sse.encode([end({**document, "status": "failed", "error": error}, number)]), final=True)


def _after(batch: Batch, number: int) -> Batch:
    """The batch without the events up to that number."""
    if batch.first > number:
        return batch
    return Batch(number + 1, batch.last, sse.skip(batch.data, number + 1 - batch.first), final=batch.final)
