"""Create clients for a Redis server at a URL."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis import exceptions
from redis.asyncio import ConnectionPool, Redis, RedisCluster, Sentinel, SSLConnection
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.driver_info import DriverInfo

from ..lua import Script
from ..network import tls_context
from .client import FIRST_PROBE, SUBSCRIBING, Call, Client, Value, checked, log_in
from .reasons import FAILURES

# The size of an asyncio stream's buffer in bytes. With half of this size, reading a long chain takes 1.5 times as long.
READ_SIZE = 1 << 17

# redis-py's own name and version. By default, each new connection would search the installed packages for them.
_DRIVER = DriverInfo()


def connect(url: str, *, timeout: float = 2.0, max_connections: int = 64) -> Client:
    """Return a client of the Redis server or cluster at `url`. Connections are opened when they are needed.

    Raises ValueError if the URL has none of the forms below, an unknown option or an unreadable file for TLS. `rediss` in place
    of `redis` enables TLS. The query may set options of redis-py, such as `?ssl_ca_certs=/etc/ca.pem`. The options
    `sentinel_username` and `sentinel_password` are the credentials for Sentinels.

        redis://[user:password@]host:port/db
        unix://[user:password@]/path/to/socket
        redis+sentinel://[user:password@]host:port,host:port/service/db
        redis+cluster://[user:password@]host:port,host:port
    """
    scheme, _, kind = urlsplit(url).scheme.partition("+")
    # By default, redis-py would repeat a command up to ten times, each with its own timeout. The errors in `retry`
    # close the connection: after a failover, the host of a read-only server may be the new primary. With RESP3, redis-py
    # enables maintenance notifications, and its pools do not notice that an idle connection was closed.
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "protocol": 2,
        "socket_read_size": READ_SIZE,
        "retry": Retry(NoBackoff(), 0, (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError)),
        "max_connections": max_connections,
        "driver_info": _DRIVER,
    }
    if kind == "cluster":
        return _cluster(scheme, url, options)
    if kind == "sentinel":
        return _sentinel(scheme, url, options)
    if kind:
        raise ValueError(f"unknown kind of Redis URL: {scheme}+{kind}://")
    return _server(url, options)


def without_credentials(url: str) -> str:
    """Return a Redis URL without its user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _server(url: str, options: dict[str, Any]) -> Client:
    # `Client` limits the duration of each round trip. A socket timeout would cost a task and a timer for each write and read.
    # Clients of several nodes need the timeout, because if a node hangs, time must be left to try the next node.
    from_url = {**options, "redis_connect_func": log_in, **_parse(url)}
    return Client(
        Redis.from_pool(ConnectionPool(**{**_with_spare(from_url), "socket_timeout": None})),
        timeout=options["socket_timeout"],
        max_connections=from_url["max_connections"],
        subscriber=lambda: Redis.from_pool(ConnectionPool(**{**from_url, **SUBSCRIBING})),
    )


def _cluster(scheme: str, url: str, options: dict[str, Any]) -> Client:
    nodes, from_url = _hosts(scheme, url, "", 6379)
    every = {**options, **from_url}
    # After a node has restarted, the first command on each connection fails because the connection is closed. A retry is safe.
    pool = {**_with_spare(every), "retry": Retry(NoBackoff(), 1)}
    redis = RedisCluster(startup_nodes=[ClusterNode(*node) for node in nodes], **pool)
    return ClusterClient(redis, timeout=options["socket_timeout"], max_connections=every["max_connections"])


def _sentinel(scheme: str, url: str, options: dict[str, Any]) -> Client:
    service, _, database = urlsplit(url).path.strip("/").partition("/")
    if not service:
        raise ValueError("a redis+sentinel:// URL must name the service: redis+sentinel://host:port/service/db")
    hosts, from_url = _hosts(scheme, url, f"/{database}", 26379)
    # If a Sentinel is unreachable, time must be left to ask the next Sentinel.
    asking = _sentinel_options(options, from_url, patience=options["socket_timeout"] / (len(hosts) + 1))
    every = {**options, "redis_connect_func": log_in, **from_url}
    sentinel = Sentinel(hosts, sentinel_kwargs=asking, **_with_spare(every))  # type: ignore[no-untyped-call]
    return Client(
        sentinel.master_for(service),
        timeout=options["socket_timeout"],
        max_connections=every["max_connections"],
        subscriber=lambda: sentinel.master_for(service, **SUBSCRIBING),
        also_close=sentinel.aclose,
    )


def _sentinel_options(options: dict[str, Any], from_url: dict[str, Any], *, patience: float) -> dict[str, Any]:
    """Return the options for connections to Sentinels. Remove those that are only for Sentinels from `from_url`."""
    asking = {**options, "socket_timeout": patience, "socket_connect_timeout": patience}
    asking |= {name: value for name, value in from_url.items() if name.startswith("ssl")}
    return asking | {name: from_url.pop(f"sentinel_{name}", None) for name in ("username", "password")}


def _parse(url: str) -> dict[str, Any]:
    """Return redis-py's options for a URL. Raises ValueError with a message that contains no part of the password."""
    try:
        options: dict[str, Any] = {**parse_url(url)}
    except ValueError:
        message = "it must be redis://[user:password@]host[:port][/database], with special characters of the password as %XX"
        raise ValueError(message) from None
    try:
        pool = ConnectionPool(**{name: value for name, value in options.items() if not name.startswith("sentinel_")})
        pool.connection_class(**pool.connection_kwargs)
    except TypeError:
        raise ValueError(f"it has an unknown option ({', '.join(parse_qs(urlsplit(url).query))})") from None
    # Otherwise, an unreadable file would fail each connection, and look like an unavailable server.
    tls_context(*(options.get(f"ssl_{name}") for name in ("ca_certs", "certfile", "keyfile", "password")))
    return options


def _with_spare(options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` with connections for a probe, and for replacing all idle connections while they are being closed."""
    return {**options, "max_connections": 2 * options["max_connections"] + 1}


def _hosts(scheme: str, url: str, path: str, port: int) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Return the hosts and ports in `url`, and redis-py's other options for the URL with `path` in place of its own path.

    `port` is the port of hosts without one.
    """
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    options: dict[str, Any] = _parse(f"{scheme}://{credentials}{at}{hosts.split(',')[0]}{path}?{parts.query}")
    options["ssl"] = options.pop("connection_class", None) is SSLConnection
    options.pop("host", None)
    options.pop("port", None)
    every = [urlsplit(f"//{host}") for host in hosts.split(",")]
    return [(each.hostname or "", each.port or port) for each in every], options


class ClusterClient(Client):
    """A client of a Redis Cluster."""

    is_cluster = True
    redis: RedisCluster

    async def scripts(self, script: Script, calls: Sequence[Call], *, contained: bool = False) -> list[Any]:
        if len(calls) == 1:
            return await super().scripts(script, calls, contained=contained)
        # One call each, because redis-py's pipelines wait for the slowest node.
        alone = (self.scripts(script, [call], contained=True) for call in calls)
        replies = [reply for [reply] in await asyncio.gather(*alone)]
        return replies if contained else checked(replies)

    async def aclose(self) -> None:
        await super().aclose()
        # After a failure, redis-py's own aclose() does nothing until it has looked up the nodes again.
        for nodes in ("nodes_cache", "startup_nodes"):
            await self.redis.nodes_manager.aclose(nodes)

    def _address(self, key: Value) -> tuple[str | None, int | None, int | None]:
        host, _, port = self.node_of(key).rpartition(":")
        return host or None, int(port) if port else None, None

    async def _ask(self, node: str, key: Value) -> None:
        # Send the probe directly, because the client may be waiting for another node to list the nodes.
        found = self.redis.get_node(node_name=node)
        if found is not None:
            with suppress(*FAILURES):
                async with asyncio.timeout(FIRST_PROBE):
                    await found.execute_command("PING")
                    return
        # Another node may serve the key now. A command makes the client look for that node.
        await self.redis.execute_command("EXISTS", key)

    async def close_idle(self, node: str) -> None:
        found = self.redis.get_node(node_name=node)
        if found is not None:
            await found.disconnect_free_connections()

    def node_of(self, key: Value) -> str:
        if not key:
            return ""
        try:
            node = self.redis.get_node_from_key(key)  # type: ignore[arg-type]
        except exceptions.RedisClusterException:  # the slots are not known yet, or no node serves this one
            return ""
        return node.name if node is not None else ""

    async def locate(self, channels: Iterable[bytes]) -> None:
        # redis-py follows and remembers MOVED only for commands, so send a command to the slot of each channel.
        await self.pipeline([("EXISTS", channel) for channel in channels])

    def subscriber(self, node: str) -> Redis:
        # The cluster's own PubSub is not used, because it reads from its nodes in turn and waits for each silent node.
        found = self.redis.get_node(node_name=node)
        if found is None:
            raise exceptions.ConnectionError(f"the cluster has no node '{node}'")
        options = {**found.connection_kwargs, **SUBSCRIBING}
        return Redis.from_pool(ConnectionPool(found.connection_class, **options))
