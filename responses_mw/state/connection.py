"""Create a client for the Redis server at a URL. These forms are supported:

    redis://[user:password@]host:port/db          rediss:// with TLS
    unix://[user:password@]/path/to/socket
    redis+sentinel://host:port,host:port/service/db    rediss+sentinel://
    redis+cluster://host:port,host:port                rediss+cluster://

Options of redis-py may follow as a query (``?ssl_ca_certs=/etc/ca.pem``); ``sentinel_username`` and ``sentinel_password``
are for the Sentinels themselves.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import ConnectionPool, Redis, RedisCluster, Sentinel, SSLConnection
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from .client import SUBSCRIBING, Client
from .cluster import ClusterClient

__all__ = ["connect", "without_credentials"]

# As much as an asyncio stream buffers. With half of it, a long chain takes twice the reads and 1.5 times the time.
READ_SIZE = 1 << 17


def connect(url: str, *, timeout: float = 2.0, max_connections: int = 64) -> Client:
    """Return a client of the Redis at ``url``. Connections are opened when they are needed.

    ``timeout`` is the maximum duration of a round trip in seconds, including connecting. ``max_connections`` is the maximum
    number of concurrent round trips; others wait. Raises ValueError for an invalid URL.
    """
    scheme, _, kind = urlsplit(url).scheme.partition("+")
    # By default redis-py would repeat a command up to ten times, each with its own timeout. With RESP3, it
    # enables maintenance notifications, and its pools do not notice that an idle connection was closed.
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "protocol": 2,
        "socket_read_size": READ_SIZE,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": max_connections,
    }
    if kind == "cluster":
        return _cluster(scheme, url, options)
    if kind == "sentinel":
        return _sentinel(scheme, url, options)
    if kind:
        raise ValueError(f"unknown kind of Redis URL: {scheme}+{kind}://")
    return _server(url, options)


def without_credentials(url: str) -> str:
    """Return a valid URL without its user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _server(url: str, options: dict[str, Any]) -> Client:
    # Each round trip has a timeout as a whole. With a socket timeout, redis-py would also start a task and a timer for each
    # write and read. (Clients that try several nodes need it: a node that hangs must leave time for the next.)
    from_url = {**options, **_parse(url)}
    return Client(
        Redis.from_pool(ConnectionPool(**{**_with_probe(from_url), "socket_timeout": None})),
        timeout=options["socket_timeout"],
        max_connections=from_url["max_connections"],
        subscriber=lambda: Redis.from_pool(ConnectionPool(**{**from_url, **SUBSCRIBING})),
    )


def _cluster(scheme: str, url: str, options: dict[str, Any]) -> Client:
    nodes, from_url = _hosts(scheme, url, "")
    every = {**options, **from_url}
    # After a restart of a node, the first command on each connection finds it closed. Repeating that command is safe.
    pool = {**_with_probe(every), "retry": Retry(NoBackoff(), 1)}
    redis = RedisCluster(startup_nodes=[ClusterNode(*node) for node in nodes], **pool)
    return ClusterClient(redis, timeout=options["socket_timeout"], max_connections=every["max_connections"])


def _sentinel(scheme: str, url: str, options: dict[str, Any]) -> Client:
    service, _, database = urlsplit(url).path.strip("/").partition("/")
    if not service:
        raise ValueError("a redis+sentinel:// URL must name the service: redis+sentinel://host:port/service/db")
    hosts, from_url = _hosts(scheme, url, f"/{database}")
    # An unreachable Sentinel must leave time to ask the next.
    patience = options["socket_timeout"] / (len(hosts) + 1)
    asking = {**options, "socket_timeout": patience, "socket_connect_timeout": patience, "ssl": from_url["ssl"]}
    asking.update({name: from_url.pop(f"sentinel_{name}", None) for name in ("username", "password")})
    every = {**options, **from_url}
    sentinel = Sentinel(hosts, sentinel_kwargs=asking, **_with_probe(every))  # type: ignore[no-untyped-call]
    return Client(
        sentinel.master_for(service),
        timeout=options["socket_timeout"],
        max_connections=every["max_connections"],
        subscriber=lambda: sentinel.master_for(service, **SUBSCRIBING),
        also_close=sentinel.aclose,
    )


def _parse(url: str) -> dict[str, Any]:
    """Return redis-py's options in a URL. Raises ValueError, with a message that contains no part of the password."""
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
    return options


def _with_probe(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a pool with one more connection, for a probe while all others wait for answers."""
    return {**options, "max_connections": options["max_connections"] + 1}


def _hosts(scheme: str, url: str, path: str) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Return the hosts and ports of a URL that may name several, and redis-py's options in the rest of the URL."""
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    pairs = [host.rpartition(":") if ":" in host else (host, "", "") for host in hosts.split(",")]
    options: dict[str, Any] = _parse(f"{scheme}://{credentials}{at}{hosts.split(',')[0]}{path}?{parts.query}")
    options["ssl"] = options.pop("connection_class", None) is SSLConnection
    options.pop("host", None)
    options.pop("port", None)
    return [(host, int(port or 6379)) for host, _, port in pairs], options
