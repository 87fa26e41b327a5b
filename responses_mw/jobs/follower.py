"""The readers of event logs in this process.

A follower has a cursor and no buffer: it reads on when its client has taken what came before, so a slow one costs nothing.
What many of them want to read is asked for in one round trip, and a process subscribes to a response once, whoever follows it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

from ..errors import BadRequest
from ..protocol.fold import end
from ..protocol.types import Document
from ..state import Batch, Missing, State, StateUnavailable
from ..state.keys import response_address

logger = logging.getLogger(__name__)

# A wake-up may be lost: after so many seconds every follower looks for itself.
POLL = 2.0
# So long a follower waits for a Redis that is away; then its client had better ask another replica.
PATIENCE = 60.0

Settle = Callable[[str], Awaitable[None]]


class Followers:
    """``run`` must run while there are any; ``close`` ends them all, so that they go on at another replica."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._closed = False
        self._followed: dict[str, list[asyncio.Event]] = {}
        self._heard_of: set[str] = set()
        self._wanted: list[tuple[str, int, asyncio.Future[list[Batch]]]] = []
        self._asked = asyncio.Event()

    async def follow(self, document: Document, after: int) -> AsyncGenerator[Batch, None]:
        """The batches of a background response from the event after that number on: what there is, then what comes.

        The last one is ``final``; if there is none, this process closes. The first may be empty. Raises ``BadRequest`` at once
        if the log has expired.
        """
        response_id, number = document["id"], after
        with self._following(response_id) as news:
            first = True
            while not self._closed:
                news.clear()
                batches = await self._read_on(document, number, first=first)
                if first and not batches:
                    yield Batch(number + 1, number, b"")  # the client sees that it is connected
                first = False
                if batches:
                    self._heard_of.add(response_id)
                for batch in batches:
                    yield _after(batch, number)
                    number = max(number, batch.last)
                    if batch.final:
                        return
                if not self._closed:
                    await news.wait()

    async def run(self, settle: Settle) -> None:
        """Reads for all followers, and looks after what they follow; ``settle`` ends a response whose worker was lost."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read())
                group.create_task(self._poll(settle))
        finally:
            for _, _, future in self._wanted:
                future.cancel()

    def close(self) -> None:
        """Ends all followers, without a terminal event."""
        self._closed = True
        self._wake_all()

    @contextmanager
    def _following(self, response_id: str) -> Iterator[asyncio.Event]:
        news = asyncio.Event()
        address = response_address(response_id)
        assert address is not None
        followed = self._followed.setdefault(response_id, [])
        followed.append(news)
        try:
            with self._state.wakeups.on(address.events, lambda _: news.set()):
                yield news
        finally:
            followed.remove(news)
            if not followed:
                del self._followed[response_id]

    async def _read_on(self, document: Document, number: int, *, first: bool) -> list[Batch]:
        """The next batches; none if there are none yet."""
        response_id = document["id"]
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while not self._closed:
            try:
                batches = await self._batches(response_id, number)
                if batches:
                    return batches
                return await self._at_end(document, number, first=first)
            except StateUnavailable:
                if first or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.5)
        return []

    async def _at_end(self, document: Document, number: int, *, first: bool) -> list[Batch]:
        """What follows where the log has nothing more: an end, if the response has ended or is no more."""
        try:
            last = await self._state.jobs.end(document["id"])
        except Missing:
            error = {
                "code": "server_error",
                "message": "The response was lost: the state store has lost it, or it was deleted.",
            }
            lost = end({**document, "status": "failed", "error": error}, number + 1)
            return [Batch(number + 1, number + 1, lost.frame, final=True)]
        if last is None:
            return []
        if last <= number:
            return [Batch(number + 1, number, b"", final=True)]
        batches = await self._batches(document["id"], number)  # it may have ended between the two looks
        if batches or not first:
            return batches
        message = f"The events of response '{document['id']}' have expired; the response itself can still be retrieved."
        raise BadRequest(message, param="stream", code="stream_expired")

    async def _batches(self, response_id: str, number: int) -> list[Batch]:
        future: asyncio.Future[list[Batch]] = asyncio.get_running_loop().create_future()
        self._wanted.append((response_id, number, future))
        self._asked.set()
        return await future

    async def _read(self) -> None:
        """Asks for what all followers want that came while the last answer was under way."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            wanted, self._wanted = [one for one in self._wanted if not one[2].done()], []
            try:
                logs = (
                    await self._state.jobs.logs([(response_id, number) for response_id, number, _ in wanted]) if wanted else []
                )
            except Exception as error:  # noqa: BLE001 (each of them is told)
                for _, _, future in wanted:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, _, future), batches in zip(wanted, logs, strict=True):
                if not future.done():
                    future.set_result(batches)

    async def _poll(self, settle: Settle) -> None:
        """Looks after those responses that nothing was heard of since the last time."""
        while True:
            await asyncio.sleep(POLL)
            silent = self._followed.keys() - self._heard_of
            self._heard_of.clear()
            for response_id in silent:
                with suppress(StateUnavailable):
                    await settle(response_id)
                for news in self._followed.get(response_id, ()):
                    news.set()

    def _wake_all(self) -> None:
        for followed in self._followed.values():
            for news in followed:
                news.set()


def _after(batch: Batch, number: int) -> Batch:
    """The batch without the events up to that number."""
    if batch.first > number:
        return batch
    frames = batch.data.split(b"\n\n")[number + 1 - batch.first :]
    return Batch(number + 1, batch.last, b"\n\n".join(frames), final=batch.final)
