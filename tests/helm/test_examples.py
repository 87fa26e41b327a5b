"""Every example and some other sets of values render objects that Kubernetes accepts."""

from __future__ import annotations

from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from tests.helm.rendering import CHART, EXAMPLES, NAME, REQUIRED, RenderingFailed, merged, render, run_helm

# Kinds of others, which Kubernetes' own schemas do not know.
OTHERS = {"HTTPRoute", "PrometheusRule", "ScaledObject", "ServiceMonitor"}
CLUSTER_OBJECTS = {
    "ConfigMap",
    "Secret",
    "ServiceAccount",
    "Deployment",
    "Service",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "Pod",
}

EVERYTHING: dict[str, Any] = {
    **REQUIRED,
    "imagePullSecrets": [{"name": "registry"}],
    "autoscaling": {"enabled": True},
    "ingress": {
        "enabled": True,
        "hosts": ["a.example.com", "b.example.com"],
        "tls": [{"secretName": "tls", "hosts": ["a.example.com"]}],
    },
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
    "worker": {"enabled": True, "keda": {"enabled": True, "prometheus": "http://prometheus:9090"}},
    "sandbox": {"enabled": True, "isolation": "namespaces"},
    "telemetry": {"endpoint": "http://collector:4318"},
    "serviceMonitor": {"enabled": True},
    "ui": {"mode": "content", "actions": True},
    "networkPolicy": {"metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
    "prometheusRule": {"enabled": True},
    "dashboard": {"enabled": True},
    "apiKeys": {"existingSecret": "api-keys"},
    "mcpServers": {"docs": {"url": "https://docs.example.com/mcp", "authorization": "s3cret-token"}},
    "affinity": {"nodeAffinity": {}},
    "tolerations": [{"key": "llm", "operator": "Exists"}],
}
LEAST: dict[str, Any] = {
    **REQUIRED,
    "replicaCount": 1,
    "networkPolicy": {"enabled": False},
    "serviceAccount": {"create": False},
    "topologySpread": {"enabled": False},
    "settings": {"server": {"log_format": "human"}},
}
TRYOUT: dict[str, Any] = {"upstream": REQUIRED["upstream"], "tryout": {"enabled": True}}
REF = {"name": "mine", "key": "secret"}
KEYS_FILE = {"apiKeys": {"existingSecret": "keys"}}
SETS = {"required": REQUIRED, "everything": EVERYTHING, "least": LEAST, "tryout": TRYOUT}


def check(objects: list[dict[str, Any]]) -> None:
    for one in objects:
        if one["kind"] not in OTHERS:
            kubernetes_validate.validate(one, "1.31", strict=True)
        assert one["metadata"]["namespace"] == "llm", one["metadata"]["name"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_renders_valid_objects(example: Any) -> None:
    rendered = render(example)
    check(rendered.objects)
    assert {one["kind"] for one in rendered.objects} >= CLUSTER_OBJECTS - {"Secret"}


@pytest.mark.parametrize("values", SETS.values(), ids=SETS)
def test_each_set_of_values_renders_valid_objects(values: dict[str, Any]) -> None:
    check(render(values).objects)


def test_names_of_objects_are_unique_and_at_most_63_characters() -> None:
    rendered = render(EVERYTHING, {"fullnameOverride": "x" * 100})
    names = [(one["kind"], one["metadata"]["name"]) for one in rendered.objects]
    assert len(set(names)) == len(names)
    assert max(len(name) for _, name in names) <= 63


def test_routes_and_scaled_objects_have_the_members_that_their_controllers_require() -> None:
    rendered = render(EVERYTHING)
    [route] = rendered.kind("HTTPRoute")
    [rule] = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": NAME, "port": 80}]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    [scaled] = rendered.kind("ScaledObject")
    assert scaled["spec"]["scaleTargetRef"]["name"] == rendered("Deployment", "-worker")["metadata"]["name"]
    assert all(isinstance(value, str) for value in scaled["spec"]["triggers"][0]["metadata"].values())
    [rules] = rendered.kind("PrometheusRule")
    assert [group["name"] for group in rules["spec"]["groups"]] == ["responses-mw"]


@pytest.mark.parametrize("values", [*SETS.values(), *EXAMPLES], ids=[*SETS, *[path.stem for path in EXAMPLES]])
def test_helm_lint_reports_nothing(values: Any) -> None:
    given = values if isinstance(values, dict) else yaml.safe_load(values.read_text())
    run_helm(["lint", "--strict", str(CHART)], given)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"redis": REQUIRED["redis"]}, "upstream.url is required"),
        ({"upstream": REQUIRED["upstream"]}, "redis.url is required"),
        ({**REQUIRED, "existingSecret": "mine"}, "existingSecret replaces redis.url"),
        ({**REQUIRED, "secretRefs": {"redis": {"url": REF}}}, "secretRefs.redis.url replaces"),
        ({**REQUIRED, "secretRefs": {"upstream": {"url": REF}}}, "secretRefs.upstream"),
        ({**REQUIRED, **KEYS_FILE, "secretRefs": {"auth": {"api_keys": REF}}}, "apiKeys.existingSecret sets"),
        ({**REQUIRED, **KEYS_FILE, "secretSettings": {"auth": {"api_keys": "alice:sha256:0"}}}, "apiKeys.existingSecret sets"),
        ({**REQUIRED, "prompts": {"files": {"a.toml": ""}, "existingConfigMap": "mine"}}, "prompts.existingConfigMap replaces"),
        ({**REQUIRED, "tryout": {"enabled": True}}, "starts its own Valkey"),
        ({**TRYOUT, "replicaCount": 2}, "tryout.enabled supports only one replica"),
        ({**TRYOUT, "autoscaling": {"enabled": True}}, "tryout.enabled supports only one replica"),
        ({**TRYOUT, "worker": {"enabled": True}}, "tryout.enabled supports only one replica"),
        ({**REQUIRED, "ingress": {"enabled": True}}, "ingress.enabled needs ingress.hosts"),
        ({**REQUIRED, "httpRoute": {"enabled": True}}, "httpRoute.enabled needs httpRoute.parentRefs"),
        ({**REQUIRED, "worker": {"keda": {"enabled": True}}}, "worker.keda.enabled needs worker.enabled"),
        ({**REQUIRED, "worker": {"enabled": True, "keda": {"enabled": True}}}, "needs worker.keda.prometheus"),
        ({**REQUIRED, "autoscaling": {"enabled": True, "minReplicas": 20}}, "autoscaling.minReplicas must not exceed"),
        ({**REQUIRED, "sandbox": {"token": "t" * 16, "existingSecret": "mine"}}, "replaces sandbox.token"),
        ({**REQUIRED, "ui": {"token": "t" * 16, "existingSecret": "mine"}}, "replaces ui.token"),
        ({**REQUIRED, "ui": {"mode": "content", "token": "short"}}, "ui.token"),
        ({**REQUIRED, "settings": {"ui": {"mode": "content"}}}, "set ui.mode"),
        ({**REQUIRED, "secretSettings": {"ui": {"token": "t" * 16}}}, "set ui.mode"),
        ({**REQUIRED, "ui": {"mode": "content"}, "serviceMonitor": {"enabled": True}}, "needs networkPolicy.metricsFrom"),
        ({**REQUIRED, "redis": {"url": "unix:///run/redis.sock"}}, "pods cannot share a socket"),
        ({**REQUIRED, "redis": {"url": "localhost:6379"}}, "redis.url"),
        ({**REQUIRED, "upstream": {"url": "vllm:8000"}}, "upstream.url"),
        (merged([REQUIRED, {"upstream": {"headlessService": "vllm:8000"}}]), "headlessService replaces upstream.url"),
        ({**REQUIRED, "upstream": {"headlessService": "vllm"}}, "headlessService"),
        ({**REQUIRED, "upstreams": {"a": {}}}, "upstreams.a needs either url or headlessService"),
        ({**REQUIRED, "upstreams": {"a": {"url": "http://a", "api_key": "s3cret"}}}, "api_key"),
        ({**REQUIRED, "upstreams": {"a": {"url": "http://a", "apiKeySecret": REF}}}, "your callers need API keys too"),
        ({**REQUIRED, "settings": {"state": {"tttl": 1}}}, "tttl"),
        ({**REQUIRED, "settings": {"upstream": {"api_key": "s3cret"}}}, "api_key"),
        ({**REQUIRED, "settings": {"state": {"ttl": 0}}}, "settings.state.ttl"),
        ({**REQUIRED, "replicas": 3}, "replicas"),
        ({**REQUIRED, "secretKeys": ["short"]}, "secretKeys"),
        ({**REQUIRED, "adminPort": 8080}, "adminPort"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_values_that_cannot_work_are_refused_with_their_names(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RenderingFailed) as refused:
        render(values)
    assert message in str(refused.value)
