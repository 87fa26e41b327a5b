"""Combine the parts of the state layer, and check whether the Redis server is suitable."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import ResponseError

from ..lua import load
from ..telemetry.context import WarningLimit
from ..telemetry.metrics import REDIS_MEMORY_MAX, REDIS_MEMORY_USED
from .ability import Ability
from .approvals import Approvals
from .blocks import Blocks
from .captures import Captures
from .chunk_index import ChunkIndex
from .client import Client
from .conversations import Conversations
from .ended_sessions import EndedSessions
from .errors import StateUnavailable
from .files import Files
from .jobs import Jobs
from .models import StateOptions
from .pubsub import PubSub
from .queue import IngestionQueue, ResponseQueue
from .recent import Recent
from .recent_window import RecentWindow
from .refusals import parsed
from .replicas import Replicas
from .responses import Responses
from .store_erasures import Erasures
from .store_files import StoreFiles
from .temporary import Vault
from .usage import Ledger, Usage
from .vector_stores import StoreRecords
from .writes import Writer

logger = logging.getLogger(__name__)

[_CHECK_KEYS] = load("state", "keys_check")

OLDEST = (7, 0)
NEARLY_FULL = 0.9
"""Fraction of maxmemory above which no new responses are stored. Responses in progress and deletions can use more."""
MEMORY_INTERVAL = 5.0  # minimum seconds between two queries of memory usage


@dataclass(frozen=True, slots=True)
class Health:
    """The state of a Redis server or cluster. `server`, `fault` and the memory sizes are those of the fullest primary.

    server        product and version
    policy        maxmemory-policy; if the nodes differ, a policy other than noeviction
    used_memory   memory in use, in bytes
    max_memory    maxmemory in bytes; 0 means no limit
    fault         the reason why new responses are not stored now, or "" if they are stored
    warnings      messages for the operator, including `fault`
    errors        reasons why responses-mw must not start
    run_ids       the `run_id` of each node, which changes when the node restarts
    """

    server: str
    policy: str
    used_memory: int
    max_memory: int
    fault: str
    warnings: tuple[str, ...]
    errors: tuple[str, ...]
    run_ids: frozenset[str]


class State:
    """The state of all owners: responses, conversations, jobs, quotas and usage. All parts share one client."""

    def __init__(self, client: Client, options: StateOptions | None = None) -> None:
        self.client = client
        self.options = options = options or StateOptions()
        self.writer = Writer(client, options)
        self.quota = self.writer.quota
        self.conversations = Conversations(client, self.writer, options)
        self.vault = Vault()
        self.responses = Responses(client, self.conversations, self.writer, options, self.vault)
        self.jobs = Jobs(client, self.writer, options, self.vault)
        self.usage = Usage(client)
        self.ledger = Ledger(client)
        self.queue = ResponseQueue(client, self.usage)
        self.ingestion_queue = IngestionQueue(client)
        self.wakeups = PubSub(client)
        self.recent = Recent(client)
        self.recent_window = RecentWindow(self.recent)
        self.captures = Captures(client)
        self.ended_sessions = EndedSessions(client)
        self.replicas = Replicas(client)
        self.ability = Ability(client)
        self.approvals = Approvals(client, options)
        self.files = Files(client, self.writer)
        self.vector_stores = StoreRecords(client, self.writer)
        self.chunk_index = ChunkIndex(client)
        self.store_blocks = Blocks(client, self.chunk_index)
        self.store_erasures = Erasures(client, self.store_blocks)
        self.store_files = StoreFiles(client, self.writer, self.store_blocks, self.store_erasures)
        self._memory_checked_at, self._memory_fault = float("-inf"), ""
        self._memory_warnings = WarningLimit()
        self._last_health: Health | None = None

    async def check(self) -> Health:
        """Query Redis, or every primary of a cluster, and return its health. Raises StateUnavailable if Redis fails."""
        nodes = await _info(self.client)
        worst = _fullest(nodes)
        fault = _fullness(worst)
        policies = {str(node.get("maxmemory_policy", "unknown")) for node in nodes}
        return Health(
            server=_server(worst),
            policy=next((policy for policy in sorted(policies) if policy != "noeviction"), "noeviction"),
            used_memory=int(worst.get("used_memory", 0)),
            max_memory=int(worst.get("maxmemory", 0)),
            fault=fault,
            warnings=tuple(dict.fromkeys(filter(None, [fault, *(text for node in nodes for text in _warnings(node))]))),
            errors=tuple(dict.fromkeys(error for node in nodes for error in _errors(node, self.client))),
            run_ids=frozenset(node.get("run_id", "") for node in nodes),
        )

    async def inspect(self) -> Health:
        """Check Redis like `check`. Log warnings that were not in the last result, and a warning if Redis was restarted."""
        health, last = await self.check(), self._last_health
        for warning in health.warnings:
            if warning != health.fault and (last is None or warning not in last.warnings):  # `nearly_full` logs the fault
                logger.warning("%s: %s", health.server, warning)
        if last is not None and not health.run_ids <= last.run_ids:
            logger.warning("Redis was restarted or replaced: data that was not saved or replicated is lost")
        self._last_health = health
        return health

    async def nearly_full(self) -> bool:
        """Return whether Redis uses more than `NEARLY_FULL` of maxmemory. If so, log a warning at most once a minute.

        Redis is queried at most once in `MEMORY_INTERVAL` seconds. Raises StateUnavailable if the query fails.
        """
        if (now := time.monotonic()) - self._memory_checked_at >= MEMORY_INTERVAL:
            self._memory_checked_at = now  # before the query, so that concurrent requests use the last result
            fault = _fullness(_fullest(await _info(self.client)))
            if self._memory_fault and not fault:
                logger.info("Redis has free memory again: new responses are stored")
                self._memory_warnings = WarningLimit()  # the next warning is due at once
            if fault and self._memory_warnings.is_due():
                logger.warning("%s", fault)
            self._memory_fault = fault
        return bool(self._memory_fault)

    async def check_keys(self, values: Sequence[str]) -> bool:
        """Return whether this replica's secret keys match those of the other replicas. Raises StateUnavailable if Redis fails.

        `values` are one-way hashes of the keys, beginning with the key that encrypts. The keys match if one of `values` is
        stored, or if no value is stored. If they match, the first value is stored, and stored values outside `values` are
        removed. Keys can therefore be rotated in three steps: `old,new`, `new,old`, `new`.
        """
        return bool(await self.client.script(_CHECK_KEYS, ["rmw:{keys}:check"], [self.options.ttl_seconds * 1000, *values]))

    async def aclose(self) -> None:
        """Stop all tasks and close every connection."""
        await self.writer.aclose()
        await self.wakeups.aclose()
        await self.client.aclose()


async def _info(client: Client) -> list[dict[str, Any]]:
    """Return the INFO of the server, or of every primary of a cluster. If the server refuses INFO, return `[{}]`."""
    redis: Any = client.redis
    try:
        if not client.is_cluster:
            return [await client.round_trip(partial(_server_info, redis), "INFO")]
        nodes = await client.round_trip(lambda: redis.info(target_nodes=RedisCluster.PRIMARIES), "INFO")
        return [nodes] if "redis_version" in nodes else list(nodes.values())  # with one primary, redis-py returns its INFO
    except StateUnavailable as error:
        if isinstance(error.__cause__, ResponseError) and parsed(str(error.__cause__)):
            return [{}]
        raise


async def _server_info(redis: Redis) -> dict[str, Any]:
    """Return the INFO of the server. If it is a replica, close the idle connections, which may have outlived a failover."""
    info: dict[str, Any] = await redis.info()
    if info.get("role") == "slave":
        await redis.connection_pool.disconnect(inuse_connections=False)
    return info


def _fullest(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the node that uses the largest fraction of its memory, and set the memory metrics."""
    node = max(nodes, key=_fill)
    REDIS_MEMORY_USED.set(int(node.get("used_memory", 0)))
    REDIS_MEMORY_MAX.set(int(node.get("maxmemory", 0)))
    return node


def _fullness(node: dict[str, Any]) -> str:
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
        return ["The server refuses INFO: its version, memory and persistence are unknown."]
    warnings = []
    if node["maxmemory_policy"] != "noeviction":
        warnings.append(f"maxmemory-policy is {node['maxmemory_policy']}: stored data may be evicted; set it to noeviction.")
    if not int(node["maxmemory"]):
        warnings.append("maxmemory is not set: the machine runs out of memory before the server refuses a write.")
    if not int(node["aof_enabled"]):
        warnings.append("appendonly is off: a restart of the server loses what was stored since the last snapshot.")
    if "err" in (node.get("aof_last_write_status"), node.get("rdb_last_bgsave_status")):
        warnings.append("The server's last write to its disk failed: it may refuse to store anything (MISCONF).")
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
