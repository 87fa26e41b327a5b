"""Every value has an effect, and the schema and the settings have the same names."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.helm.rendering import CHART, merged, render, render_all
from tests.helm.test_examples import EVERYTHING, LEAST

# Everything but the dashboard, which takes time, is on, and nothing is drawn at random.
BASE = merged(
    [
        EVERYTHING,
        {"dashboard": {"enabled": False}, "secretKeys": ["k" * 32], "sandbox": {"token": "t" * 16}, "ui": {"token": "t" * 16}},
    ]
)
# Where it stands instead of another.
ALONE: dict[str, Any] = {
    "replicaCount": 1,
    "autoscaling": {"enabled": False},
    "worker": {"enabled": False, "keda": {"enabled": False}},
}
REF = {"name": "mine", "key": "url"}
INSTEAD: dict[str, dict[str, Any]] = {
    "upstream.headlessService": {"upstream": {"url": "", "headlessService": "vllm:8000"}},
    "worker.enabled": {"worker": {"keda": {"enabled": False}}},
    "worker.replicaCount": {"worker": {"keda": {"enabled": False}}},
    "replicaCount": {"autoscaling": {"enabled": False}},
    "existingSecret": {"redis": {"url": ""}, "secretKeys": [], "mcpServers": None, "existingSecret": "mine"},
    "prompts.existingConfigMap": {"prompts": {"files": None, "existingConfigMap": "mine"}},
    "dashboard.labels.grafana_dashboard": {"dashboard": {"enabled": True}},
    "tryout.image": {"tryout": {"enabled": True}, "redis": {"url": ""}, **ALONE},
    "sandbox.existingSecret": {"sandbox": {"token": "", "existingSecret": "mine"}},
    "ui.existingSecret": {"ui": {"token": "", "existingSecret": "mine"}},
}
# What a value is changed to, where its type does not tell.
OTHER: dict[str, Any] = {
    "replicaCount": 3,
    "secretRefs": {"upstream": {"api_key": REF}},
    "prompts.files": {"other.toml": "instructions = 'Be brief.'"},
    "readiness.require": ["redis"],
    "ingress.paths": ["/other"],
    "ingress.pathType": "Exact",
    "ingress.tls": [{"secretName": "other"}],
    "httpRoute.paths": ["/other"],
    "httpRoute.filters": [{"type": "RequestMirror"}],
    "securityContext.capabilities.drop": ["KILL"],
    "extraEnv": [{"name": "OTHER", "value": "other"}],
    "extraEnvFrom": [{"secretRef": {"name": "other"}}],
    "initContainers": [{"name": "other", "image": "other"}],
    "sidecars": [{"name": "other", "image": "other"}],
    "image.digest": "sha256:" + "a" * 64,
    "image.pullPolicy": "Always",
    "imagePullSecrets": [{"name": "other"}],
    "upstream.url": "http://other:8000",
    "upstream.headlessService": "other:8000",
    "upstreams": {"other": {"url": "http://other:8000"}},
    "redis.url": "redis://other:6379",
    "settings.server.log_format": "human",
    "secretSettings": {"upstream": {"api_key": "s3cret"}},
    "secretKeys": ["o" * 32],
    "mcpServers": {"other": {"url": "https://other.example.com"}},
    "service.type": "NodePort",
    "listenHost": "::",
    "ingress.streaming": "alb",
    "ingress.hosts": ["other.example.com"],
    "httpRoute.parentRefs": [{"name": "other"}],
    "httpRoute.hostnames": ["other.example.com"],
    "worker.keda.prometheus": "http://other:9090",
    "sandbox.isolation": "restricted",
    "sandbox.token": "o" * 16,
    "ui.mode": "metadata",
    "ui.token": "o" * 16,
    "sandbox.settings": {"max_containers": 3},
    "telemetry.endpoint": "http://other:4318",
    "telemetry.sampleRatio": 0.5,
    "telemetry.env": {"OTEL_LOG_LEVEL": "debug"},
    "serviceMonitor.interval": "10s",
    "networkPolicy.ingressFrom": [{"podSelector": {}}],
    "networkPolicy.metricsFrom": [{"podSelector": {}}],
    "networkPolicy.uiFrom": [{"podSelector": {}}],
    "networkPolicy.egress": [{"to": [{"podSelector": {}}]}],
    "networkPolicy.egressPorts": [443, 9999],
    "networkPolicy.egressTo": [{"podSelector": {}}],
    "networkPolicy.dnsTo": [{"podSelector": {}}],
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


def with_another(path: str, value: Any) -> dict[str, Any]:
    base = base_of(path)
    current: Any = base
    for name in path.split("."):
        current = current.get(name, value) if isinstance(current, dict) else value
    return merged([base, nested(path, changed(path, current))])


def base_of(path: str) -> dict[str, Any]:
    return merged([BASE, INSTEAD.get(path, {})])


def test_every_value_changes_the_rendered_objects() -> None:
    leaves = [leaf for leaf in value_paths() if leaf[0] != "tryout.enabled"]  # which needs the absence of others
    bases = ["", *INSTEAD]
    rendered = render_all([*map(base_of, bases), *[with_another(path, value) for path, value in leaves]])
    before = dict(zip(bases, rendered, strict=False))
    after = {path: one for (path, _), one in zip(leaves, rendered[len(bases) :], strict=True)}
    assert [path for path, one in after.items() if one.objects == before.get(path, before[""]).objects] == []


def test_values_rendered_together_give_the_same_objects_as_alone() -> None:
    assert render_all([LEAST, BASE])[1].objects == render(BASE).objects


def test_the_schema_describes_exactly_the_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"

    written = {"settings", "secretSettings", "secretRefs", "upstreams", "sandbox.settings"}  # by scripts/settings

    def known(part: dict[str, Any], before: str = "") -> set[str]:
        found: set[str] = set()
        for name, below in part.get("properties", {}).items():
            deeper = below.get("properties") and f"{before}{name}" not in written
            found |= known(below, f"{before}{name}.") if deeper else {before + name}
        return found

    open_maps = {
        "settings",
        "podSecurityContext",
        "securityContext",
        "resources",
        "worker.resources",
        "sandbox.resources",
        "dashboard.labels",
    }
    given = {next((whole for whole in open_maps if path.startswith(whole + ".")), path) for path, _ in value_paths()}
    given = {re.sub(r"^(probes\.\w+)\..*", r"\1", path) for path in given}
    assert known(schema) - {"global"} == given


@pytest.mark.parametrize("path", ["", "image", "worker", "worker.keda", "sandbox", "networkPolicy", "telemetry", "settings"])
def test_no_object_in_the_schema_accepts_unknown_names(path: str) -> None:
    part = json.loads((CHART / "values.schema.json").read_text())
    for name in path.split(".") if path else []:
        part = part["properties"][name]
    assert part["additionalProperties"] is False
