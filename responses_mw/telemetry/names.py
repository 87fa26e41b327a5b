"""All instruments. Dashboards and alerts stand on their names: a test compares."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from .metrics import Counter, Gauge, Histogram, Instrument, KnownNames, Reading, UpDown

# The bounds that the conventions advise; a stream may take minutes, so ours go on.
_OPERATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68)
_TOKENS = tuple(4.0**power for power in range(14))
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REQUEST = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

OPERATION_DURATION = Histogram("gen_ai.client.operation.duration", "s", "Duration of a turn of the model.", _OPERATION)
TOKEN_USAGE = Histogram("gen_ai.client.token.usage", "{token}", "Tokens that a turn used.", _TOKENS)
TIME_TO_FIRST_TOKEN = Histogram("gen_ai.server.time_to_first_token", "s", "Time until a turn's answer begins.", _FIRST_TOKEN)
TIME_PER_OUTPUT_TOKEN = Histogram(
    "gen_ai.server.time_per_output_token", "s", "Time for each token after the first one.", _PER_TOKEN
)
REQUEST_DURATION = Histogram("http.server.request.duration", "s", "Duration of HTTP requests, streams included.", _REQUEST)
ACTIVE_REQUESTS = UpDown("http.server.active_requests", "{request}", "HTTP requests under way.")

QUEUE_DEPTH = Gauge("responses_mw.queue.depth", "{job}", "Background responses that wait for a worker, at all replicas.")
QUEUE_AGE = Gauge("responses_mw.queue.age", "s", "How long the oldest of these has waited.")
JOBS_RUNNING = UpDown("responses_mw.jobs.running", "{job}", "Background responses that this process runs.")
LEASES_LOST = Counter("responses_mw.leases.lost", "{lease}", "Background responses whose worker was lost or came too late.")
EVENTS_APPENDED = Counter("responses_mw.events.appended", "{event}", "Events written to the logs of background responses.")
CACHE_LOOKUPS = Counter("responses_mw.cache.lookups", "{lookup}", "Lookups in the cache, by result: exact, semantic, miss.")
STREAMS_OPEN = UpDown("responses_mw.streams.open", "{stream}", "Streams to clients that are open.")
STATE_ERRORS = Counter("responses_mw.state.errors", "{error}", "Round trips to Redis that failed.")
LIMITS_REFUSED = Counter("responses_mw.limits.refused", "{request}", "Requests refused with 429, by limit.")
LIMITS_UNCHECKED = Counter(
    "responses_mw.limits.unchecked", "{request}", "Requests let through because Redis could not tell whether they may pass."
)

MODELS = KnownNames(64)
"""Whoever asks names the model: only such as have answered are told apart."""


def _resident() -> float | None:
    """The memory that the process holds now, in bytes; None where the system does not tell."""
    if sys.platform != "linux":
        return None
    import resource

    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


INSTRUMENTS: tuple[Instrument, ...] = (
    OPERATION_DURATION,
    TOKEN_USAGE,
    TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    REQUEST_DURATION,
    ACTIVE_REQUESTS,
    QUEUE_DEPTH,
    QUEUE_AGE,
    JOBS_RUNNING,
    LEASES_LOST,
    EVENTS_APPENDED,
    CACHE_LOOKUPS,
    STREAMS_OPEN,
    STATE_ERRORS,
    LIMITS_REFUSED,
    LIMITS_UNCHECKED,
    Reading("process.cpu", "s", "Processor time of this process.", "counter", time.process_time),
    Reading("process.resident_memory", "By", "Memory that this process holds.", "gauge", _resident),
)
