"""A uvicorn server that stops gracefully."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from ..asgi.middleware import Dispatcher
from ..tasks import stop_signals
from .protocols import HTTPProtocol

logger = logging.getLogger(__name__)

END_TIMEOUT = 12.0
"""Seconds after the drain timeout to store and send failed responses. With the default `redis.timeout`, storing is retried for
up to 10 s while Redis is unavailable."""


class DrainingServer(uvicorn.Server):
    """A uvicorn server that lets requests in progress finish before it exits.

    After the first signal, requests have `drain_timeout` seconds to finish. Then the remaining responses fail, and the
    connections of proxied responses are closed. A second signal skips the wait. A third signal kills the process.

    uvicorn cancels requests after `config.timeout_graceful_shutdown` seconds. Set it to `drain_timeout + END_TIMEOUT`.
    """

    def __init__(self, config: uvicorn.Config, app: Dispatcher, drain_timeout: float, on_start: Callable[[], None]) -> None:
        """`on_start` is called in the event loop when the server is listening."""
        super().__init__(config)
        self._app = app
        self._drain_timeout = drain_timeout
        self._on_start = on_start
        self._hurry = asyncio.Event()
        app.is_listening = False

    @property
    def address(self) -> Any:
        """The address of the listening socket, as returned by `getsockname`."""
        return self.servers[0].sockets[0].getsockname()

    def stop(self) -> None:
        self.should_exit = True

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/server.py#L332
    # uvicorn handles only SIGINT and SIGTERM, but other signals also stop this server.
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            is_main = threading.current_thread() is threading.main_thread()
            others = set(stop_signals()) - set(HANDLED_SIGNALS) if is_main else set()
            previous = {number: signal.signal(number, self.handle_exit) for number in others}
            try:
                yield
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/server.py#L351
    # uvicorn collects signals to raise them again after the shutdown, so the exit status would not be 0.
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self.stop()
        elif not self._hurry.is_set():
            self._hurry.set()
        else:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/server.py#L115
    # uvicorn has no callback for the time when it listens.
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._app.is_listening = True
        self._on_start()

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/server.py#L281
    # uvicorn waits without reporting what for, and then cancels requests without an error for their clients.
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if in_progress := self._in_progress():
            seconds = f"{self._drain_timeout:g} s"
            logger.info("stopping: waiting up to %s for %s; a second signal stops them now", seconds, in_progress)
        self._app.stop()
        draining = asyncio.create_task(self._drain())
        await super().shutdown(sockets)
        draining.cancel()

    async def _drain(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout):
                await self._hurry.wait()
        if in_progress := self._in_progress():
            logger.warning("stopping now: %s did not finish in time", in_progress)
        for connection in list(self.server_state.connections):
            scope = connection.answered if isinstance(connection, HTTPProtocol) else None
            if scope is not None and self._app.our_path(scope) is None:
                connection.transport.abort()
        await self._app.fail_runs()

    def _in_progress(self) -> str:
        """Return the numbers of unfinished requests and background responses as text, or "" if there are none."""
        counts = {"requests": len(self.server_state.tasks), "background responses": self._app.running_jobs}
        return " and ".join(f"{count} {kind if count > 1 else kind[:-1]}" for kind, count in counts.items() if count)
