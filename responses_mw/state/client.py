"""The client of Redis: how a URL becomes one, and how its failures become ours.

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
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import ConnectionPool, Redis, RedisCluster, Sentinel, SSLConnection
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from .. import telemetry
from .cancellation import cancellations, raise_lost_cancellation
from .errors import StateUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from ..lua import Script

__all__ = ["Client", "ClusterClient", "connect"]

T = TypeVar("T")

# The buffer of an asyncio stream: a long chain is read in half as many steps, in two thirds of the time.
READ_SIZE = 1 << 17

# A subscription waits for as long as it takes, and is opened anew after any error: redis-py must not do so besides.
_SUBSCRIBING: dict[str, Any] = {"socket_timeout": None, "retry": Retry(NoBackoff(), 0, ())}

# How a failure is reported, and whether it may pass in a moment. The first class that fits: special before general.
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
_TIMEOUTS = (TimeoutError, exceptions.TimeoutError)

# Timeout of the first probe of a node, and the pause between two probes (seconds).
FIRST_PROBE, PROBE_PAUSE = 0.1, 0.1


def _unavailable(error: Exception) -> StateUnavailable:
    _, reason, passing = next(row for row in _REASONS if isinstance(error, row[0]))
    return StateUnavailable(reason, passing=passing)


class _Probe:
    """A circuit breaker: asks a node that did not answer in time until it answers.

    Calls wait for the first verdict, which takes at most ``FIRST_PROBE`` seconds: one slow command must not fail the others.
    From then on they fail at once.
    """

    def __init__(self, ask: Callable[[], Awaitable[object]], timeout: float) -> None:
        self._ask = ask
        self._timeout = timeout
        self._judged = asyncio.Event()
        self._answers = False
        self.task = asyncio.create_task(self._run())

    async def check(self) -> None:
        """Raise StateUnavailable if the node does not answer."""
        await self._judged.wait()
        if not self._answers:
            raise _unavailable(TimeoutError())

    async def _run(self) -> None:
        seconds = min(FIRST_PROBE, self._timeout)
        try:
            while not await self._try(seconds):
                self._judged.set()
                seconds = self._timeout
                await asyncio.sleep(PROBE_PAUSE)
        finally:
            self._answers = True
            self._judged.set()

    async def _try(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._ask()
        except exceptions.ResponseError:
            return True  # an error is an answer
        except _FAILURES as error:
            telemetry.count_state_error(error)
            return False
        return True


class Client:
    """A Redis server, with a bounded number of round trips under way at a time.

    Every failure is a StateUnavailable. A round trip takes at most ``timeout`` seconds, including the wait for a connection.
    After a timeout, round trips to that server fail at once until it answers a probe.
    """

    is_cluster: ClassVar[bool] = False

    def __init__(
        self,
        redis: Redis | RedisCluster,
        *,
        timeout: float,
        max_connections: int,
        subscriber: Callable[[], Redis] | None = None,
        also_close: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """``subscriber`` makes a client for subscriptions; without it, they take connections from the pool of ``redis``."""
        self.redis = redis
        self._timeout = timeout
        self._free = asyncio.Semaphore(max_connections)
        self._subscriber = subscriber
        self._also_close = also_close
        self._away_since: float | None = None
        self._probes: dict[str, _Probe] = {}

    @property
    def away_for(self) -> float:
        """Seconds since the first failure after the last success; 0 while Redis answers."""
        return time.monotonic() - self._away_since if self._away_since else 0.0

    async def round_trip(
        self, ask: Callable[[], Awaitable[T]], operation: str = "COMMAND", script: str = "", key: str | bytes | int = ""
    ) -> T:
        """Return what ``ask`` returns; ``operation`` and ``script`` name the span, ``key`` tells the node in a cluster."""
        if self._probes and (probe := self._probes.get(self._node(key))):
            await probe.check()
        before = cancellations()
        try:
            # redis-py's pools raise an error when all connections are in use: wait for one here.
            with telemetry.redis_span(operation, script):
                async with asyncio.timeout(self._timeout), self._free:
                    reply = await ask()
        except _FAILURES as error:
            self._away_since = self._away_since or time.monotonic()
            telemetry.count_state_error(error)
            await raise_lost_cancellation(before)
            if isinstance(error, _TIMEOUTS):
                self._probe(key)
            raise _unavailable(error) from error
        self._away_since = None
        await raise_lost_cancellation(before)
        return reply

    def _probe(self, key: str | bytes | int) -> None:
        """Begin to probe the node of the key, from which an answer did not come in time."""
        node = self._node(key)
        if node and node not in self._probes:
            command = self._probing(key)
            probe = self._probes[node] = _Probe(lambda: self.redis.execute_command(*command), self._timeout)
            probe.task.add_done_callback(lambda _: self._probes.pop(node))

    def _node(self, key: str | bytes | int) -> str:
        """The name of the node that a round trip for the key goes to; empty if it is unknown."""
        return "server"

    def _probing(self, key: str | bytes | int) -> tuple[str | bytes | int, ...]:
        """The command that probes the node of the key."""
        return ("PING",)

    async def command(self, *words: str | bytes | int) -> Any:
        """Send a command and return its reply."""
        return await self.round_trip(lambda: self.redis.execute_command(*words), key=words[1] if len(words) > 1 else "")

    async def script(self, script: Script, keys: Sequence[str], args: Sequence[str | bytes | int] = ()) -> Any:
        """Run a script, all of whose ``keys`` are in one slot, and return its reply.

        Not by ``register_script``: it answers NOSCRIPT by a SCRIPT LOAD, which a cluster client sends to every primary, so one
        that is away would fail scripts on all others. EVAL needs the right node alone.
        """

        async def ask() -> Any:
            try:
                return await self.redis.evalsha(script.sha, len(keys), *keys, *args)
            except exceptions.NoScriptError:
                return await self.redis.eval(script.text, len(keys), *keys, *args)

        return await self.round_trip(ask, "EVALSHA", script.name, keys[0])

    async def persistently(
        self, script: Script, keys: Sequence[str], args: Sequence[str | bytes | int], *, patience: float
    ) -> Any:
        """Run an idempotent script until it succeeds, or until it, or Redis, has failed for ``patience`` seconds.

        A caller that is told that its write failed writes again under other ids: a short stall must not cause that.
        """
        began, pause = time.monotonic(), 0.02
        while True:
            try:
                return await self.script(script, keys, args)
            except StateUnavailable as error:
                # While this script fails others may succeed, on another node or because they only read: ``away_for`` stays 0.
                if not error.passing or max(self.away_for, time.monotonic() - began) >= patience:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)

    async def pipeline(self, commands: Sequence[Sequence[str | bytes | int]]) -> list[Any]:
        """Send ``commands`` together, each with keys of one slot, and return their replies in order."""
        key = commands[0][1] if len(commands) == 1 else ""
        return await self.round_trip(lambda: self._pipelined(commands), "PIPELINE", key=key)

    async def scripts(self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[str | bytes | int]]]) -> list[Any]:
        """Run a script once for each of ``calls`` (keys of one slot, and args), together; return the replies in order."""

        async def ask() -> list[Any]:
            try:
                return await self._pipelined([("EVALSHA", script.sha, len(keys), *keys, *args) for keys, args in calls])
            except exceptions.NoScriptError:
                return await self._pipelined([("EVAL", script.text, len(keys), *keys, *args) for keys, args in calls])

        return await self.round_trip(ask, "PIPELINE")

    async def _pipelined(self, commands: Sequence[Sequence[str | bytes | int]]) -> list[Any]:
        if len(commands) == 1:  # 20 us less of CPU, most often: a chain is one segment
            return [await self.redis.execute_command(*commands[0])]
        pipeline: Any = self.redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = await pipeline.execute()
        return replies

    async def aclose(self) -> None:
        """Close every connection."""
        probing = [probe.task for probe in self._probes.values()]
        for task in probing:
            task.cancel()
        await asyncio.gather(*probing, return_exceptions=True)
        await self.redis.aclose()
        if self._also_close is not None:
            await self._also_close()

    # -- subscriptions -------------------------------------------------------------------------------------------------

    def node_of(self, channel: bytes) -> str:
        """The name of the node that serves a channel, as far as is known; empty where there are no nodes."""
        return ""

    async def locate(self, channels: Iterable[bytes]) -> None:
        """Make ``node_of`` correct for the channels."""

    def subscriber(self, node: str) -> Redis:
        """Make a client for subscriptions to the channels that a node serves; the caller closes it."""
        if self._subscriber is not None:
            return self._subscriber()
        assert isinstance(self.redis, Redis)
        return Redis(connection_pool=self.redis.connection_pool)  # closing it leaves the pool open


class ClusterClient(Client):
    """A Redis Cluster."""

    is_cluster = True
    redis: RedisCluster

    async def scripts(self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[str | bytes | int]]]) -> list[Any]:
        # redis-py's cluster pipelines refuse EVALSHA.
        return await asyncio.gather(*(self.script(script, keys, args) for keys, args in calls))

    async def aclose(self) -> None:
        await super().aclose()
        # After a failure, until it has looked up the nodes again, redis-py's own aclose() does nothing.
        for nodes in ("nodes_cache", "startup_nodes"):
            await self.redis.nodes_manager.aclose(nodes)

    def _node(self, key: str | bytes | int) -> str:
        return self.node_of(str(key).encode() if not isinstance(key, bytes) else key) if key else ""

    def _probing(self, key: str | bytes | int) -> tuple[str | bytes | int, ...]:
        return ("EXISTS", key)

    def node_of(self, channel: bytes) -> str:
        try:
            node = self.redis.get_node_from_key(channel)  # type: ignore[arg-type]
        except exceptions.RedisClusterException:  # the slots are not known yet, or nobody serves this one
            return ""
        return node.name if node is not None else ""

    async def locate(self, channels: Iterable[bytes]) -> None:
        # redis-py follows MOVED, and learns from it, for commands alone: send one to the slot of each channel.
        await self.pipeline([("EXISTS", channel) for channel in channels])

    def subscriber(self, node: str) -> Redis:
        # Not the cluster's own PubSub: it reads its nodes in turn, waiting for each that is silent.
        found = self.redis.get_node(node_name=node)
        if found is None:
            raise exceptions.ConnectionError(f"the cluster has no node '{node}'")
        options = {**found.connection_kwargs, **_SUBSCRIBING}
        return Redis.from_pool(ConnectionPool(found.connection_class, **options))


def connect(url: str, *, timeout: float = 2.0, max_connections: int = 64) -> Client:
    """Make a client of the Redis at ``url``; connections are opened when they are needed.

    ``timeout`` (seconds) bounds a round trip, including connecting; ``max_connections`` the round trips under way at a time
    (in a cluster, to each node), others wait. Raises ValueError for an invalid URL.
    """
    scheme, _, kind = urlsplit(url).scheme.partition("+")
    # By default redis-py would repeat a command up to ten times, each with its own timeout. RESP2 has no maintenance
    # notifications, with which its pools would not notice that an idle connection was closed.
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


def _server(url: str, options: dict[str, Any]) -> Client:
    # A round trip is bounded as a whole; redis-py would start a task and a timer for each write and read of it besides.
    # (Clients with several nodes to try need them: one that hangs must leave time for the next.)
    from_url = {**options, **parse_url(url)}
    return Client(
        Redis.from_pool(ConnectionPool(**{**_with_probe(from_url), "socket_timeout": None})),
        timeout=options["socket_timeout"],
        max_connections=from_url["max_connections"],
        subscriber=lambda: Redis.from_pool(ConnectionPool(**{**from_url, **_SUBSCRIBING})),
    )


def _cluster(scheme: str, url: str, options: dict[str, Any]) -> Client:
    nodes, from_url = _hosts(scheme, url, "")
    every = {**options, **from_url}
    # A connection to a node that was restarted is found to be closed by the first command on it. Repeating that one is safe.
    pool = {**_with_probe(every), "retry": Retry(NoBackoff(), 1)}
    redis = RedisCluster(startup_nodes=[ClusterNode(*node) for node in nodes], **pool)
    return ClusterClient(redis, timeout=options["socket_timeout"], max_connections=every["max_connections"])


def _sentinel(scheme: str, url: str, options: dict[str, Any]) -> Client:
    service, _, database = urlsplit(url).path.strip("/").partition("/")
    if not service:
        raise ValueError("a redis+sentinel:// URL names the service: redis+sentinel://host:port/service/db")
    hosts, from_url = _hosts(scheme, url, f"/{database}")
    # A Sentinel that is away must leave time to ask the next.
    patience = options["socket_timeout"] / (len(hosts) + 1)
    asking = {**options, "socket_timeout": patience, "socket_connect_timeout": patience, "ssl": from_url["ssl"]}
    asking.update({name: from_url.pop(f"sentinel_{name}", None) for name in ("username", "password")})
    every = {**options, **from_url}
    sentinel = Sentinel(hosts, sentinel_kwargs=asking, **_with_probe(every))  # type: ignore[no-untyped-call]
    return Client(
        sentinel.master_for(service),
        timeout=options["socket_timeout"],
        max_connections=every["max_connections"],
        subscriber=lambda: sentinel.master_for(service, **_SUBSCRIBING),
        also_close=sentinel.aclose,
    )


def _with_probe(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a pool with a further connection, for a probe while all others wait for answers."""
    return {**options, "max_connections": options["max_connections"] + 1}


def _hosts(scheme: str, url: str, path: str) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """The hosts of a URL that may name several, and redis-py's options in the rest of it."""
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    pairs = [host.rpartition(":") if ":" in host else (host, "", "") for host in hosts.split(",")]
    options: dict[str, Any] = dict(parse_url(f"{scheme}://{credentials}{at}{hosts.split(',')[0]}{path}?{parts.query}"))
    options["ssl"] = options.pop("connection_class", None) is SSLConnection
    options.pop("host", None)
    options.pop("port", None)
    return [(host, int(port or 6379)) for host, _, port in pairs], options
