"""A Redis client that limits concurrent round trips and converts their failures to `StateUnavailable`."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar

import anyio.lowlevel
from redis import exceptions
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from ..lua import Script
from ..network import failure_reason
from ..telemetry.context import WarningLimit
from ..telemetry.tracing import count_state_error, measure_round_trip, redis_span
from .errors import Damaged, StateFull, StateUnavailable
from .schema import kind_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
Value: TypeAlias = "str | bytes | int"
Args: TypeAlias = list[Value]
Call: TypeAlias = "tuple[Sequence[str], Sequence[Value]]"
"""The keys and the arguments of a script call. In a cluster, all keys are in one slot."""

# A subscription waits indefinitely and is reopened after any error, so redis-py's own timeout and retries are off.
SUBSCRIBING: dict[str, Any] = {"socket_timeout": None, "retry": Retry(NoBackoff(), 0, ())}

# The reason reported for each failure, and whether the failure may be temporary. The first matching row applies.
_REASONS: tuple[tuple[type[Exception], str, bool], ...] = (
    (TimeoutError, "it did not answer in time", True),
    (exceptions.TimeoutError, "it did not answer in time", True),
    (exceptions.BusyLoadingError, "it is loading its data", True),
    (exceptions.AuthenticationError, "it refused our credentials", False),
    (exceptions.AuthorizationError, "it refused our credentials", False),
    (exceptions.NoPermissionError, "our user lacks permission for a command", False),
    (exceptions.ReadOnlyError, "it is read-only", True),
    (exceptions.ClusterDownError, "the cluster is down", True),
    (exceptions.MovedError, "it is a cluster (use redis+cluster://)", False),
    (exceptions.ConnectionError, "it cannot be reached", True),
    (exceptions.ResponseError, "it refused a command", False),
    (exceptions.RedisError, "the connection failed", True),
    (exceptions.RedisClusterException, "the cluster cannot be reached", True),
    (OSError, "it cannot be reached", True),
    # Before redis-py asks for the nodes of a cluster again, it closes all connections, even while other tasks write to them.
    (AttributeError, "it cannot be reached", True),  # from redis-py
    (RuntimeError, "it cannot be reached", True),  # from uvloop
)
FAILURES = tuple(row[0] for row in _REASONS)
# Errors that commands and scripts raise for a key of the wrong type, or with a value that this server did not write.
_DAMAGE = re.compile(r"WRONGTYPE|user_script:\d+: |.*(not an integer|not a valid float|specified in XADD)")

# Codes of error replies that concern the state of the server, not the command.
_SERVER_STATES = re.compile("NOREPLICAS|MISCONF|BUSY")

FIRST_PROBE = 0.1  # timeout in seconds of the first probe of a node
PROBE_PAUSE = 0.1  # seconds between two probes


class Client:
    """A client of a Redis server that makes up to `max_connections` concurrent round trips.

    Every failure raises StateUnavailable. A round trip times out after `timeout` seconds, including the wait for a connection.

    After a timeout, the server is probed until it answers. Round trips wait up to `FIRST_PROBE` seconds for the first probe,
    because one slow command must not make others fail. Then they fail at once until a probe succeeds.
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
        """`subscriber` creates a client for subscriptions, which by default share the pool of `redis`.

        `aclose` awaits `also_close`, too.
        """
        self.redis = redis
        self._timeout = timeout
        self._free = asyncio.Semaphore(max_connections)
        self._subscriber = subscriber
        self._also_close = also_close
        self._away_since: float | None = None
        self._probes: dict[str, tuple[asyncio.Task[None], float]] = {}  # for each node, also the time when its first probe ends
        self._warnings: defaultdict[str, WarningLimit] = defaultdict(WarningLimit)
        self.shared_secret: str | None = None
        """The secret of the processes that share an embedded server, or None if there is no such server."""

    @property
    def away_for(self) -> float:
        """Seconds since the first failure after the last success, or 0 while Redis answers."""
        return time.monotonic() - self._away_since if self._away_since else 0.0

    async def command(self, *words: Value) -> Any:
        return (await self.pipeline([words]))[0]

    async def pipeline(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """Send `commands` in one round trip, and return their replies in order. The keys of a command must be in one slot."""
        keys = [command[1] if len(command) > 1 else "" for command in commands]
        names = {str(command[0]) for command in commands}
        name = names.pop() if len(names) == 1 else ""
        return checked(await self._send(lambda: self._pipelined(commands), name, "", keys))

    async def script(self, script: Script, keys: Sequence[str], args: Sequence[Value] = ()) -> Any:
        """Run a script and return the script's reply. All `keys` must be in one slot."""
        return (await self.scripts(script, [(keys, args)]))[0]

    async def scripts(self, script: Script, calls: Sequence[Call], *, contained: bool = False) -> list[Any]:
        """Run a script once for each of `calls`, and return the replies in order.

        If a call fails, its error is raised or, if `contained` is true, returned in place of the call's reply. Outside
        of a cluster, a failure of the server is the error of all calls, even of those that the server has executed.
        """

        async def ask() -> list[Any]:
            try:
                return await self._pipelined([("EVALSHA", script.sha, len(keys), *keys, *args) for keys, args in calls])
            except exceptions.NoScriptError:
                # redis-py's `register_script` would send SCRIPT LOAD, in a cluster to every primary, even one that is down.
                return await self._pipelined([("EVAL", script.text, len(keys), *keys, *args) for keys, args in calls])

        try:
            replies = await self._send(ask, "EVALSHA", script.name, [keys[0] for keys, _ in calls])
        except StateUnavailable as error:
            replies = [error] * len(calls)
        return replies if contained else checked(replies)

    async def _send(self, ask: Callable[[], Awaitable[list[Any]]], name: str, script: str, keys: Sequence[Value]) -> list[Any]:
        """Make a round trip, and return the replies. The reply to a command with a damaged key is the error `Damaged`."""
        operation = name if len(keys) == 1 else f"PIPELINE {name}".rstrip()
        key = keys[0] if len(keys) == 1 or len({self.node_of(key) for key in keys}) == 1 else ""
        replies = await self.round_trip(ask, operation, script, key, size=len(keys))
        pairs = zip(replies, keys, strict=True)
        return [self.damage(key, str(reply)) if isinstance(reply, Exception) else reply for reply, key in pairs]

    async def _pipelined(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """Return the replies to `commands`. With several commands, an error about a damaged key is the reply to its command."""
        if len(commands) == 1:  # the most common case, in which this saves 20 us of CPU
            return [await self.redis.execute_command(*commands[0])]
        pipeline: Any = self.redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
        for place, (reply, command) in enumerate(zip(replies, commands, strict=True)):
            if isinstance(reply, Exception) and not _is_damage(reply):
                # After an error of a single command, redis-py leaves a read-only server, and looks up the nodes of a cluster.
                replies[place] = await self.redis.execute_command(*command)
        return replies

    async def round_trip(
        self, ask: Callable[[], Awaitable[T]], operation: str, script: str = "", key: Value = "", *, size: int = 1
    ) -> T:
        """Await `ask()`, which makes one round trip to the node of `key`, and return its result.

        `operation`, `script` and the number of commands (`size`) appear in the span. Raises StateUnavailable on any failure.
        """
        if self._probes:
            await self._check_probe(self.node_of(key))
        before, began = _cancellations(), time.perf_counter()
        try:
            # Wait for a free connection here, because redis-py's pools raise an error when all connections are in use.
            with redis_span(operation, script, size, partial(self._address, key)):
                async with asyncio.timeout(self._timeout), self._free:
                    reply = await ask()
            measure_round_trip(operation, time.perf_counter() - began)
        except FAILURES as error:
            measure_round_trip(operation, time.perf_counter() - began, error)
            await raise_lost_cancellation(before)
            if _is_damage(error):
                raise self.damage(key, str(error)) from error
            self._away_since = self._away_since or time.monotonic()
            count_state_error(error)
            if isinstance(error, TimeoutError | exceptions.TimeoutError):
                self._probe(key)
            raise _unavailable(error) from error
        self._away_since = None
        await raise_lost_cancellation(before)
        return reply

    def damage(self, key: Value, reason: str) -> Damaged:
        """Count and log a damaged key, and return the error to raise. Each kind of key is logged at most once a minute."""
        name = key.decode(errors="replace") if isinstance(key, bytes) else str(key)
        kind = kind_of(name)
        error = Damaged(kind)
        count_state_error(error)
        if self._warnings[kind].is_due():
            logger.error("the %s at %s is damaged: %.200s", kind, name, reason)
        return error

    def _probe(self, key: Value) -> None:
        node = self.node_of(key)
        if node and node not in self._probes:
            task = asyncio.create_task(self._await_answer(node, key))
            task.add_done_callback(lambda _: self._probes.pop(node))
            self._probes[node] = task, time.monotonic() + FIRST_PROBE

    async def _check_probe(self, node: str) -> None:
        if node in self._probes:
            task, first_end = self._probes[node]
            await asyncio.wait({task}, timeout=first_end - time.monotonic())
            if not task.done():
                raise _unavailable(TimeoutError())

    async def _await_answer(self, node: str, key: Value) -> None:
        seconds = FIRST_PROBE
        while True:
            try:
                async with asyncio.timeout(seconds):
                    with suppress(exceptions.ResponseError):  # an error reply is also an answer
                        await self._ask(node, key)
                break
            except FAILURES as error:
                count_state_error(error)
            await asyncio.sleep(PROBE_PAUSE)
            seconds = self._timeout

    async def aclose(self) -> None:
        """Stop probing and close every connection."""
        probing = [task for task, _ in self._probes.values()]
        for task in probing:
            task.cancel()
        await asyncio.gather(*probing, return_exceptions=True)
        await self.redis.aclose()
        if self._also_close is not None:
            await self._also_close()

    # -- what differs in a cluster -------------------------------------------------------------------------------------

    def _address(self, key: Value) -> tuple[str | None, int | None, int | None]:
        """Return the host or socket, port and database of the server of `key`, for a span."""
        assert isinstance(self.redis, Redis)
        options = self.redis.connection_pool.connection_kwargs  # with Sentinel, the options have no host
        return options.get("path", options.get("host")), options.get("port"), options.get("db")

    async def _ask(self, node: str, key: Value) -> None:
        """Send a probe to `node`, which served `key` when a round trip timed out."""
        await self.redis.execute_command("PING")

    def node_of(self, key: Value) -> str:
        """Return the name of the node that serves a key or channel, or "" if the node is unknown."""
        return "server"

    async def locate(self, channels: Iterable[bytes]) -> None:
        """In a cluster, look up the nodes of `channels` again, because `node_of` may return outdated nodes."""

    def subscriber(self, node: str) -> Redis:
        """Return a new client for subscriptions to channels of `node`. The caller must close this client."""
        if self._subscriber is not None:
            return self._subscriber()
        assert isinstance(self.redis, Redis)
        return Redis(connection_pool=self.redis.connection_pool)  # closing this client leaves the pool open


def checked(replies: list[Any]) -> list[Any]:
    """Return `replies`, or raise the first error among them."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def _is_damage(error: Exception) -> bool:
    return isinstance(error, exceptions.ResponseError) and _DAMAGE.match(str(error)) is not None


def _unavailable(error: Exception) -> StateUnavailable:
    if isinstance(error, exceptions.OutOfMemoryError):
        return StateFull()
    _, reason, passing = next(row for row in _REASONS if isinstance(error, row[0]))
    if state := _SERVER_STATES.match(str(error)):
        reason, passing = f"{reason} ({state[0]})", True
    if reason.endswith("cannot be reached") and (why := failure_reason(error)):
        reason = f"{reason}: {why}"
    return StateUnavailable(reason, passing=passing)


def _cancellations() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def raise_lost_cancellation(before: int = 0) -> None:
    """Raise CancelledError if the current task has more than `before` pending cancellations.

    Two bugs in the standard library swallow a cancellation without stopping the task:

    - `asyncio.wait_for`, which redis-py uses for writes: https://github.com/python/cpython/issues/86296 (fixed in 3.12)
    - `asyncio.TaskGroup`, if the group ends with an error: https://github.com/python/cpython/issues/116720 (fixed in 3.13)
    """
    if _cancellations() > before:
        await anyio.lowlevel.checkpoint_if_cancelled()  # raises if a cancel scope cancelled the task
        raise asyncio.CancelledError
