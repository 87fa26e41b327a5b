"""Alerts, dashboard and scaling query only the metrics of their release, by the labels that the Prometheus operator sets."""

from __future__ import annotations

import json
from typing import Any

import promql_parser
import pytest

from tests.helm.rendering import NAME, REQUIRED, Rendered, render
from tests.support.queries import alerts, dashboard

WATCHED: dict[str, Any] = {
    **REQUIRED,
    "worker": {"enabled": True, "keda": {"enabled": True, "prometheus": "http://prometheus:9090"}},
    "serviceMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "dashboard": {"enabled": True},
}


def rules(rendered: Rendered) -> list[dict[str, Any]]:
    [group] = rendered.kind("PrometheusRule")[0]["spec"]["groups"]
    return group["rules"]  # type: ignore[no-any-return]


def dashboard_files(rendered: Rendered) -> dict[str, dict[str, Any]]:
    [found] = [one for one in rendered.kind("ConfigMap") if one["metadata"]["name"].endswith("-dashboard")]
    return {name: json.loads(text) for name, text in found["data"].items()}


def board(rendered: Rendered) -> dict[str, Any]:
    [found] = dashboard_files(rendered).values()
    return found


def queries(rendered: Rendered) -> list[str]:
    """Return all queries, including those of the dashboard's variables."""
    [scaled] = rendered.kind("ScaledObject")
    variables = [one["definition"] for one in board(rendered)["templating"]["list"] if "definition" in one]
    return [
        scaled["spec"]["triggers"][0]["metadata"]["query"],
        *[rule["expr"] for rule in rules(rendered)],
        *[target["expr"] for panel in board(rendered)["panels"] for target in panel.get("targets", [])],
        *[one.removeprefix("label_values(").rpartition(",")[0] for one in variables],
    ]


def selectors(query: str) -> list[promql_parser.VectorSelector]:
    found: list[promql_parser.VectorSelector] = []

    def visit(part: object) -> None:
        selector = getattr(part, "vector_selector", part)
        if isinstance(selector, promql_parser.VectorSelector):
            found.append(selector)

    promql_parser.walk(promql_parser.parse(query.replace("$__rate_interval", "5m")), visit)
    return found


@pytest.mark.parametrize("name", [NAME, "other"])
def test_every_query_selects_the_metrics_of_one_release(name: str) -> None:
    rendered = render(WATCHED, {"fullnameOverride": name})
    asked = [selector for query in queries(rendered) for selector in selectors(query)]
    assert len(asked) > 50
    for selector in asked:
        matched = {(one.name, str(one.op), one.value) for one in selector.matchers.matchers}
        assert {("namespace", "MatchOp.Equal", "llm"), ("service", "MatchOp.Equal", name + "-admin")} <= matched, selector
        assert "job" not in {label for label, _, _ in matched}
    assert all(service["metadata"]["name"] in {name, name + "-admin"} for service in rendered.kind("Service"))


def test_alerts_are_those_of_the_file_with_labels_of_the_release() -> None:
    found = rules(render(WATCHED))
    assert [rule["alert"] for rule in found] == [rule["alert"] for rule in alerts()]
    for rule, plain in zip(found, alerts(), strict=True):
        assert rule["labels"] == {**plain["labels"], "namespace": "llm", "release": "responses"}
        assert rule["annotations"] == plain["annotations"]


def test_alerts_link_to_a_runbook_only_if_its_url_is_set() -> None:
    page = "https://wiki.example.com/operations"
    found = rules(render(WATCHED, {"prometheusRule": {"runbookUrl": page}}))
    for rule, plain in zip(found, alerts(), strict=True):
        assert rule["annotations"] == {**plain["annotations"], "runbook_url": f"{page}#{rule['alert'].lower()}"}


def test_alerts_about_memory_compare_ratios() -> None:
    of_memory = [rule for rule in alerts() if "memory" in rule["expr"]]
    assert of_memory
    for rule in of_memory:
        comparison = promql_parser.parse(rule["expr"])
        assert isinstance(comparison, promql_parser.BinaryExpr)
        assert str(getattr(comparison.lhs, "op", None)) == "/", rule["alert"]


def test_dashboards_of_two_releases_have_different_ids() -> None:
    one, other = (render(WATCHED, {"fullnameOverride": name}) for name in ("one", "other"))
    assert not dashboard_files(one).keys() & dashboard_files(other).keys()
    assert len({board(one)["uid"], board(other)["uid"], dashboard()["uid"]}) == 3
    assert len(board(one)["uid"]) <= 40
    assert "$job" not in json.dumps(board(one))
