"""Being told at once what others have written, by sharded publish and subscribe: the same in every topology.

A message is a hint, nothing more: it may be lost, and what it is about is read elsewhere. Whoever waits for one looks now and
then without one. A process subscribes to a channel once, however many of it wait there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisClusterException

if TYPE_CHECKING:
    from .client import Client

__all__ = ["Wake", "Wakeups"]

logger = logging.getLogger(__name__)

# What is called with a message; with an empty one where some may have been missed. It must not block.
Wake = Callable[[bytes], None]

# After so many seconds of silence the server is asked whether it is still there.
SILENCE = 15.0
LONGEST_PAUSE = 1.0
# A connection that is not made in so many seconds, or does not answer, is given up.
CONNECTING = 5.0


class Wakeups:
    """Subscriptions over connections of their own: one, or one for each node of a cluster."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: dict[bytes, list[Wake]] = {}
        self._lines: dict[str, _Line] = {}

    @contextmanager
    def on(self, channel: str, wake: Wake) -> Iterator[None]:
        """Calls ``wake`` for each message on the channel while the context lasts, and once when the subscription stands."""
        name = channel.encode()
        waiting = self._waiting.setdefault(name, [])
        waiting.append(wake)
        if len(waiting) == 1:
            self._line(channel).change("SSUBSCRIBE", name)
        else:
            wake(b"")
        try:
            yield
        finally:
            waiting.remove(wake)
            if not waiting:
                del self._waiting[name]
                for line in self._lines.values():
                    line.drop(name)

    async def aclose(self) -> None:
        """Ends all subscriptions."""
        lines, self._lines = list(self._lines.values()), {}
        await asyncio.gather(*(line.aclose() for line in lines))

    def _line(self, channel: str) -> _Line:
        name = self._node(channel)
        if name not in self._lines:
            self._lines[name] = _Line(self, name)
        return self._lines[name]

    def _node(self, channel: str) -> str:
        """The name of the node that serves the channel; empty where there is but one."""
        if not self._client.is_cluster:
            return ""
        nodes: Any = self._client.redis
        try:
            return str(nodes.get_node_from_key(channel).name)
        except RedisClusterException:  # the map of the cluster is not known yet
            return ""

    def connection(self, node: str) -> Any:
        """A new connection (redis-py's) to a node."""
        redis: Any = self._client.redis
        if not self._client.is_cluster:
            connection = redis.connection_pool.make_connection()
        else:
            found = redis.get_node(node_name=node) if node else redis.get_default_node()
            connection = found.connection_class(**found.connection_kwargs)
        # With a time-out of its own it writes by asyncio.wait_for, which loses a cancellation that comes as it has written.
        connection.socket_timeout = None
        return connection

    async def refresh(self) -> None:
        """Asks the cluster who serves what, where it is one."""
        if self._client.is_cluster:
            await self._client.round_trip(self._client.redis.initialize)

    def move(self, line: _Line) -> None:
        """Hands a line's channels to those lines that serve them now."""
        for name in list(line.channels):
            serving = self._line(name.decode())
            if serving is not line:
                line.channels.discard(name)
                serving.change("SSUBSCRIBE", name)

    def wake(self, channel: bytes, message: bytes) -> None:
        for wake in list(self._waiting.get(channel, ())):
            wake(message)


class _Line:
    """One connection, its ``channels``, and the task that reads it and makes it anew when it breaks."""

    def __init__(self, wakeups: Wakeups, node: str) -> None:
        self.channels: set[bytes] = set()
        self._wakeups = wakeups
        self._node = node
        self._changes: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self.task = asyncio.create_task(self._run())

    def change(self, command: str, channel: bytes) -> None:
        self.channels.add(channel)
        self._changes.put_nowait((command, channel))

    def drop(self, channel: bytes) -> None:
        if channel in self.channels:
            self.channels.discard(channel)
            self._changes.put_nowait(("SUNSUBSCRIBE", channel))

    async def aclose(self) -> None:
        await _cancelled(self.task)

    async def _run(self) -> None:
        pause = 0.05
        while True:
            connection = None
            try:
                await self._wakeups.refresh()
                self._wakeups.move(self)
                connection = self._wakeups.connection(self._node)
                await _connect(connection)
                pause = 0.05
                await self._serve(connection)
            except Exception as error:  # noqa: BLE001 (whatever it was, the next connection may do)
                logger.debug("no subscriptions for now: %r", error)
            finally:
                if connection is not None:
                    await connection.disconnect(nowait=True)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _serve(self, connection: Any) -> None:
        """Until the connection breaks."""
        self._changes = asyncio.Queue()
        for channel in self.channels:
            self._changes.put_nowait(("SSUBSCRIBE", channel))
        writing = asyncio.create_task(self._write(connection))
        try:
            while True:
                await self._read(connection)
        finally:
            await _cancelled(writing)

    async def _write(self, connection: Any) -> None:
        while True:
            command, channel = await self._changes.get()
            await connection.send_command(command, channel)

    async def _read(self, connection: Any) -> None:
        reply = await connection.read_response(timeout=SILENCE, disconnect_on_error=False)
        if reply is None:
            await connection.send_command("PING")
            reply = await connection.read_response(timeout=CONNECTING, disconnect_on_error=False)
            if reply is None:
                raise TimeoutError("the server is silent")
        if reply[0] == b"smessage":
            self._wakeups.wake(reply[1], reply[2])
        elif reply[0] == b"ssubscribe":
            self._wakeups.wake(reply[1], b"")


async def _connect(connection: Any) -> None:
    """A cancellation waits for the end of it, however often it comes: redis-py would leave a half-made connection open."""
    connecting = asyncio.create_task(asyncio.wait_for(connection.connect(), CONNECTING))
    try:
        await asyncio.shield(connecting)
    finally:
        while not connecting.done():
            with suppress(asyncio.CancelledError):  # the first one goes on from here
                await asyncio.wait({connecting})


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
