"""Queries of the dashboard and the alerts match the metrics that are exported."""

from __future__ import annotations

import re
import tomllib

import pytest

import responses_mw.telemetry.metrics  # noqa: F401 (registers the metrics)
from responses_mw.telemetry.instruments import REGISTRY
from tests.support.paths import ROOT
from tests.support.queries import EMITTED, OF_EVERY_TARGET, OF_PROMETHEUS, alerts, asked_for, dashboard, queries

QUERIES = list(queries())


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_a_query_asks_for_metrics_that_are_emitted_and_labels_that_they_have(where: str, query: str) -> None:
    offered = EMITTED | OF_PROMETHEUS
    for name, labels in asked_for(query).items():
        assert name in offered, where
        assert labels <= offered[name] | OF_EVERY_TARGET, where


def test_every_metric_of_ours_is_listed() -> None:
    suffixes = {"counter": "_total", "info": "_info"}
    names = {family.name + suffixes.get(family.type, "") for family in REGISTRY.collect()}
    of_the_process = {name for name in names if name.startswith("process_")}
    assert names - of_the_process == EMITTED.keys() - of_the_process


def test_what_an_operator_needs_to_know_is_all_on_the_dashboard() -> None:
    shown = {name for where, query in QUERIES if where.startswith("panel") for name in asked_for(query)}
    assert shown == EMITTED.keys() | OF_PROMETHEUS.keys()


def test_panels_have_a_place_and_a_number_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_can_be_asked_of_some_replicas_only() -> None:
    assert all(
        'job=~"$job"' in query and 'instance=~"$instance"' in query for where, query in QUERIES if where.startswith("panel")
    )


def test_alerts_look_at_our_job_only_and_say_how_grave_and_what() -> None:
    for rule in alerts():
        assert 'job="responses-mw"' in rule["expr"], rule["alert"]
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"]["summary"]


def test_an_alert_links_to_its_section_of_the_guide() -> None:
    page = (
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"] + "/blob/main/docs/operations.md"
    )
    for rule in alerts():
        assert rule["annotations"]["runbook_url"] == f"{page}#{rule['alert'].lower()}"


def test_the_guide_tells_of_every_alert_and_of_no_other_what_to_do() -> None:
    told = re.findall(r"^### (Responses\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert told == [rule["alert"] for rule in alerts()]
