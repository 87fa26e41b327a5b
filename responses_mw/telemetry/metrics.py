"""Define all metrics, and count the usage of each owner."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import prometheus_client as prometheus

from ..errors import Cause
from ..version import VERSION
from .conventions import DB, ERROR_TYPE, HTTP, SERVER_ADDRESS, SERVER_PORT, GenAI, GenAIMetric, Own
from .instruments import OTHER, REGISTRY, Counter, Gauge, Histogram, KnownNames, UpDownCounter

# -- model ---------------------------------------------------------------------------------------------------------------

# The buckets recommended by the conventions, with further buckets for streams that last minutes.
_OPERATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68)
_FIRST_CHUNK = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REQUEST = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_ROUND_TRIP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

CAUSE = "cause"
"""The label of failures that says who caused them (`errors.Cause`). Successes do not have it."""
STATUSES = ("completed", "incomplete", "failed", "cancelled")
UNSTORED_REASONS = ("redis_full", "redis_unavailable", "damaged", "quota", "size")

_TURN = (GenAI.OPERATION, GenAI.PROVIDER, GenAI.MODEL, SERVER_ADDRESS, SERVER_PORT)
_USAGE: dict[str, tuple[str, ...]] = dict.fromkeys((*_TURN, GenAI.MODALITY), ())

INFERENCE_DURATION = Histogram(
    GenAIMetric.DURATION, "s", "Duration of a turn of the model.", (*_TURN, ERROR_TYPE, CAUSE), _OPERATION
)
INPUT_TOKENS = Counter(GenAIMetric.INPUT_TOKENS, "{token}", "Input tokens of turns, including cached ones.", _USAGE)
CACHED_TOKENS = Counter(GenAIMetric.CACHED_TOKENS, "{token}", "Input tokens that the upstream had cached.", _USAGE)
OUTPUT_TOKENS = Counter(GenAIMetric.OUTPUT_TOKENS, "{token}", "Output tokens of turns, including reasoning.", _USAGE)
REASONING_TOKENS = Counter(GenAIMetric.REASONING_TOKENS, "{token}", "Output tokens of reasoning.", _USAGE)
TIME_TO_FIRST_CHUNK = Histogram(
    GenAIMetric.TIME_TO_FIRST_CHUNK, "s", "Time until the answer of a streamed turn begins.", _TURN, _FIRST_CHUNK
)
# The conventions' metric records a value for each chunk. Recording it would cost as much as sending the chunk.
TIME_PER_OUTPUT_TOKEN = Histogram(
    "responses_mw.time_per_output_token", "s", "Mean time per output token of a turn, without the first.", _TURN, _PER_TOKEN
)
MODELS = KnownNames(listed=64, unlisted=16)
"""The model names that may be label values: those in the upstream's list, and others that have answered.

Clients can send any name, and some servers answer to any.
"""

TURNS_ACTIVE = UpDownCounter(
    "responses_mw.upstream.active_requests", "{request}", "Turns of the model in progress at the upstream."
)
UPSTREAM_MEMBERS = ("annotations", "audio", "images", "function_call", "provider_specific_fields", "reasoning_details")
"""The dropped members that are label values. Others are counted together, because upstreams choose the names."""
DROPPED_MEMBERS = Counter(
    "responses_mw.upstream.dropped_members",
    "{member}",
    "Members of the upstream's messages that responses lack, once for each response, by member.",
    {"member": [*UPSTREAM_MEMBERS, OTHER]},
)
UPSTREAM_UP = Gauge(
    "responses_mw.upstream.up", "1", "Whether the upstream answered when it was last asked for its models.", ("upstream",)
)

EndpointOutcome: TypeAlias = Literal["success", "client_error", "overloaded", "server_error", "failed", "cancelled"]
Affinity: TypeAlias = Literal["hit", "moved", "none"]

# `telemetry.endpoints` creates and removes the series of endpoints.
_ENDPOINT: dict[str, tuple[str, ...]] = {"upstream": (), "endpoint": ()}

ENDPOINT_REQUESTS = Counter(
    "responses_mw.upstream.requests",
    "{request}",
    "Requests to endpoints, including checks and attempts that were repeated elsewhere, by outcome.",
    {**_ENDPOINT, "outcome": ()},
)
ENDPOINTS_ACTIVE = UpDownCounter(
    "responses_mw.upstream.endpoint.active_requests", "{request}", "Requests in flight at endpoints.", tuple(_ENDPOINT)
)
ENDPOINTS_EJECTED = UpDownCounter(
    "responses_mw.upstream.endpoint.ejected", "1", "Whether an endpoint is left out because it failed.", tuple(_ENDPOINT)
)
UPSTREAM_EJECTIONS = Counter(
    "responses_mw.upstream.ejections", "{ejection}", "Failures after which an endpoint was left out.", _ENDPOINT
)
FAIL_OVERS = Counter(
    "responses_mw.upstream.failovers",
    "{request}",
    "Requests sent to another endpoint or to a fallback, because no answer had begun.",
    {"upstream": (), "to": ()},
)
AFFINITY = Counter(
    "responses_mw.upstream.affinity",
    "{turn}",
    "Turns sent to one of several endpoints, by whether it is the one that the session prefers.",
    {"upstream": (), "result": ()},
)
TOOL_DURATION = Histogram(
    GenAIMetric.TOOL_DURATION,
    "s",
    "Duration of calls of server-side tools, by kind of tool and configured MCP server.",
    (Own.TOOL_KIND, Own.TOOL_SERVER, ERROR_TYPE),
    _OPERATION,
)

EMBEDDING_DURATION = Histogram(
    GenAIMetric.OPERATION_DURATION,
    "s",
    "Duration of requests for embeddings.",
    (GenAI.OPERATION, GenAI.MODEL, ERROR_TYPE),
    _OPERATION,
)

# -- requests ------------------------------------------------------------------------------------------------------------

_HTTP = (HTTP.METHOD, HTTP.SCHEME)
_KINDS = ["json", "stream", "websocket", "background"]
_LIMITS = ["requests", "streams", "background", "storage"]

REQUEST_DURATION = Histogram(
    HTTP.SERVER_DURATION,
    "s",
    "Duration of HTTP requests, including streams.",
    (*_HTTP, HTTP.STATUS, HTTP.ROUTE, ERROR_TYPE, CAUSE),
    _REQUEST,
)
ACTIVE_REQUESTS = UpDownCounter(HTTP.SERVER_ACTIVE, "{request}", "HTTP requests in progress.", _HTTP)
STREAMS_OPEN = UpDownCounter("responses_mw.streams.open", "{stream}", "Open streams to clients.")
WEBSOCKETS_OPEN = UpDownCounter("responses_mw.websockets.open", "{connection}", "Open WebSockets.")
LIMITS_REFUSED = Counter(
    "responses_mw.limits.refused",
    "{request}",
    "Requests and connections that a limit refused or closed, by limit.",
    {"limit": [*_LIMITS, "memory", "connections", "waiting", "descriptors"]},
)
LIMITS_UNCHECKED = Counter(
    "responses_mw.limits.unchecked",
    "{request}",
    "Requests accepted unchecked because Redis was unavailable, by limit.",
    {"limit": _LIMITS},
)
CACHE_MISSES = Counter(
    "responses_mw.cache.misses",
    "{request}",
    "Requests without a cached answer, by reason.",
    {"reason": ["not_found", "below_threshold", "embedding_failed", "failed"]},
)
UPSTREAM_WAITS = Counter(
    "responses_mw.upstream.waits",
    "{wait}",
    "Waits for an overloaded or unreachable upstream, by status (502 or 504 if it is unreachable).",
    {"status": ["429", "502", "503", "504"]},
)
CACHE_LOOKUPS = Counter(
    "responses_mw.cache.lookups", "{lookup}", "Cache lookups, by result.", {"result": ["exact", "alias", "semantic", "miss"]}
)
CACHE_JUDGED = Counter(
    "responses_mw.cache.judged",
    "{judgement}",
    "Requests to the judge of near matches, by verdict.",
    {"verdict": ["approved", "refused", "failed"]},
)
CACHE_ALIASES = Counter("responses_mw.cache.aliases", "{alias}", "Phrasings that became aliases of a cached answer.")
CACHE_RACES = Counter(
    "responses_mw.cache.races",
    "{race}",
    "Races of the judge against the upstream, by whether the judge approved a cached answer first.",
    {"result": ["won", "lost"]},
)
CACHE_JUDGE_TOKENS = Counter("responses_mw.cache.judge.tokens", "{token}", "Tokens that the judge used.")
CACHE_TOKENS_SAVED = Counter("responses_mw.cache.saved.tokens", "{token}", "Tokens of the answers from the cache.")
CACHE_AUDIT = Counter(
    "responses_mw.cache.audit",
    "{hit}",
    "Hits that were also answered by the upstream, by whether the judge found both answers to say the same.",
    {"verdict": ["same", "different", "failed"]},
)

# -- background responses and state --------------------------------------------------------------------------------------

QUEUE_DEPTH = Gauge("responses_mw.queue.depth", "{job}", "Background responses waiting for a worker, in the whole deployment.")
QUEUE_AGE = Gauge("responses_mw.queue.age", "s", "Time that the oldest waiting background response has waited.")
JOBS_RUNNING = UpDownCounter("responses_mw.jobs.running", "{job}", "Background responses running in this process.")
LEASES_LOST = Counter("responses_mw.leases.lost", "{lease}", "Background responses whose worker lost its lease.")
JOBS_RETRIED = Counter(
    "responses_mw.jobs.retried",
    "{job}",
    "Background responses returned to the queue after an error of the upstream, by reason.",
    {"reason": ["unreachable", "broken", "429", "502", "503", "504"]},
)
CONTINUATIONS = Counter(
    "responses_mw.continuations",
    "{continuation}",
    "Turns continued after an interruption, by reason and by what the client had seen.",
    {"reason": ["broken", "timeout", "worker"], "phase": ["nothing", "reasoning", "text", "call"]},
)
CONTINUATION_PAUSE = Histogram(
    "responses_mw.continuation.pause",
    "s",
    "Time from an interruption at the upstream until another answer to the turn began.",
    (),
    _REQUEST,
)
INGESTIONS = Counter(
    "responses_mw.ingestions",
    "{file}",
    "Files that were added to vector stores, could not be, or wait for a retry, by status and cause of a failure.",
    {"status": ["completed", "failed", "retried"], CAUSE: [""]},
)
for _cause in get_args(Cause):
    INGESTIONS.add(0, {"status": "failed", CAUSE: _cause})
INGESTION_DURATION = Histogram(
    "responses_mw.ingestion.duration", "s", "Time in which a worker adds a file to a vector store.", ("status",), _REQUEST
)
INGESTION_CHUNKS = Counter("responses_mw.ingestion.chunks", "{chunk}", "Chunks of files that were added to vector stores.")
INGESTIONS_RUNNING = UpDownCounter(
    "responses_mw.ingestions.running", "{file}", "Files that this process is adding to vector stores."
)
INGESTION_QUEUE_DEPTH = Gauge(
    "responses_mw.ingestion.queue.depth", "{file}", "Files waiting to be added to vector stores, in the whole deployment."
)
INGESTION_QUEUE_AGE = Gauge("responses_mw.ingestion.queue.age", "s", "Time that the oldest of these files has waited.")
EVENTS_APPENDED = Counter("responses_mw.events.appended", "{event}", "Events appended to logs of background responses.")
RESPONSES = Counter(
    "responses_mw.responses",
    "{response}",
    "Responses that ended, by status, kind of request and cause of a failure.",
    {"status": STATUSES, "kind": _KINDS, CAUSE: [""]},
)
for _kind, _cause in product(_KINDS, get_args(Cause)):
    RESPONSES.add(0, {"status": "failed", "kind": _kind, CAUSE: _cause})
UNSTORED = Counter(
    "responses_mw.responses.unstored",
    "{response}",
    "Responses that were answered but could not be stored, by reason.",
    {"reason": UNSTORED_REASONS},
)
REDIS_MEMORY_USED = Gauge("responses_mw.redis.memory.used", "By", "Memory used by Redis; in a cluster, by the fullest primary.")
REDIS_MEMORY_MAX = Gauge("responses_mw.redis.memory.max", "By", "Maximum memory of Redis (maxmemory); 0 if there is no limit.")
REDIS_DURATION = Histogram(
    DB.DURATION,
    "s",
    "Duration of round trips to Redis, including the wait for a connection.",
    (DB.SYSTEM, DB.OPERATION, ERROR_TYPE),
    _ROUND_TRIP,
)
STATE_ERRORS = Counter(
    "responses_mw.state.errors",
    "{error}",
    "Failed round trips to Redis, by class of error.",
    {ERROR_TYPE: ["ConnectionError", "TimeoutError", "Damaged"]},
)

# -- process -------------------------------------------------------------------------------------------------------------

EVENT_LOOP_LAG = Histogram(
    "responses_mw.event_loop.lag", "s", "Delay of scheduled callbacks in the event loop, sampled.", (), _ROUND_TRIP
)

# -- process, only for Prometheus: OpenTelemetry has resource attributes for this ----------------------------------------


def memory_limit(groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the maximum memory of this process in bytes. `groups` is the directory where the control groups are mounted."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else inf
    files = (groups / "memory.max", groups / "memory" / "memory.limit_in_bytes")  # control groups, version 2 and 1
    texts = [file.read_text().strip() for file in files if file.exists()]
    return min([machine, *[int(text) for text in texts if text.isdigit()]])  # "max" means no limit


prometheus.ProcessCollector(registry=REGISTRY)
prometheus.Gauge(
    "responses_mw_memory_limit_bytes", "Memory that this process may use.", registry=REGISTRY, multiprocess_mode="livemax"
).set(memory_limit())
prometheus.Info("responses_mw_build", "Version of responses-mw and of Python.", registry=REGISTRY).info(
    {"version": VERSION, "python_version": platform.python_version()}
)

# -- usage by owner: there are too many owners for labels ----------------------------------------------------------------

MAX_OWNERS = 10_000  # maximum number of owners whose usage is counted separately. Further owners are counted as `OTHERS`
MAX_MODELS = 32  # maximum number of models of an owner that are counted separately. Further models are counted as `OTHERS`
MAX_ROWS = 2 * MAX_OWNERS  # maximum number of models of all owners together
OTHERS = "_OTHER"
_MODEL_NAME = re.compile(r"[!-~]{1,128}")


@dataclass(slots=True)
class ModelUsage:
    """The number of responses, and their tokens. Responses from the cache add no tokens.

    `requests_without_usage` is the number of responses whose tokens the upstream did not report.
    """

    responses: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requests_without_usage: int = 0


@dataclass(slots=True)
class OwnerUsage(ModelUsage):
    """The usage of an owner, in total and by model."""

    models: dict[str, ModelUsage] = field(default_factory=dict)


class UsageMeter:
    """Counts usage by owner and model for the whole process."""

    def __init__(self) -> None:
        self._owners: dict[str, OwnerUsage] = {}
        self._rows = 0

    def count(self, owner: str, model: str, usage: Mapping[str, Any] | None) -> None:
        """Add one response with this `usage` to the counts of `owner` and `model`. None means that the usage is unknown."""
        if owner not in self._owners and len(self._owners) >= MAX_OWNERS:
            owner = OTHERS
        used = self._owners.setdefault(owner, OwnerUsage())
        is_full = len(used.models) >= MAX_MODELS or self._rows >= MAX_ROWS
        if model not in used.models and (is_full or not _MODEL_NAME.fullmatch(model)):
            model = OTHERS
        if model not in used.models:
            used.models[model] = ModelUsage()
            self._rows += 1
        for counts in (used, used.models[model]):
            _add(counts, usage)

    def take(self, maximum: int = MAX_ROWS) -> dict[str, OwnerUsage]:
        """Remove and return the counts of at least one owner, and of further ones until `maximum` models are exceeded."""
        taken: dict[str, OwnerUsage] = {}
        size = 0
        while self._owners and size < maximum:
            owner = next(iter(self._owners))
            taken[owner] = self._owners.pop(owner)
            size += len(taken[owner].models)
        self._rows -= size
        return taken


def _add(counts: ModelUsage, usage: Mapping[str, Any] | None) -> None:
    counts.responses += 1
    if usage is None:
        counts.requests_without_usage += 1
        return
    counts.input_tokens += usage.get("input_tokens", 0)
    counts.output_tokens += usage.get("output_tokens", 0)
    counts.cached_tokens += (usage.get("input_tokens_details") or {}).get("cached_tokens", 0)


USAGE = UsageMeter()
