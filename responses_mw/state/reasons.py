"""Find out why Redis is unavailable, and whether this may be temporary."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

from redis import exceptions
from redis.asyncio.sentinel import MasterNotFoundError

from ..network import failure_reason
from .errors import StateFull, StateUnavailable

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
    (MasterNotFoundError, "no Sentinel can be reached", True),
    (exceptions.ConnectionError, "it cannot be reached", True),
    (exceptions.ResponseError, "it refused a command", False),
    (exceptions.RedisError, "the connection failed", True),
    (exceptions.RedisClusterException, "the cluster cannot be reached", True),
    (OSError, "it cannot be reached", True),
    # Before redis-py asks for the nodes of a cluster again, it closes all connections, even while other tasks write to them.
    (AttributeError, "it cannot be reached", True),  # from redis-py
    (RuntimeError, "it cannot be reached", True),  # from uvloop
    (TypeError, "it cannot be reached", True),  # from asyncio (Python 3.13)
)
_CONNECTION_MODULES = ("asyncio.", "redis.", "uvloop.")
FAILURES = tuple(row[0] for row in _REASONS)
# Reasons that only the texts of errors show. They apply first.
_TEXTS: tuple[tuple[str, str, bool], ...] = (
    (r"DB index is out of range", "it has no database with the number in redis.url", False),
    (r"cluster support disabled|Cluster mode is not enabled", "it is not a cluster (use redis://)", False),
    (r"All slots are not covered", "the cluster does not serve all slots", True),
    # redis-py reports the errors of Sentinels only in this text.
    (r"^No master found .*(AuthenticationError|NoPermission)", "the Sentinels refused our credentials", False),
    (r"^No master found for [^:]*$", "the Sentinels have no healthy master of this name", True),
)
_CREDENTIALS = (exceptions.AuthenticationError, exceptions.AuthorizationError)
# Codes of error replies that concern the state of the server, not the command.
_SERVER_STATES = re.compile("NOREPLICAS|MISCONF|BUSY")


def is_bug(error: Exception) -> bool:
    """Return whether `error` is of a kind that a closed connection causes, but was raised by other code."""
    if not isinstance(error, AttributeError | RuntimeError | TypeError) or error.__traceback__ is None:
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return not str(frame.f_globals.get("__name__")).startswith(_CONNECTION_MODULES)


def unavailable(error: Exception) -> StateUnavailable:
    """Return the error to raise for one of `FAILURES`."""
    if isinstance(error, exceptions.OutOfMemoryError):
        return StateFull()
    reason, passing = _reason(error)
    if state := _SERVER_STATES.match(str(error)):
        reason, passing = f"{reason} ({state[0]})", True
    if reason.endswith("be reached") and (why := failure_reason(error)):
        reason = f"{reason}: {why}"
    return StateUnavailable(reason, passing=passing)


def _reason(error: Exception) -> tuple[str, bool]:
    for each in _causes(error):  # the errors of a cluster's nodes are causes
        for pattern, reason, passing in _TEXTS:
            if re.search(pattern, str(each)):
                return reason, passing
        if isinstance(each, _CREDENTIALS):
            error = each
    _, reason, passing = next(row for row in _REASONS if isinstance(error, row[0]))
    return reason, passing


def _causes(error: BaseException | None) -> Iterator[Exception]:
    while isinstance(error, Exception):
        yield error
        error = error.__cause__
