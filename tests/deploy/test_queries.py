"""Queries of the dashboard and the alerts match the metrics that are exported."""

from __future__ import annotations

import re

import pytest

import responses_mw.telemetry.metrics  # noqa: F401 (registers the metrics)
from responses_mw.telemetry.instruments import REGISTRY
from tests.support.paths import ROOT
from tests.support.queries import EMITTED, OF_EVERY_TARGET, OF_PROMETHEUS, alerts, asked_for, dashboard, queries

QUERIES = list(queries())


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_queries_use_existing_metrics_and_labels(where: str, query: str) -> None:
    offered = EMITTED | OF_PROMETHEUS
    for name, labels in asked_for(query).items():
        assert name in offered, where
        assert labels <= offered[name] | OF_EVERY_TARGET, where


def test_the_list_of_metrics_is_complete() -> None:
    suffixes = {"counter": "_total", "info": "_info"}
    names = {family.name + suffixes.get(family.type, "") for family in REGISTRY.collect()}
    of_the_process = {name for name in names if name.startswith("process_")}
    assert names - of_the_process == EMITTED.keys() - of_the_process


def test_the_dashboard_shows_every_metric() -> None:
    shown = {name for where, query in QUERIES if where.startswith("panel") for name in asked_for(query)}
    assert shown == EMITTED.keys() | OF_PROMETHEUS.keys()


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_can_be_limited_to_some_replicas() -> None:
    assert all(
        'job=~"$job"' in query and 'instance=~"$instance"' in query for where, query in QUERIES if where.startswith("panel")
    )


def test_alerts_select_our_job_and_have_a_severity_and_a_summary() -> None:
    for rule in alerts():
        assert 'job="responses-mw"' in rule["expr"], rule["alert"]
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"]["summary"]


def test_an_alert_says_what_to_do_without_linking_to_a_page() -> None:
    for rule in alerts():
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]
        assert len(re.findall(r"\.(?: |$)", rule["annotations"]["description"])) in (2, 3, 4), rule["alert"]


def test_the_guide_describes_exactly_the_existing_alerts() -> None:
    told = re.findall(r"^### (Responses\w+)$", (ROOT / "docs" / "operation" / "operations.md").read_text(), re.MULTILINE)
    assert told == [rule["alert"] for rule in alerts()]
