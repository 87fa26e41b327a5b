"""Stream the event logs of background responses to clients.

A follower reads one log for one client. It has a position in the log, but no buffer. A follower at the end of its log receives
new batches as messages from the worker. If the client is slow, its follower reads from the log when the client is ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from ..errors import BadRequest
from ..protocol import sse
from ..protocol.response.document import end
from ..protocol.types import Document
from ..state import Batch, Damaged, Missing, State, StateUnavailable
from ..state.jobs import announced, fills_page
from ..state.schema import response_address

logger = logging.getLogger(__name__)

POLL = 2.0  # seconds without a new batch after which a response is checked, because an announcement may have been lost
PATIENCE = 60.0
_PAUSE = 0.5

_LOST = "The response was deleted, or the state store lost it."

Settle = Callable[[str], Awaitable[None]]


class Followers:
    """All followers of this process. While there are followers, `run` must be running.

    If Redis is unavailable for `patience` seconds, a stream is closed without a terminal event.
    """

    def __init__(self, state: State, *, patience: float = PATIENCE) -> None:
        self.state = state
        self.patience = patience
        self.is_closed = False
        self._followers: set[_Follower] = set()

    async def follow(self, document: Document, after: int) -> AsyncGenerator[Batch, None]:
        """Yield the batches of a background response after event number `after`, first from the log and then as they arrive.

        The first batch may be empty. The last batch is `final`, unless this process stops or Redis remains unavailable. The
        first read of the log raises `BadRequest` if the log has expired, or `StateUnavailable` if Redis fails.
        """
        follower = _Follower(self, document, after)
        self._followers.add(follower)
        try:
            channel = response_address(document["id"]).events
            with self.state.wakeups.on(channel, lambda message: follower.announce(announced(message))):
                batches = await follower.read(first=True)
                if not batches:
                    yield Batch(after + 1, after, b"")  # tells the client that it is connected
                    batches = await follower.next()
                while batches:
                    for batch in batches:
                        if batch.first > follower.number + 1:
                            yield follower.broken("events are missing in its log")
                            return
                        yield follower.passed(batch)
                    batches = await follower.next()
        finally:
            self._followers.discard(follower)

    async def run(self, settle: Settle) -> None:
        """Every `POLL` seconds, settle responses without a new batch and read their logs. A message or a worker may be lost."""
        while True:
            await asyncio.sleep(POLL)
            silent: dict[str, list[_Follower]] = {}
            for follower in self._followers:
                if not follower.is_active:
                    silent.setdefault(follower.response_id, []).append(follower)
                follower.is_active = False
            for response_id, followers in silent.items():
                try:
                    await settle(response_id)
                except StateUnavailable:
                    logger.debug("response %s cannot be finalized yet", response_id)
                except Exception:
                    logger.exception("could not finalize response %s", response_id)
                for follower in followers:
                    follower.announce(None)

    def close(self) -> None:
        """Close all streams without a terminal event, so that clients resume on another replica."""
        self.is_closed = True
        for follower in self._followers:
            follower.announce(None)


class _Follower:
    """Reads one log for one client. `number` is the number of the last event that was passed to the client."""

    def __init__(self, followers: Followers, document: Document, number: int) -> None:
        self._followers = followers
        self._document = document
        self.response_id: str = document["id"]
        self.number = self._began = number
        self.is_active = False  # whether the follower has received a batch since the last poll
        self._is_at_end = False  # whether the follower has passed the final batch or must stop
        self._is_behind = False  # whether the log may have batches after the page that was read last
        self._has_news = False
        self._waiter: asyncio.Future[Batch | None] | None = None

    def announce(self, batch: Batch | None) -> None:
        """Report a new `batch`, or None if the log may have new batches."""
        if batch is not None and batch.last <= self.number and not batch.final:
            return
        if self._waiter is None or self._waiter.done():
            self._has_news = True
        else:
            self._waiter.set_result(batch if batch is not None and batch.first == self.number + 1 else None)

    def passed(self, batch: Batch) -> Batch:
        """Advance the position past `batch`, and return the batch's events after the old position."""
        seen, self.number = self.number, max(self.number, batch.last)
        self._is_at_end = batch.final
        if batch.first > seen:
            return batch
        return Batch(seen + 1, batch.last, sse.skip(batch.data, seen + 1 - batch.first), final=batch.final)

    async def next(self) -> list[Batch]:
        """Wait for the next batches. Return an empty list if the stream must be closed."""
        batches: list[Batch] = []
        while not (batches or self._is_at_end or self._followers.is_closed):
            batch = None if self._is_behind else await self._news()
            batches = [batch] if batch is not None else await self.read()
        self.is_active = bool(batches)
        return batches

    async def _news(self) -> Batch | None:
        """Return the next announced batch, or None if the next batch must be read from the log."""
        if not self._has_news:
            self._waiter = asyncio.get_running_loop().create_future()
            batch = await self._waiter
            if batch is not None:
                return batch
        self._has_news = False
        return None

    async def read(self, *, first: bool = False) -> list[Batch]:
        """Read the next batches. Return an empty list if the log has no new batches, or if the stream must be closed.

        The `first` read raises `BadRequest` if the log has expired, or `StateUnavailable` if Redis fails. Later reads are
        repeated for `patience` seconds while Redis is unavailable.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._followers.patience
        while not (self._followers.is_closed or self._is_at_end):
            try:
                return await self._page() or await self._end(first=first)
            except StateUnavailable as error:
                if first:
                    raise
                if isinstance(error, Damaged):
                    return [self.broken(error.reason)]
                self._is_at_end = loop.time() > deadline
                await asyncio.sleep(_PAUSE)
        return []

    async def _end(self, *, first: bool) -> list[Batch]:
        """Return the last batches if the response has ended, or an empty list if the response is running."""
        number = self.number
        try:
            last = await self._followers.state.jobs.end(self.response_id)
        except Missing:
            return [self._failed(_LOST)]
        if last is None:
            return []
        if last <= number:  # Redis may have lost the last events, including events that were read here
            return [self._failed(_LOST) if number > self._began else Batch(number + 1, number, b"", final=True)]
        batches = await self._page()  # the response may have ended between the two reads
        if not batches and first:
            message = f"The events of response '{self.response_id}' have expired; the response itself can still be retrieved."
            raise BadRequest(message, param="stream", code="stream_expired")
        self._is_at_end = not batches
        return batches

    async def _page(self) -> list[Batch]:
        batches = await self._followers.state.jobs.log(self.response_id, self.number)
        self._is_behind = fills_page(batches)
        return batches

    def broken(self, reason: str) -> Batch:
        """Log the `reason` that no further events can be read, and return the terminal event for the client."""
        logger.error("response %s cannot be followed beyond event %d: %s", self.response_id, self.number, reason)
        return self._failed(f"The events of the response cannot be read: {reason}.")

    def _failed(self, message: str) -> Batch:
        """Return a `response.failed` event as the final batch. The event's number is valid for this client only."""
        error, number = {"code": "server_error", "message": message}, self.number + 1
        event = end({**self._document, "status": "failed", "error": error}, number)
        return Batch(number, number, sse.encode([event]), final=True)
