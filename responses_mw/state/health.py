"""Checks of whether a Redis is fit to hold state, and how full it is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.asyncio import RedisCluster
from redis.exceptions import ResponseError

from .errors import StateUnavailable

if TYPE_CHECKING:
    from .client import Client

__all__ = ["Health", "Memory", "check"]

OLDEST = (7, 0)


@dataclass(frozen=True, slots=True)
class Health:
    """What a Redis reports about itself; for a cluster, its worst primary. Sizes are in bytes.

    ``max_memory`` 0 means no limit. ``errors`` are reasons not to start, ``warnings`` are for the operator; each is a sentence.
    """

    server: str
    cluster: bool
    policy: str
    used_memory: int
    max_memory: int
    persistent: bool
    warnings: tuple[str, ...]
    errors: tuple[str, ...]


async def check(client: Client) -> Health:
    """Query the server, or every primary of the cluster. Raises StateUnavailable."""
    nodes = await _info(client)
    worst = max(nodes, key=_fill)
    policies = {str(node.get("maxmemory_policy", "unknown")) for node in nodes}
    cluster = any(int(node.get("cluster_enabled", 0)) for node in nodes)
    return Health(
        server=_server(worst),
        cluster=cluster,
        policy=next((policy for policy in sorted(policies) if policy != "noeviction"), "noeviction"),
        used_memory=int(worst.get("used_memory", 0)),
        max_memory=int(worst.get("maxmemory", 0)),
        persistent=all(int(node.get("aof_enabled", 0)) for node in nodes),
        warnings=tuple(dict.fromkeys(warning for node in nodes for warning in _warnings(node))),
        errors=tuple(dict.fromkeys(error for node in nodes for error in _errors(node, client))),
    )


class Memory:
    """Whether memory is nearly full, queried at most once in ``every`` seconds."""

    def __init__(self, client: Client, *, share: float = 0.9, every: float = 5.0) -> None:
        """``share`` is the part of maxmemory above which a node is nearly full."""
        self._client = client
        self._share = share
        self._every = every
        self._asked = float("-inf")
        self._full = False

    async def nearly_full(self) -> bool:
        """Return whether new responses should not be stored. Raises StateUnavailable if a due query fails."""
        now = time.monotonic()
        if now - self._asked >= self._every:
            self._asked = now  # before the wait: concurrent requests use the last answer
            self._full = any(_fill(node) > self._share for node in await _info(self._client))
        return self._full


async def _info(client: Client) -> list[dict[str, Any]]:
    """INFO of the server, or of every primary of the cluster; empty where it is not permitted, and for fakeredis."""
    try:
        redis: Any = client.redis
        if client.is_cluster:
            told = await client.round_trip(lambda: redis.info(target_nodes=RedisCluster.PRIMARIES))
            return list(told.values())
        return [await client.round_trip(redis.info)]
    except StateUnavailable as error:
        if isinstance(error.__cause__, ResponseError):
            return [{}]
        raise


def _fill(node: dict[str, Any]) -> float:
    limit = int(node.get("maxmemory", 0))
    return int(node["used_memory"]) / limit if limit else 0.0


def _server(node: dict[str, Any]) -> str:
    if "valkey_version" in node:
        return f"Valkey {node['valkey_version']}"
    return f"Redis {node['redis_version']}" if node else "unknown"


def _warnings(node: dict[str, Any]) -> list[str]:
    if not node:
        return ["The server does not answer INFO: its version, memory and persistence are unknown."]
    warnings = []
    if node["maxmemory_policy"] != "noeviction":
        warnings.append(f"maxmemory-policy is {node['maxmemory_policy']}: stored data may be evicted; set it to noeviction.")
    if not int(node["maxmemory"]):
        warnings.append("maxmemory is not set: the machine runs out of memory before the server refuses a write.")
    if not int(node["aof_enabled"]):
        warnings.append("appendonly is off: a restart of the server loses what was stored since the last snapshot.")
    return warnings


def _errors(node: dict[str, Any], client: Client) -> list[str]:
    errors = []
    # Valkey gives the version of Redis that it is compatible with.
    if node and tuple(int(part) for part in str(node["redis_version"]).split(".")[:2]) < OLDEST:
        errors.append(f"{_server(node)} is too old: 7.0 or later is needed.")
    if node.get("role") == "slave":
        errors.append("The server is a replica: nothing can be written to it.")
    if int(node.get("cluster_enabled", 0)) and not client.is_cluster:
        errors.append("The server is a node of a cluster: its URL must begin with redis+cluster://.")
    return errors
