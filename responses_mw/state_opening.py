"""Open the state in Redis as the settings say, and check whether the Redis is suitable."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from .errors import StartupError
from .settings import Settings
from .state import Client, State, StateOptions, StateUnavailable, connect, open_embedded

logger = logging.getLogger(__name__)

COMMIT_TIMEOUTS = 5
"""Maximum time to retry a write of a response or conversation to Redis, in multiples of `redis.timeout`."""


@asynccontextmanager
async def open_state(settings: Settings) -> AsyncIterator[State | None]:
    """Open the state in Redis. Without `redis.url`, open the embedded store. If none is installed, yield None.

    Raises `StartupError` if `redis.url` is invalid, or if the embedded store cannot start or cannot use `redis.data_dir`.
    """
    async with AsyncExitStack() as stack:
        client = await _state_client(settings, stack)
        if client is None:
            yield None
            return
        options = StateOptions(
            ttl_seconds=settings.state.ttl,
            response_bytes=settings.limits.max_request_bytes,
            chain_bytes=2 * settings.limits.max_request_bytes,
            chain_memory=16 * settings.limits.max_request_bytes,
            owner_bytes=settings.limits.stored_bytes,
            patience=COMMIT_TIMEOUTS * settings.redis.timeout,
        )
        state = State(client, options)
        stack.push_async_callback(state.aclose)
        yield state


async def _state_client(settings: Settings, stack: AsyncExitStack) -> Client | None:
    if settings.redis.url is not None:
        try:
            return connect(settings.redis.url.get_secret_value(), timeout=settings.redis.timeout)
        except ValueError as error:
            raise StartupError(f"redis.url is not valid: {error}") from None
    data_dir = Path(settings.redis.data_dir) if settings.redis.data_dir else None
    try:
        return await stack.enter_async_context(open_embedded(data_dir, timeout=settings.redis.timeout))
    except ModuleNotFoundError:
        logger.warning("nothing is stored: redis.url is not set, and the extra responses-mw[embedded] is not installed")
        return None


async def check_fitness(state: State, settings: Settings) -> None:
    """Check whether the Redis at `redis.url` is suitable. If it is not available yet, or refuses commands, log that.

    Raises `StartupError` if it is unsuitable, such as a replica, or if it may evict data without `redis.allow_eviction`.
    """
    if settings.redis.url is None:
        return
    try:
        health = await state.inspect()
        await state.ability.check()
    except StateUnavailable as error:
        logger.warning("%s It is used as soon as it is available.", error.message)
        return
    faults = list(health.errors)
    if health.policy != "noeviction" and not settings.redis.allow_eviction:
        remedy = "permit INFO" if health.policy == "unknown" else "set it to noeviction"
        faults.append(f"maxmemory-policy is {health.policy}: {remedy}, or set redis.allow_eviction.")
    if faults:
        raise StartupError(f"{health.server}: {' '.join(faults)}")
