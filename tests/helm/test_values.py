"""No value is without effect, and the schema and the settings know the same names."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml

from tests.helm.rendering import CHART, merged, render
from tests.helm.test_examples import EVERYTHING
from tests.support.paths import ROOT

# Everything is on, and nothing is drawn at random.
BASE = merged([EVERYTHING, {"secretKeys": ["k" * 32], "sandbox": {"token": "t" * 16}}])
# Where it stands instead of another.
INSTEAD: dict[str, dict[str, Any]] = {
    "replicaCount": {"autoscaling": {"enabled": False}},
    "worker.enabled": {"worker": {"keda": {"enabled": False}}},
    "worker.replicaCount": {"worker": {"keda": {"enabled": False}}},
    "existingSecret": {"redis": {"url": ""}, "secretKeys": [], "mcpServers": None, "existingSecret": "mine"},
    "sandbox.existingSecret": {"sandbox": {"token": "", "existingSecret": "mine"}},
}
# What a value is changed to, where its type does not tell.
OTHER: dict[str, Any] = {
    "image.digest": "sha256:" + "a" * 64,
    "image.pullPolicy": "Always",
    "imagePullSecrets": [{"name": "other"}],
    "upstream.url": "http://other:8000",
    "redis.url": "redis://other:6379",
    "settings.server.log_format": "human",
    "secretSettings": {"upstream": {"api_key": "s3cret"}},
    "secretKeys": ["o" * 32],
    "mcpServers": {"other": {"url": "https://other.example.com"}},
    "connectors": {"other": {"url": "https://other.example.com"}},
    "service.type": "NodePort",
    "ingress.streaming": "alb",
    "ingress.hosts": ["other.example.com"],
    "httpRoute.parentRefs": [{"name": "other"}],
    "httpRoute.hostnames": ["other.example.com"],
    "worker.keda.prometheus": "http://other:9090",
    "sandbox.isolation": "restricted",
    "sandbox.token": "o" * 16,
    "sandbox.settings": {"max_containers": 3},
    "telemetry.endpoint": "http://other:4318",
    "telemetry.sampleRatio": 0.5,
    "telemetry.env": {"OTEL_LOG_LEVEL": "debug"},
    "serviceMonitor.interval": "10s",
    "networkPolicy.ingressFrom": [{"podSelector": {}}],
    "networkPolicy.metricsFrom": [{"podSelector": {}}],
    "networkPolicy.egress": [{"to": [{"podSelector": {}}]}],
    "networkPolicy.egressPorts": [443, 9999],
    "networkPolicy.egressTo": [{"podSelector": {}}],
    "tolerations": [{"key": "other", "operator": "Exists"}],
    "sandbox.tolerations": [{"key": "other", "operator": "Exists"}],
    "affinity": {"podAffinity": {}},
    "topologySpread.keys": ["kubernetes.io/hostname"],
    "topologySpread.whenUnsatisfiable": "DoNotSchedule",
    "extraVolumes": [{"name": "other", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "tmp", "mountPath": "/other"}],
    "autoscaling.minReplicas": 3,
    "autoscaling.targetCPU": "500m",
    "worker.keda.minReplicas": 3,
}


def leaves(values: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        path = before + name
        found += leaves(value, path + ".") if isinstance(value, dict) and value else [(path, value)]
    return found


def changed(path: str, value: Any) -> Any:
    if path in OTHER:
        return OTHER[path]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return "1" + value if "resources." in path else value + "other"
    return {"other": "other"}


def nested(path: str, value: Any) -> dict[str, Any]:
    name, _, rest = path.partition(".")
    return {name: nested(rest, value) if rest else value}


def value_paths() -> list[tuple[str, Any]]:
    return leaves(yaml.safe_load((CHART / "values.yaml").read_text()))


def effect(path: str, value: Any) -> bool:
    base = merged([BASE, INSTEAD.get(path, {})])
    current: Any = base
    for name in path.split("."):
        current = current.get(name, value) if isinstance(current, dict) else value
    before, after = render(base), render(merged([base, nested(path, changed(path, current))]))
    return before.objects != after.objects


def test_every_value_changes_what_is_rendered() -> None:
    paths = value_paths()
    with ThreadPoolExecutor(4) as pool:
        effects = list(pool.map(lambda leaf: effect(*leaf), paths))
    assert [path for (path, _), effective in zip(paths, effects, strict=True) if not effective] == []


def test_the_schema_knows_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"

    def known(part: dict[str, Any], before: str = "") -> set[str]:
        found: set[str] = set()
        for name, below in part.get("properties", {}).items():
            deeper = below.get("properties") and f"{before}{name}" not in {"settings", "secretSettings", "sandbox.settings"}
            found |= known(below, f"{before}{name}.") if deeper else {before + name}
        return found

    open_maps = {"settings", "resources", "worker.resources", "sandbox.resources", "dashboard.labels"}
    given = {next((whole for whole in open_maps if path.startswith(whole + ".")), path) for path, _ in value_paths()}
    assert known(schema) - {"global"} == given


@pytest.mark.parametrize("path", ["", "image", "worker", "worker.keda", "sandbox", "networkPolicy", "telemetry", "settings"])
def test_no_part_of_the_schema_takes_unknown_names(path: str) -> None:
    part = json.loads((CHART / "values.schema.json").read_text())
    for name in path.split(".") if path else []:
        part = part["properties"][name]
    assert part["additionalProperties"] is False


def test_the_schema_knows_the_settings_of_the_server_and_the_sandbox() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "chart-settings"), "--check"]
    done = subprocess.run(command, check=False, cwd=ROOT)
    assert done.returncode == 0, "run scripts/chart-settings"
