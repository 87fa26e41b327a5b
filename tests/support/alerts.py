"""Check that an alert of the chart fires, given the metrics before and after a failure."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from responses_mw.telemetry.instruments import REGISTRY
from tests.support.queries import FILES, alerts, asked_for

_MINUTES = 30
Samples = dict[str, tuple[str, float]]
"""The type and value of each series."""


def scrape() -> Samples:
    """Return the metrics of this process. Parsing the text that Prometheus scrapes would take 20 times as long."""
    found: Samples = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            labels = {"job": "responses-mw", "instance": "one", **sample.labels}
            shown = ", ".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
            found[f"{sample.name}{{{shown}}}"] = family.type, sample.value
    return found


def assert_fires(name: str, before: Samples, after: Samples) -> None:
    """Assert that the alert fires if the failure continues: counters grow every minute as they did, gauges stay changed.

    Without Prometheus' `promtool`, assert that the alert queries a metric that the failure changed.
    """
    [rule] = [rule for rule in alerts() if rule["alert"] == name]
    changed = {series.partition("{")[0] for series, value in after.items() if before.get(series) != value}
    assert any(metric in changed or f"{metric}_count" in changed for metric in asked_for(rule["expr"])), (name, changed)
    firing = f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) > bool 0'
    expected = [{"expr": firing, "eval_time": f"{_MINUTES}m", "exp_samples": [{"labels": "{}", "value": 1}]}]
    _check(f"{name} does not fire", before, after, expected)


def assert_silent(before: Samples, after: Samples) -> None:
    """Assert that no alert becomes pending if counters grow every minute as they did. Without `promtool`, do nothing."""
    pending = [{"expr": 'ALERTS{alertname!="ResponsesAbsent"}', "eval_time": f"{_MINUTES}m", "exp_samples": []}]
    _check("an alert fires", before, after, pending)


def _check(fault: str, before: Samples, after: Samples, expected: list[dict[str, Any]]) -> None:
    promtool = shutil.which("promtool", path=os.environ.get("PROMETHEUS")) or shutil.which("promtool")
    if promtool is None:
        return
    case = {"interval": "1m", "input_series": list(_series(before, after)), "promql_expr_test": expected}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test.yaml"  # JSON is YAML
        path.write_text(json.dumps({"rule_files": [str(FILES / "alerts.yaml")], "tests": [case]}))
        done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{fault}: {done.stdout}{done.stderr}"


def _series(before: Samples, after: Samples) -> Iterator[dict[str, str]]:
    for series, (kind, value) in after.items():
        step = value - before.get(series, ("", 0.0))[1] if kind in ("counter", "histogram") else 0.0
        yield {"series": series, "values": f"{value}{step:+}x{_MINUTES}"}
