"""A Redis client that limits concurrent round trips and converts their failures to `StateUnavailable`."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar, Token
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, TypeAlias, TypeVar

import anyio.lowlevel
from redis import exceptions
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from ..errors import without_traceback
from ..lua import Script
from ..redaction import redacted
from ..telemetry.context import WarningLimit
from ..telemetry.tracing import count_state_error, measure_round_trip, redis_span
from .errors import Damaged, StateUnavailable
from .reasons import FAILURES, is_bug, unavailable
from .refusals import Refusal, parsed, sentences
from .schema import kind_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
Value: TypeAlias = "str | bytes | int"
Args: TypeAlias = list[Value]
Call: TypeAlias = "tuple[Sequence[str], Sequence[Value]]"
"""The keys and the arguments of a script call. In a cluster, all keys are in one slot."""

# A subscription waits indefinitely and is reopened after any error, so redis-py's own timeout and retries are off.
SUBSCRIBING: dict[str, Any] = {"socket_timeout": None, "retry": Retry(NoBackoff(), 0, ())}

# Errors that commands and scripts raise for a key of the wrong type, or with a value that this server did not write.
_DAMAGE = re.compile(r"WRONGTYPE|user_script:\d+: |.*(not an integer|not a valid float|specified in XADD)")

FIRST_PROBE = 0.1  # minimum timeout in seconds of the first probe of a node
FIRST_PROBE_FRACTION = 20  # on slow networks, the timeout is this fraction of the timeout of a command
_SCANNED = 1000  # keys that one SCAN looks at
PROBE_PAUSE = 0.1  # seconds between two probes


class TimeLimit:
    """A timeout of a round trip. It begins again when a new connection has been made, and again when that has logged in."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._token: Token[TimeLimit | None] = _time_limit.set(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _time_limit.reset(self._token)
        await self._timeout.__aexit__(kind, error, trace)

    def restart(self) -> None:
        if not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._seconds)


_time_limit: ContextVar[TimeLimit | None] = ContextVar("time_limit", default=None)


async def log_in(connection: Any) -> None:
    """Initialize a new connection of redis-py. The login and the command after it each have the full timeout."""
    limit = _time_limit.get()
    if limit is not None:
        limit.restart()
    await connection.on_connect()
    if limit is not None:
        limit.restart()


class Client:
    """A client of a Redis server that makes up to `max_connections` concurrent round trips.

    Every failure raises StateUnavailable. A round trip times out after `timeout` seconds, including the wait for a connection.
    If a connection has to be made, that and its login may take `timeout` seconds more each, except in a cluster.

    After a timeout, the server is probed until it answers. Round trips wait for the first probe (see `FIRST_PROBE`), because
    one slow command must not make others fail. Then they fail at once until a probe succeeds. The first probe uses an open
    connection, if there is one. Then all idle connections are closed, because they may have been lost silently.
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
        self._first_probe = max(FIRST_PROBE, timeout / FIRST_PROBE_FRACTION)
        self._free = asyncio.Semaphore(max_connections)
        self._subscriber = subscriber
        self._also_close = also_close
        self._away_since: float | None = None
        self.failures = 0
        """Number of failed round trips so far."""
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

    async def pipeline(self, commands: Sequence[Sequence[Value]], *, contained: bool = False) -> list[Any]:
        """Send `commands` in one round trip, and return their replies in order. The keys of a command must be in one slot.

        If a key is damaged, raise `Damaged` or, if `contained` is true, return it in place of the command's reply.
        """
        keys = [command[1] if len(command) > 1 else "" for command in commands]
        names = {str(command[0]) for command in commands}
        name = names.pop() if len(names) == 1 else ""
        replies = await self._send(lambda: self._run_pipeline(commands), name, "", keys)
        return replies if contained else checked(replies)

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
                return await self._run_pipeline([("EVALSHA", script.sha, len(keys), *keys, *args) for keys, args in calls])
            except exceptions.NoScriptError as error:
                without_traceback(error)  # redis-py's frames refer to it
                # redis-py's `register_script` would send SCRIPT LOAD, in a cluster to every primary, even one that is down.
                return await self._run_pipeline([("EVAL", script.text, len(keys), *keys, *args) for keys, args in calls])

        try:
            replies = await self._send(ask, "EVALSHA", script.name, [keys[0] for keys, _ in calls])
        except StateUnavailable as error:
            if not contained:
                raise
            return [error.with_traceback(None)] * len(calls)
        return replies if contained else checked(replies)

    async def scan(self, pattern: str) -> list[str]:
        """Return the keys that match a glob pattern, in order. Only commands may use this, because it reads all keys."""
        redis: Any = self.redis
        targets: list[dict[str, Any]] = [{"target_nodes": one} for one in redis.get_primaries()] if self.is_cluster else [{}]
        found = set[str]()
        for target in targets:
            cursor: Any = 0
            while True:
                ask = partial(redis.scan, cursor, match=pattern, count=_SCANNED, **target)
                cursor, keys = await self.round_trip(ask, "SCAN")
                found.update(key.decode() for key in keys)
                if isinstance(cursor, dict):  # a cluster returns the cursor of each node
                    [cursor] = cursor.values()
                if not cursor:
                    break
        return sorted(found)

    async def _send(self, ask: Callable[[], Awaitable[list[Any]]], name: str, script: str, keys: Sequence[Value]) -> list[Any]:
        """Make a round trip, and return the replies. The reply to a command with a damaged key is the error `Damaged`."""
        operation = name if len(keys) == 1 else f"PIPELINE {name}".rstrip()
        key = keys[0] if len(keys) == 1 or len({self.node_of(key) for key in keys}) == 1 else ""
        replies = await self.round_trip(ask, operation, script, key, size=len(keys))
        pairs = zip(replies, keys, strict=True)
        return [self.damage(key, str(reply)) if isinstance(reply, Exception) else reply for reply, key in pairs]

    async def _run_pipeline(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """Return the replies to `commands`. With several commands, an error about a damaged key is the reply to its command."""
        if len(commands) == 1:  # the most common case, in which this saves 20 us of CPU
            return [await self.redis.execute_command(*commands[0])]
        pipeline: Any = self.redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
        failed = [place for place, reply in enumerate(replies) if isinstance(reply, Exception)]
        for place in failed:
            without_traceback(replies[place])
        for place in failed:
            if not _is_damage(replies[place]):
                # After an error of a single command, redis-py leaves a read-only server, and looks up the nodes of a cluster.
                replies[place] = await self.redis.execute_command(*commands[place])
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
                async with TimeLimit(self._timeout), self._free:
                    reply = await ask()
            measure_round_trip(operation, time.perf_counter() - began)
        except FAILURES as error:
            if is_bug(error):
                raise
            measure_round_trip(operation, time.perf_counter() - began, error)
            await raise_lost_cancellation(before)
            if _is_damage(error):
                raise self.damage(key, str(error)) from without_traceback(error)
            self._away_since = self._away_since or time.monotonic()
            self.failures += 1
            count_state_error(error)
            if isinstance(error, exceptions.ResponseError):
                self.log_refusals(parsed(str(error), operation))
            if isinstance(error, TimeoutError | exceptions.TimeoutError):
                self._probe(key)
            raise unavailable(error) from without_traceback(error)  # redis-py's frames refer to it
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
            logger.error("the %s at %s is damaged: %.200s", kind, name, redacted(reason))
        return error

    def log_refusals(self, refusals: Sequence[Refusal]) -> None:
        """Log what the server refuses, at most once a minute for each remedy."""
        due = {remedy for remedy in {refusal.remedy for refusal in refusals} if self._warnings[remedy].is_due()}
        if due:
            logger.error("%s", sentences(refusal for refusal in refusals if refusal.remedy in due))

    def _probe(self, key: Value) -> None:
        node = self.node_of(key)
        if node and node not in self._probes:
            task = asyncio.create_task(self._await_answer(node, key))
            task.add_done_callback(lambda _: self._probes.pop(node))
            self._probes[node] = task, time.monotonic() + self._first_probe

    async def _check_probe(self, node: str) -> None:
        if node in self._probes:
            task, first_end = self._probes[node]
            await asyncio.wait({task}, timeout=first_end - time.monotonic())
            if not task.done():
                raise unavailable(TimeoutError())

    async def _await_answer(self, node: str, key: Value) -> None:
        try:
            if await self._is_answering(node, key, self._first_probe):
                return
        finally:
            await self.close_idle(node)
        while True:
            await asyncio.sleep(PROBE_PAUSE)
            if await self._is_answering(node, key, self._timeout):
                return

    async def _is_answering(self, node: str, key: Value, seconds: float) -> bool:
        try:
            async with TimeLimit(seconds):
                with suppress(exceptions.ResponseError):  # an error reply is also an answer
                    await self._ask(node, key)
        except FAILURES as error:
            if is_bug(error):
                raise
            count_state_error(error)
            return False
        return True

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
        # After a timeout, the pool would use the closed connection first.
        await self._give_back(sorted(self._take_idle(), key=lambda connection: connection.is_connected))
        await self.redis.execute_command("PING")

    async def close_idle(self, node: str) -> None:
        """Close the idle connections to a node."""
        # Take them first, because the pool's own `disconnect` would also close connections that are taken meanwhile.
        connections = self._take_idle()
        await asyncio.gather(*(connection.disconnect(nowait=True) for connection in connections), return_exceptions=True)
        await self._give_back(connections)

    def _take_idle(self) -> list[AbstractConnection]:
        assert isinstance(self.redis, Redis)
        pool = self.redis.connection_pool
        (idle, _), *_ = pool.get_connection_count()
        return [pool.get_available_connection() for _ in range(idle)]  # type: ignore[no-untyped-call]

    async def _give_back(self, connections: list[AbstractConnection]) -> None:
        """Return connections to the pool. The pool uses the last one first."""
        assert isinstance(self.redis, Redis)
        for connection in connections:
            await self.redis.connection_pool.release(connection)

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
    """Return `replies`, or empty the list and raise the first error among them."""
    for reply in replies:
        if isinstance(reply, Exception):
            replies.clear()  # otherwise, the error's traceback refers to frames that refer to the error
            try:
                raise reply
            finally:
                del reply
    return replies


def _is_damage(error: Exception) -> bool:
    return isinstance(error, exceptions.ResponseError) and _DAMAGE.match(str(error)) is not None


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
