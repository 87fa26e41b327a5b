"""uvicorn's own shutdown is recognized."""

from __future__ import annotations

import asyncio
import inspect

import uvicorn.server

from responses_mw.server.cancellation import _SHUTDOWN, is_shutdown_of_uvicorn


def test_the_message_of_a_cancellation_by_uvicorn_is_recognized() -> None:
    assert _SHUTDOWN in inspect.getsource(uvicorn.server)  # the installed version still sends it
    assert is_shutdown_of_uvicorn(asyncio.CancelledError(f"Task cancelled, {_SHUTDOWN}"))
    assert not is_shutdown_of_uvicorn(asyncio.CancelledError())
