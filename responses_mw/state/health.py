"""Check whether a Redis is suitable for state, and how full it is."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.asyncio import RedisCluster
from redis.exceptions import ResponseError

from ..telemetry.metrics import REDIS_MEMORY_MAX, REDIS_MEMORY_USED
from ..telemetry.report import WarningLimit
from .errors import StateUnavailable

if TYPE_CHECKING:
    from .client import Client

__all__ = ["Health", "Memory", "check"]

logger = logging.getLogger(__name__)

OLDEST = (7, 0)
NEARLY_FULL = 0.9
"""Fraction of maxmemory above which no new responses are stored. The rest is for responses in progress, and for deletes."""


@dataclass(frozen=True, slots=True)
class Health:
    """What a Redis reports about itself. Sizes are in bytes; in a cluster, they describe the fullest primary.

    ``max_memory`` 0 means no limit. ``errors`` are reasons not to start, ``warnings`` are for the operator; each is a sentence.
    ``fault`` is one of the warnings: why new responses are not stored now. It is empty if they are stored.
    """

    server: str
    cluster: bool
    policy: str
    used_memory: int
    max_memory: int
    persistent: bool
    fault: str
    warnings: tuple[str, ...]
    errors: tuple[str, ...]


async def check(client: Client) -> Health:
    """Query the server, or every primary of the cluster. Raises StateUnavailable."""
    nodes = await _info(client)
    worst = _fullest(nodes)
    fault = _fullness(worst)
    policies = {str(node.get("maxmemory_policy", "unknown")) for node in nodes}
    cluster = any(int(node.get("cluster_enabled", 0)) for node in nodes)
    return Health(
        server=_server(worst),
        cluster=cluster,
        policy=next((policy for policy in sorted(policies) if policy != "noeviction"), "noeviction"),
        used_memory=int(worst.get("used_memory", 0)),
        max_memory=int(worst.get("maxmemory", 0)),
        persistent=all(int(node.get("aof_enabled", 0)) for node in nodes),
        fault=fault,
        warnings=tuple(dict.fromkeys([*filter(None, [fault]), *(warning for node in nodes for warning in _warnings(node))])),
        errors=tuple(dict.fromkeys(error for node in nodes for error in _errors(node, client))),
    )


class Memory:
    """A check of whether memory is nearly full, which queries Redis at most once in ``every`` seconds.

    It logs a warning at most once a minute, and when there is free memory again.
    """

    def __init__(self, client: Client, *, every: float = 5.0) -> None:
        self._client = client
        self._every = every
        self._asked = float("-inf")
        self._warnings = WarningLimit()
        self._fault = ""

    async def nearly_full(self) -> bool:
        """Return whether new responses should not be stored. Raises StateUnavailable if a due query fails."""
        now = time.monotonic()
        if now - self._asked >= self._every:
            self._asked = now  # before the query: concurrent requests use the last answer
            self._note(_fullness(_fullest(await _info(self._client))))
        return bool(self._fault)

    def _note(self, fault: str) -> None:
        if self._fault and not fault:
            logger.info("Redis has free memory again: new responses are stored")
            self._warnings.reset()
        if fault and self._warnings.is_due():
            logger.warning("%s", fault)
        self._fault = fault


async def _info(client: Client) -> list[dict[str, Any]]:
    """Return INFO of the server, or of every primary of the cluster; empty if INFO is not permitted, and for fakeredis."""
    try:
        redis: Any = client.redis
        if client.is_cluster:
            told = await client.round_trip(lambda: redis.info(target_nodes=RedisCluster.PRIMARIES), "INFO")
            return list(told.values())
        return [await client.round_trip(redis.info, "INFO")]
    except StateUnavailable as error:
        if isinstance(error.__cause__, ResponseError):
            return [{}]
        raise


def _fullest(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the node that uses the largest fraction of its memory, and set the memory metrics."""
    node = max(nodes, key=_fill)
    REDIS_MEMORY_USED.set(int(node.get("used_memory", 0)))
    REDIS_MEMORY_MAX.set(int(node.get("maxmemory", 0)))
    return node


def _fullness(node: dict[str, Any]) -> str:
    """Return a warning if the node is nearly full, otherwise an empty string."""
    if _fill(node) <= NEARLY_FULL:
        return ""
    sizes = f"{int(node['used_memory']) >> 20} of {int(node['maxmemory']) >> 20} MiB"
    return f"Redis uses {_fill(node):.0%} of maxmemory ({sizes}): new responses are answered, but not stored."


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
    # Valkey reports the version of Redis that it is compatible with.
    if node and tuple(int(part) for part in str(node["redis_version"]).split(".")[:2]) < OLDEST:
        errors.append(f"{_server(node)} is too old: 7.0 or later is needed.")
    if node.get("role") == "slave":
        errors.append("The server is a replica: nothing can be written to it.")
    if int(node.get("cluster_enabled", 0)) and not client.is_cluster:
        errors.append("The server is a node of a cluster: its URL must begin with redis+cluster://.")
    return errors
