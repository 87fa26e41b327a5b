"""Fixtures: servers configured so that requests can have every kind of side effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import redis

from tests.auth.servers import Effects, Knowing, settings_of
from tests.support.stored import USAGE
from tests.support.websocket import UVICORN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.servers import Ours, Serve
    from tests.support.valkey import Plain


@pytest.fixture
def keys(redis_url: str) -> Iterator[Plain]:
    with redis.Redis.from_url(redis_url, socket_timeout=60) as client:
        yield client


def snapshot(keys: Plain) -> dict[bytes, Any]:
    """Return all keys with their values, except the usage of owners, which is updated every ten seconds."""
    read = {
        b"hash": keys.hgetall,
        b"string": keys.get,
        b"set": keys.smembers,
        b"list": lambda key: keys.lrange(key, 0, -1),
        b"zset": lambda key: keys.zrange(key, 0, -1, withscores=True),
        b"stream": keys.xrange,
    }
    return {key: read[keys.type(key)](key) for key in keys.keys("*") if not key.startswith(USAGE)}


@pytest.fixture
def effects() -> Effects:
    return Effects()


@pytest.fixture
def start_with(start_at: Callable[..., Ours], serve: Serve, effects: Effects) -> Callable[..., Ours]:
    """Return a function that starts the server at a mount, with an upstream and every service that requests can affect."""
    url = serve(effects, lifespan="off")

    def start(mount: str, upstream: Knowing, **settings: Any) -> Ours:
        return start_at(mount, uvicorn=UVICORN, upstream=upstream, **{**settings_of(url), **settings})

    return start
