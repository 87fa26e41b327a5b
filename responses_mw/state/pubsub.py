"""Receive messages from other processes over Redis sharded Pub/Sub.

Messages may be lost, so receivers also poll. Every change that a message announces is stored in Redis.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any

from ..backoff import Backoff
from .client import Client, raise_lost_cancellation
from .errors import StateUnavailable

logger = logging.getLogger(__name__)

Receive = Callable[[bytes], None]

SILENCE = 15.0  # seconds without a message after which the server is pinged, or the connection closed if no channel is left
ANSWER = 5.0  # timeout in seconds for opening a connection, and for the reply to a ping
MIN_PAUSE, MAX_PAUSE = 0.05, 1.0  # seconds between two attempts to connect


class PubSub:
    """Subscriptions to sharded channels, over one connection, or over one connection per node of a cluster."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._receivers: dict[bytes, list[Receive]] = {}
        self._subscribers: dict[str, _Subscriber] = {}

    @contextmanager
    def on(self, channel: str, receive: Receive) -> Iterator[None]:
        """Call `receive` with each message on the channel until the context exits. `receive` must not block.

        `receive` is called with an empty message when the subscription begins and after each reconnection, because earlier
        messages may have been lost.
        """
        name = channel.encode()
        receivers = self._receivers.setdefault(name, [])
        receivers.append(receive)
        if len(receivers) == 1:
            self.subscriber(name).subscribe(name)
        else:
            receive(b"")
        try:
            yield
        finally:
            receivers.remove(receive)
            if not receivers:
                del self._receivers[name]
                for subscriber in self._subscribers.values():
                    subscriber.unsubscribe(name)

    def subscriber(self, channel: bytes) -> _Subscriber:
        """Return the subscriber for the node that serves the channel."""
        node = self._client.node_of(channel)
        if node not in self._subscribers:
            self._subscribers[node] = _Subscriber(self, self._client, node)
        return self._subscribers[node]

    def discard(self, node: str) -> None:
        """Remove the subscriber for a node, because no channel is left."""
        self._subscribers.pop(node, None)

    def deliver(self, channel: bytes, message: bytes) -> None:
        for receive in list(self._receivers.get(channel, ())):
            receive(message)

    async def aclose(self) -> None:
        subscribers, self._subscribers = list(self._subscribers.values()), {}
        await asyncio.gather(*(subscriber.aclose() for subscriber in subscribers))


class _Subscriber:
    """The subscriptions to channels of one node, while it has any.

    A task owns the connection and reopens it after an error. Once no channel is left, it closes the connection after `SILENCE`.
    """

    def __init__(self, pubsub: PubSub, client: Client, node: str) -> None:
        self._pubsub = pubsub
        self._client = client
        self._node = node
        self._channels: set[bytes] = set()
        self._backoff = Backoff(MIN_PAUSE, MAX_PAUSE)
        # Channels to subscribe to (True) or to unsubscribe from (False).
        self._changes: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    def subscribe(self, channel: bytes) -> None:
        self._channels.add(channel)
        self._changes.put_nowait((channel, True))

    def unsubscribe(self, channel: bytes) -> None:
        if channel in self._channels:
            self._channels.discard(channel)
            self._changes.put_nowait((channel, False))

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        while self._channels:
            try:
                await self._hand_over()
                if not self._channels:
                    continue
                await self._serve()
            except Exception as error:  # noqa: BLE001 (after any error, the next connection may work)
                logger.debug("subscriptions are interrupted: %r", error)
            await raise_lost_cancellation()
            self._changes = asyncio.Queue()  # the next connection begins with all channels
            await self._backoff.wait()
        self._pubsub.discard(self._node)

    async def _hand_over(self) -> None:
        """Move channels that another node now serves to that node's subscriber."""
        with suppress(StateUnavailable):  # on failure, use the nodes known so far
            await self._client.locate(self._channels)
        for channel in list(self._channels):
            subscriber = self._pubsub.subscriber(channel)
            if subscriber is not self:
                self._channels.discard(channel)
                subscriber.subscribe(channel)

    async def _serve(self) -> None:
        """Connect and subscribe to all channels, then send changes and receive messages until the connection breaks."""
        async with aclosing(self._client.subscriber(self._node)) as redis, redis.pubsub() as connection:
            async with asyncio.timeout(ANSWER):
                await connection.connect()
            self._backoff.reset()
            self._changes = asyncio.Queue()
            for channel in self._channels:
                self._changes.put_nowait((channel, True))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send(connection))
                while True:
                    self._receive(await self._next_message(connection))

    async def _next_message(self, connection: Any) -> dict[str, Any]:
        """Return the next message. Raises TimeoutError if the server does not answer a ping, or if no channel is left."""
        message = await connection.get_message(timeout=SILENCE)
        if message is None and self._channels:
            await connection.ping()
            message = await connection.get_message(timeout=ANSWER)
        if message is None:
            raise TimeoutError("the server is silent, or has no channel")
        return dict(message)

    async def _send(self, connection: Any) -> None:
        while True:
            channel, subscribed = await self._changes.get()
            await (connection.ssubscribe if subscribed else connection.sunsubscribe)(channel)

    def _receive(self, message: dict[str, Any]) -> None:
        channel: bytes = message["channel"]
        match message["type"]:
            case "smessage":
                self._pubsub.deliver(channel, message["data"])
            case "ssubscribe":
                self._pubsub.deliver(channel, b"")
            case "sunsubscribe" if channel in self._channels:
                # A receiver has joined since, or the channel's slot has moved. If it has moved, the node refuses to subscribe.
                self._changes.put_nowait((channel, True))
