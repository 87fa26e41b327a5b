"""The connection to Redis: how a URL becomes a client, and how its failures become ours.

    redis://[user:password@]host:port/db          rediss:// with TLS
    unix://[user:password@]/path/to/socket
    redis+sentinel://host:port,host:port/service/db    rediss+sentinel://
    redis+cluster://host:port,host:port                rediss+cluster://

Options of redis-py may follow as a query (``?ssl_ca_certs=/etc/ca.pem``); ``sentinel_username`` and ``sentinel_password``
are for the Sentinels themselves.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import anyio.lowlevel
from redis import exceptions
from redis.asyncio import Redis, RedisCluster, Sentinel, SSLConnection
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from .. import telemetry
from .connections import Connections
from .errors import StateUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ..lua import Script

__all__ = ["Client", "connect"]

T = TypeVar("T")

# As much as a stream of asyncio holds: a long chain is read in half as many steps, and in two thirds of the time.
READ_SIZE = 1 << 17

# What a failure is called, and whether it may pass in a moment. The first class that fits: special before general.
_REASONS: tuple[tuple[type[Exception], str, bool], ...] = (
    (TimeoutError, "it did not answer in time", True),
    (exceptions.TimeoutError, "it did not answer in time", True),
    (exceptions.BusyLoadingError, "it is loading its data", True),
    (exceptions.AuthenticationError, "it refused our credentials", False),
    (exceptions.AuthorizationError, "it refused our credentials", False),
    (exceptions.NoPermissionError, "our user may not do that there", False),
    (exceptions.OutOfMemoryError, "its memory is full", False),
    (exceptions.ReadOnlyError, "it is read-only", True),
    (exceptions.ClusterDownError, "the cluster is down", True),
    (exceptions.MovedError, "it is a cluster (use redis+cluster://)", False),
    (exceptions.ConnectionError, "it cannot be reached", True),
    (exceptions.ResponseError, "it refused a command", False),
    (exceptions.RedisError, "the connection failed", True),
    (exceptions.RedisClusterException, "the cluster cannot be reached", True),
    (OSError, "it cannot be reached", True),
)
_FAILURES = tuple(row[0] for row in _REASONS)


def _unavailable(error: Exception) -> StateUnavailable:
    _, reason, passing = next(row for row in _REASONS if isinstance(error, row[0]))
    return StateUnavailable(reason, passing=passing)


class Client:
    """A Redis, however it is reached, of which a bounded number of round trips is under way at a time.

    Every failure is a StateUnavailable. A round trip takes at most ``timeout`` seconds, the wait for a connection included.
    """

    def __init__(
        self,
        redis: Redis | RedisCluster,
        *,
        timeout: float,
        max_connections: int,
        also_close: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self.redis = redis
        self._connections = None if isinstance(redis, RedisCluster) else Connections(redis)
        self._timeout = timeout
        self._free = asyncio.Semaphore(max_connections)
        self._also_close = also_close
        self._away_since: float | None = None

    @property
    def away_for(self) -> float:
        """The seconds since the first failure after the last success; 0 while all is well."""
        return time.monotonic() - self._away_since if self._away_since else 0.0

    @property
    def is_cluster(self) -> bool:
        return isinstance(self.redis, RedisCluster)

    async def round_trip(self, ask: Callable[[], Awaitable[T]], operation: str = "COMMAND", script: str = "") -> T:
        """What ``ask`` is told in one round trip, which spans call by its ``operation`` and ``script``."""
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        try:
            # One of ours waits for a connection here; redis-py's pools would fail instead.
            with telemetry.redis_span(operation, script):
                async with asyncio.timeout(self._timeout), self._free:
                    reply = await ask()
        except _FAILURES as error:
            self._away_since = self._away_since or time.monotonic()
            if not isinstance(error, exceptions.NoScriptError):
                telemetry.count_state_error(error)
            await _deliver_cancel(task, cancels)
            raise _unavailable(error) from error
        self._away_since = None
        await _deliver_cancel(task, cancels)
        return reply

    async def command(self, *words: str | bytes | int) -> Any:
        """Sends a command, and returns its reply."""
        return await self.round_trip(lambda: self._execute(*words))

    async def script(self, script: Script, keys: Sequence[str], args: Sequence[str | bytes | int] = ()) -> Any:
        """Runs a script, all of whose ``keys`` lie in one slot, and returns its reply."""

        async def ask() -> Any:
            try:
                return await self._execute("EVALSHA", script.sha, len(keys), *keys, *args)
            except exceptions.NoScriptError:
                return await self._execute("EVAL", script.text, len(keys), *keys, *args)

        return await self.round_trip(ask, "EVALSHA", script.name)

    async def _execute(self, *words: str | bytes | int) -> Any:
        if self._connections is None:
            return await self.redis.execute_command(*words)
        return (await self._connections.execute(words))[0]

    async def persistently(
        self, script: Script, keys: Sequence[str], args: Sequence[str | bytes | int], *, patience: float
    ) -> Any:
        """Runs a script that can be repeated, again and again until it, or Redis, has failed for ``patience`` seconds.

        Whoever is told that a write failed writes anew, under other ids: that must not happen for a stall of a moment.
        """
        began, pause = time.monotonic(), 0.02
        while True:
            try:
                return await self.script(script, keys, args)
            except StateUnavailable as error:
                # Others may be answered all the while, by another node or as they only read: that alone would be no end.
                if not error.passing or max(self.away_for, time.monotonic() - began) >= patience:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)

    async def pipeline(self, commands: Sequence[Sequence[str | bytes | int]]) -> list[Any]:
        """Sends ``commands`` at once, each on keys of one slot, and returns their replies in order."""

        async def ask() -> list[Any]:
            if self._connections is not None:
                return await self._connections.execute(*commands)
            pipe: Any = self.redis.pipeline(transaction=False)
            for command in commands:
                pipe.execute_command(*command)
            replies: list[Any] = await pipe.execute()
            return replies

        return await self.round_trip(ask, "PIPELINE")

    async def scripts(self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[str | bytes | int]]]) -> list[Any]:
        """Runs a script once for each of ``calls`` (keys of one slot, and args), together; returns the replies in order."""
        if self.is_cluster:  # its pipelines take no scripts
            return await asyncio.gather(*(self.script(script, keys, args) for keys, args in calls))
        try:
            return await self.pipeline([("EVALSHA", script.sha, len(keys), *keys, *args) for keys, args in calls])
        except StateUnavailable as error:
            if not isinstance(error.__cause__, exceptions.NoScriptError):
                raise
            return await self.pipeline([("EVAL", script.text, len(keys), *keys, *args) for keys, args in calls])

    async def aclose(self) -> None:
        """Closes every connection."""
        await self.redis.aclose()
        if self._also_close is not None:
            await self._also_close()


async def _deliver_cancel(task: asyncio.Task[Any], before: int) -> None:
    """Raises a cancellation that came since the task had so many of them, and that redis-py lost.

    It sends by ``asyncio.wait_for``, which loses one that comes as it has just written (Python 3.11); a loop of ours would go
    on for ever.
    """
    if task.cancelling() > before:
        await anyio.lowlevel.checkpoint_if_cancelled()  # a cancel scope's
        raise asyncio.CancelledError


def connect(url: str, *, timeout: float = 2.0, max_connections: int = 64) -> Client:
    """A client of the Redis at ``url``; connections are made when they are needed.

    ``timeout`` (seconds) is the longest that one round trip takes, connecting included; ``max_connections`` the most that are
    under way at a time (to each node of a cluster), others wait. Raises ValueError for a URL that cannot be.
    """
    scheme, _, kind = urlsplit(url).scheme.partition("+")
    # redis-py would repeat a command up to ten times, each with a time-out of its own. RESP2 has no maintenance notifications,
    # with which its pools would no longer notice that an idle connection was closed.
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "protocol": 2,
        "socket_read_size": READ_SIZE,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": max_connections,
    }
    if kind == "cluster":
        return Client(_cluster(scheme, url, options), timeout=timeout, max_connections=max_connections)
    if kind == "sentinel":
        sentinel, service = _sentinel(scheme, url, options)
        redis = sentinel.master_for(service)
        return Client(redis, timeout=timeout, max_connections=max_connections, also_close=sentinel.aclose)
    if kind:
        raise ValueError(f"unknown kind of Redis URL: {scheme}+{kind}://")
    # A round trip is bounded as a whole; redis-py would start a task and a timer for each write and each read of it besides.
    # (Who has several nodes to try needs them: one that hangs must leave time for the next.)
    options["socket_timeout"] = None
    return Client(Redis.from_url(url, **options), timeout=timeout, max_connections=max_connections)


def _hosts(scheme: str, url: str, path: str) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """All hosts of a URL that has several, and what redis-py makes of it with the first of them."""
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    pairs = [host.rpartition(":") if ":" in host else (host, "", "") for host in hosts.split(",")]
    options: dict[str, Any] = dict(parse_url(f"{scheme}://{credentials}{at}{hosts.split(',')[0]}{path}?{parts.query}"))
    options["ssl"] = options.pop("connection_class", None) is SSLConnection
    return [(host, int(port or 6379)) for host, _, port in pairs], options


def _cluster(scheme: str, url: str, options: dict[str, Any]) -> RedisCluster:
    nodes, from_url = _hosts(scheme, url, "")
    # An idle connection to a node that was restarted is noticed by the first command to fail on it. To repeat that one is safe.
    options["retry"] = Retry(NoBackoff(), 1)
    del from_url["host"]
    from_url.pop("port", None)
    return RedisCluster(startup_nodes=[ClusterNode(*node) for node in nodes], **{**options, **from_url})


def _sentinel(scheme: str, url: str, options: dict[str, Any]) -> tuple[Sentinel, str]:
    service, _, database = urlsplit(url).path.strip("/").partition("/")
    if not service:
        raise ValueError("a redis+sentinel:// URL names the service: redis+sentinel://host:port/service/db")
    hosts, from_url = _hosts(scheme, url, f"/{database}")
    del from_url["host"]
    from_url.pop("port", None)
    # A Sentinel that is away must leave time to ask the next.
    patience = options["socket_timeout"] / (len(hosts) + 1)
    asking = {**options, "socket_timeout": patience, "socket_connect_timeout": patience, "ssl": from_url["ssl"]}
    asking.update({name: from_url.pop(f"sentinel_{name}", None) for name in ("username", "password")})
    sentinel = Sentinel(hosts, sentinel_kwargs=asking, **{**options, **from_url})  # type: ignore[no-untyped-call]
    return sentinel, service
