"""Keep the contents of vector stores within a maximum of memory, which also counts what is being read or searched.

A content that a search uses is *pinned*: it takes memory until the search ends, also if another version has replaced it. What
a reader adds to a content is *reserved* before the content is kept. Contents that are not pinned are removed to make room, the
least recently used first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Generic, Protocol, TypeVar

from ..errors import Unavailable

WAITING_SECONDS = 10.0
"""Maximum time in seconds that a reader waits until searches release memory."""
READERS = 2
"""Number of contents that are read at the same time, if there is enough memory."""
_STEP = 4 * 1024 * 1024  # bytes that a reader reserves at a time, at least


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


class Shortage(Exception):
    """There is no room, because other contents are being read or searched."""


class Reservation(Generic[T]):
    """The memory of a reader. `pinned` is the size of the contents that its search has pinned, in bytes."""

    def __init__(self, cache: ContentCache[T], pinned: int, *, is_alone: bool) -> None:
        self.pinned = pinned
        self._cache = cache
        self._is_alone = is_alone
        self._used = 0
        self._size = 0

    async def grow(self, size: int) -> None:
        """Use `size` more bytes.

        Raises Shortage if another reader may need the memory, or else Unavailable if searches do not release it in time.
        """
        self._used += size
        if self._used > self._size:
            missing = self._used - self._size
            if self._is_alone:
                await self._cache.wait_for_room(missing)
            elif not self._cache.make_room(missing):
                raise Shortage
            step = missing + _STEP if self._cache.has_room(missing + _STEP) else missing
            self._size += step
            self._cache.reserved += step

    def release(self) -> None:
        self._cache.reserved -= self._size
        self._used = self._size = 0


class ContentCache(Generic[T]):
    """Contents by the id of their store, which take up to `max_bytes` with all pins and reservations."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.reserved = 0
        self.kept_bytes = 0
        """Size of the contents that are kept."""
        self._contents: dict[str, T] = {}  # the least recently used first
        self._pins: dict[int, int] = {}  # the number of users of a content by its `id`
        self._loose = 0  # bytes of contents that are pinned, but not kept
        self._readers = asyncio.Semaphore(READERS)
        self._turn = asyncio.Lock()  # of the reader that wants to be alone
        self._released = asyncio.Event()

    @property
    def used(self) -> int:
        """The memory that is counted, in bytes."""
        return self.kept_bytes + self._loose + self.reserved

    @property
    def stores(self) -> list[str]:
        """The ids of the stores whose contents are kept, the least recently used first."""
        return [*self._contents]

    def get(self, store_id: str) -> T | None:
        return self._contents.get(store_id)

    def items(self) -> list[tuple[str, T]]:
        return [*self._contents.items()]

    def put(self, store_id: str, content: T) -> None:
        """Keep a content as the most recently used one, for which the caller has reserved what is new in it."""
        if self._contents.get(store_id) is not content:
            self.remove(store_id)
            self.kept_bytes += content.nbytes
        self._contents.pop(store_id, None)
        self._contents[store_id] = content

    def remove(self, store_id: str) -> None:
        content = self._contents.pop(store_id, None)
        if content is not None:
            self.kept_bytes -= content.nbytes
            if id(content) in self._pins:
                self._loose += content.nbytes

    @contextmanager
    def pinned(self, store_id: str, content: T) -> Iterator[None]:
        """Count a content while it is used."""
        key, size = id(content), content.nbytes
        if key not in self._pins and self._contents.get(store_id) is not content:
            self._loose += size
        self._pins[key] = self._pins.get(key, 0) + 1
        try:
            yield
        finally:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                if self._contents.get(store_id) is not content:
                    self._loose -= size
                self._released.set()

    def has_room(self, size: int) -> bool:
        return self.used + size <= self.max_bytes

    def make_room(self, size: int) -> bool:
        """Remove contents until there is room for `size` more bytes. Return whether there is."""
        if not self.has_room(size):
            for store_id, content in self.items():
                if id(content) not in self._pins:
                    self.remove(store_id)
                    if self.has_room(size):
                        break
        return self.has_room(size)

    async def wait_for_room(self, size: int) -> None:
        """Wait until searches have released enough memory. Raises Unavailable if that takes too long."""
        try:
            async with asyncio.timeout(WAITING_SECONDS):
                while not self.make_room(size):
                    self._released.clear()
                    await self._released.wait()
        except TimeoutError:
            raise Unavailable(
                "Other searches use the memory for vector stores. Repeat the search, or raise files.search_memory_bytes."
            ) from None

    @asynccontextmanager
    async def reading(self, pinned: int) -> AsyncIterator[Reservation[T]]:
        """Wait for other readers, and reserve memory in the `with` block."""
        async with self._readers:
            reservation = Reservation(self, pinned, is_alone=False)
            try:
                yield reservation
            finally:
                reservation.release()

    @asynccontextmanager
    async def reading_alone(self, pinned: int) -> AsyncIterator[Reservation[T]]:
        """Like `reading`, but wait until there are no other readers."""
        taken, reservation = 0, Reservation(self, pinned, is_alone=True)
        async with self._turn:
            try:
                for _ in range(READERS):
                    await self._readers.acquire()
                    taken += 1
                yield reservation
            finally:
                reservation.release()
                for _ in range(taken):
                    self._readers.release()
