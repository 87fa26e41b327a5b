"""Recognize the cancellations of uvicorn, also as the server of an application that mounts the middleware."""

from __future__ import annotations

import asyncio

_SHUTDOWN = "timeout graceful shutdown exceeded"
"""Part of the message with which uvicorn cancels requests at the end of its graceful shutdown.

https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/server.py#L307
"""


def is_shutdown_of_uvicorn(error: asyncio.CancelledError) -> bool:
    """Return whether uvicorn has cancelled a request because it shuts down."""
    return any(_SHUTDOWN in str(argument) for argument in error.args)
