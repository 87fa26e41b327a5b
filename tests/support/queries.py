"""The metrics and labels queried by the dashboard, the alerts and the queue-based scaling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import promql_parser
import yaml

from tests.support.paths import ROOT

FILES = ROOT / "helm" / "responses-mw" / "files"
SCALING = ROOT / "helm" / "responses-mw" / "templates" / "worker-scaledobject.yaml"

# Metrics of `/metrics`, with the labels that queries may use. Histograms are listed by their bare name.
EMITTED: dict[str, set[str]] = {
    "gen_ai_client_inference_duration_seconds": {"error_type", "cause", "gen_ai_request_model"},
    "gen_ai_client_inference_usage_input_tokens_total": {"gen_ai_request_model"},
    "gen_ai_client_inference_usage_cache_read_input_tokens_total": {"gen_ai_request_model"},
    "gen_ai_client_inference_usage_output_tokens_total": {"gen_ai_request_model"},
    "gen_ai_client_inference_usage_reasoning_output_tokens_total": {"gen_ai_request_model"},
    "gen_ai_client_inference_time_to_first_chunk_seconds": {"gen_ai_request_model"},
    "responses_mw_time_per_output_token_seconds": {"gen_ai_request_model"},
    "http_server_request_duration_seconds": {"http_response_status_code", "cause"},
    "http_server_active_requests": set(),
    "responses_mw_queue_depth": set(),
    "responses_mw_queue_age_seconds": set(),
    "responses_mw_leases_lost_total": set(),
    "responses_mw_ingestions_total": {"status", "cause"},
    "responses_mw_ingestions_running": set(),
    "responses_mw_ingestion_chunks_total": set(),
    "responses_mw_ingestion_duration_seconds": set(),
    "responses_mw_ingestion_queue_depth": set(),
    "responses_mw_ingestion_queue_age_seconds": set(),
    "responses_mw_jobs_retried_total": {"reason"},
    "responses_mw_upstream_waits_total": {"status"},
    "responses_mw_upstream_dropped_members_total": {"member"},
    "responses_mw_continuation_pause_seconds": set(),
    "responses_mw_continuations_total": {"reason", "phase"},
    "responses_mw_events_appended_total": set(),
    "responses_mw_cache_aliases_total": set(),
    "responses_mw_cache_audit_total": {"verdict"},
    "responses_mw_cache_judge_tokens_total": set(),
    "responses_mw_cache_judged_total": {"verdict"},
    "responses_mw_cache_lookups_total": {"result"},
    "responses_mw_cache_misses_total": {"reason"},
    "responses_mw_cache_races_total": {"result"},
    "responses_mw_cache_saved_tokens_total": set(),
    "responses_mw_streams_open": set(),
    "responses_mw_state_errors_total": {"error_type"},
    "responses_mw_responses_total": {"status", "kind", "cause"},
    "responses_mw_responses_unstored_total": {"reason"},
    "responses_mw_jobs_running": set(),
    "responses_mw_limits_refused_total": {"limit"},
    "responses_mw_limits_unchecked_total": set(),
    "responses_mw_websockets_open": set(),
    "responses_mw_upstream_active_requests": set(),
    "responses_mw_upstream_up": {"upstream"},
    "responses_mw_upstream_requests_total": {"upstream", "endpoint", "outcome"},
    "responses_mw_upstream_endpoint_active_requests": {"upstream", "endpoint"},
    "responses_mw_upstream_endpoint_ejected": {"upstream", "endpoint"},
    "responses_mw_upstream_ejections_total": {"upstream", "endpoint"},
    "responses_mw_upstream_failovers_total": {"upstream", "to"},
    "responses_mw_upstream_affinity_total": {"upstream", "result"},
    "gen_ai_execute_tool_duration_seconds": {"responses_mw_tool_kind", "responses_mw_tool_server", "error_type"},
    "gen_ai_client_operation_duration_seconds": {"gen_ai_request_model", "error_type"},
    "responses_mw_redis_memory_used_bytes": set(),
    "responses_mw_redis_memory_max_bytes": set(),
    "db_client_operation_duration_seconds": {"db_operation_name"},
    "responses_mw_event_loop_lag_seconds": set(),
    "responses_mw_build_info": {"version"},
    "responses_mw_memory_limit_bytes": set(),
    "process_cpu_seconds_total": set(),
    "process_resident_memory_bytes": set(),
    "process_open_fds": set(),
    "process_max_fds": set(),
}
# Metrics that Prometheus adds.
OF_PROMETHEUS = {"up": {"job", "instance"}}
OF_EVERY_TARGET = {"job", "instance", "namespace", "service"}


def dashboard() -> dict[str, Any]:
    return json.loads((FILES / "dashboard.json").read_text())  # type: ignore[no-any-return]


@cache
def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Yield the place of each query, and the query as Prometheus receives it."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield f"panel {panel['title']}", target["expr"].replace("$__rate_interval", "5m")
    for rule in alerts():
        yield f"alert {rule['alert']}", rule["expr"]
    [line] = [line for line in SCALING.read_text().splitlines() if line.strip().startswith("query:")]
    yield (
        "scaling",
        line.partition("query:")[2].replace('{{- include "responses-mw.metrics" . -}}', 'namespace="n", service="s"'),
    )


def asked_for(query: str) -> dict[str, set[str]]:
    """Return the metrics of a query with the labels used, including those that the metric is grouped by."""
    metrics: dict[str, set[str]] = {}

    def add(part: object, labels: set[str]) -> None:
        selector = getattr(part, "vector_selector", part)
        if isinstance(selector, promql_parser.VectorSelector):
            metrics.setdefault(bare(str(selector.name)), set()).update(labels)
            metrics[bare(str(selector.name))].update(one.name for one in selector.matchers.matchers)

    def visit(part: object) -> None:
        add(part, set())
        modifier = getattr(part, "modifier", None)
        if isinstance(part, promql_parser.AggregateExpr) and modifier is not None:
            promql_parser.walk(part.expr, lambda inner: add(inner, set(modifier.labels) - {"le"}))

    promql_parser.walk(promql_parser.parse(query), visit)
    return metrics


def bare(name: str) -> str:
    """Return the name without a histogram's suffix."""
    for suffix in ("_bucket", "_count", "_sum"):
        if name.removesuffix(suffix) in EMITTED:
            return name.removesuffix(suffix)
    return name
