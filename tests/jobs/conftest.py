"""A database for each test: a server that is just stopping must not run the jobs of the next one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import redis

if TYPE_CHECKING:
    from tests.support.servers import Ours, Start

    Replica = Callable[..., Ours]

SECRET = "a secret that all the replicas of the deployment have"
_databases = count(1)


@pytest.fixture
def database(redis_url: str) -> str:
    url = f"{redis_url}?db={next(_databases) % 15 + 1}"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url


@pytest.fixture
def replica(start_at: Start, mount: str, database: str) -> Replica:
    """Starts a replica; all of a test share their state and their secret."""

    def replica(**settings: Any) -> Ours:
        return start_at(mount, **{"redis__url": database, "auth__secret_keys": [SECRET], **settings})

    return replica
