"""The client of a Redis Cluster: finds the node of each key, and asks nodes one by one where redis-py asks all."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from redis import exceptions
from redis.asyncio import ConnectionPool, Redis, RedisCluster

from .client import FAILURES, FIRST_PROBE, SUBSCRIBING, Address, Call, Client
from .errors import Damaged

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..lua import Script

__all__ = ["ClusterClient"]


class ClusterClient(Client):
    """A Redis Cluster."""

    is_cluster = True
    redis: RedisCluster

    async def scripts(self, script: Script, calls: Sequence[Call], *, contained: bool = False) -> list[Any]:
        # redis-py's cluster pipelines refuse EVALSHA.
        running = (self.script(script, keys, args) for keys, args in calls)
        replies = await asyncio.gather(*running, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException) and not (contained and isinstance(reply, Damaged)):
                raise reply
        return replies

    async def aclose(self) -> None:
        await super().aclose()
        # After a failure, redis-py's own aclose() does nothing until it has looked up the nodes again.
        for nodes in ("nodes_cache", "startup_nodes"):
            await self.redis.nodes_manager.aclose(nodes)

    def _address(self, key: str | bytes | int) -> Address:
        host, _, port = self._node(key).rpartition(":")
        return host or None, int(port) if port else None, None

    def _node(self, key: str | bytes | int) -> str:
        return self.node_of(str(key).encode() if not isinstance(key, bytes) else key) if key else ""

    async def _ask(self, node: str, key: str | bytes | int) -> None:
        # Ask the node itself: the client may be looking up the nodes at another one, which hangs.
        found = self.redis.get_node(node_name=node)
        if found is not None:
            with suppress(*FAILURES):
                async with asyncio.timeout(FIRST_PROBE):
                    await found.execute_command("PING")
                    return
        # Another node may serve the key by now. The client finds that out by sending a command.
        await self.redis.execute_command("EXISTS", key)

    def node_of(self, channel: bytes) -> str:
        try:
            node = self.redis.get_node_from_key(channel)  # type: ignore[arg-type]
        except exceptions.RedisClusterException:  # the slots are not known yet, or no node serves this one
            return ""
        return node.name if node is not None else ""

    async def locate(self, channels: Iterable[bytes]) -> None:
        # redis-py follows MOVED, and learns from it, only for commands: send one to the slot of each channel.
        await self.pipeline([("EXISTS", channel) for channel in channels])

    def subscriber(self, node: str) -> Redis:
        # This does not use the cluster's own PubSub, which reads its nodes in turn and waits for each that is silent.
        found = self.redis.get_node(node_name=node)
        if found is None:
            raise exceptions.ConnectionError(f"the cluster has no node '{node}'")
        options = {**found.connection_kwargs, **SUBSCRIBING}
        return Redis.from_pool(ConnectionPool(found.connection_class, **options))
