"""Locks of vector stores."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class StoreLocks:
    """A lock for each store, which exists as long as a task holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, store_id: str) -> asyncio.Lock:
        return self._locks.setdefault(store_id, asyncio.Lock())
