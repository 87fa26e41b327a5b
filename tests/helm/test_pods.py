"""Labels, containers and other parts that operators add to pods and objects."""

from __future__ import annotations

from typing import Any

import yaml

from responses_mw.asgi.prompt_templates import Prompts
from tests.helm.rendering import CHART, NAME, REQUIRED, Rendered, render
from tests.helm.test_examples import EVERYTHING, REF, TRYOUT

WORKERS: dict[str, Any] = {**REQUIRED, "worker": {"enabled": True}}


def pods(rendered: Rendered) -> list[dict[str, Any]]:
    """Return the specifications of the proxy's and the worker's pod."""
    return [rendered.pods()[name]["spec"] for name in ("proxy", "worker")]


def test_common_labels_and_annotations_are_on_every_object_and_pod_and_in_no_selector() -> None:
    rendered = render(EVERYTHING, {"commonLabels": {"team": "llm"}, "commonAnnotations": {"owner": "me"}})
    for one in [*rendered.objects, *rendered.pods().values()]:
        assert one["metadata"]["labels"]["team"] == "llm"
        assert one["metadata"]["annotations"]["owner"] == "me"
    deployments = rendered.kind("Deployment")
    assert all("team" not in one["spec"]["selector"]["matchLabels"] for one in deployments)
    hook = rendered.pods()["test"]["metadata"]["annotations"]
    assert hook["helm.sh/hook"] == "test"


def test_variables_containers_and_volumes_of_the_user_come_after_those_of_the_chart() -> None:
    given: dict[str, Any] = {
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "extraEnvFrom": [{"configMapRef": {"name": "mine"}}],
        "initContainers": [{"name": "wait", "image": "busybox:1"}],
        "sidecars": [{"name": "agent", "image": "agent:1"}],
        "extraVolumes": [{"name": "ca", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}],
    }
    for pod in pods(render(WORKERS, given)):
        ours, sidecar = pod["containers"]
        assert ours["env"][-1] == given["extraEnv"][0]
        assert ours["envFrom"][-1] == given["extraEnvFrom"][0]
        assert ours["volumeMounts"][-1] == given["extraVolumeMounts"][0]
        assert (pod["initContainers"], [sidecar]) == (given["initContainers"], given["sidecars"])
        assert pod["volumes"][-1] == given["extraVolumes"][0]


def test_each_secret_value_can_refer_to_a_key_of_another_secret() -> None:
    references = {
        "redis": {"url": REF},
        "auth": {"secret_keys": REF},
        "upstream": {"api_key": {"name": "vllm", "key": "token"}},
    }
    rendered = render(WORKERS, {"redis": {"url": ""}, "secretRefs": references})
    assert rendered.kind("Secret") == []
    for pod in pods(rendered):
        [container] = pod["containers"]
        found = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one}
        assert found == {
            "RESPONSES_MW_REDIS_URL": REF,
            "RESPONSES_MW_AUTH_SECRET_KEYS": REF,
            "RESPONSES_MW_UPSTREAM_API_KEY": {"name": "vllm", "key": "token"},
        }
        assert container["envFrom"] == [{"configMapRef": {"name": NAME}}]


def test_the_cluster_can_choose_the_user_id() -> None:
    for pod in render(REQUIRED).pods().values():
        assert {pod["spec"]["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {65532}
    none = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))
    for pod in render(EVERYTHING, {"podSecurityContext": none, "sandbox": {"isolation": "restricted"}}).pods().values():
        assert pod["spec"]["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert all("runAsUser" not in one["securityContext"] for one in pod["spec"]["containers"])


def test_prompts_are_mounted_as_files_that_the_server_can_read(tmp_path: Any) -> None:
    files = {"support.toml": 'instructions = "You help with {{product}}."\n'}
    rendered = render(WORKERS, {"prompts": {"files": files}})
    data = rendered("ConfigMap", "-prompts")["data"]
    for name, text in data.items():
        (tmp_path / name).write_text(text)
    body = Prompts(str(tmp_path)).resolve({"prompt": {"id": "support", "variables": {"product": "radios"}}})
    assert body["instructions"] == "You help with radios."
    where = rendered("ConfigMap")["data"]["RESPONSES_MW_SERVER_PROMPTS_DIR"]
    for pod in pods(rendered):
        assert {"name": "prompts", "mountPath": where, "readOnly": True} in pod["containers"][0]["volumeMounts"]
        assert {"name": "prompts", "configMap": {"name": NAME + "-prompts"}} in pod["volumes"]
    own = pods(render(WORKERS, {"prompts": {"existingConfigMap": "mine"}}))
    assert all({"name": "prompts", "configMap": {"name": "mine"}} in pod["volumes"] for pod in own)


def test_probes_have_the_configured_times_and_readiness_its_requirements() -> None:
    given = {"probes": {"readiness": {"failureThreshold": 9}}, "readiness": {"require": ["redis", "upstream"]}}
    for pod in pods(render(WORKERS, given)):
        probe = pod["containers"][0]["readinessProbe"]
        assert (probe["failureThreshold"], probe["periodSeconds"]) == (9, 5)
        assert probe["httpGet"] == {"path": "/readyz?require=redis,upstream", "port": "admin"}


def test_an_ingress_has_the_configured_paths_and_certificates_and_a_route_its_filters() -> None:
    tls = [{"secretName": "tls", "hosts": ["a"]}]
    filters = [{"type": "RequestHeaderModifier", "requestHeaderModifier": {"set": [{"name": "x", "value": "other"}]}}]
    rendered = render(
        REQUIRED,
        {"ingress": {"enabled": True, "hosts": ["a"], "paths": ["/v1", "/v2"], "tls": tls}},
        {"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}], "paths": ["/v1"], "filters": filters}},
    )
    ingress = rendered("Ingress")["spec"]
    [rule] = ingress["rules"]
    assert ([path["path"] for path in rule["http"]["paths"]], ingress["tls"]) == (["/v1", "/v2"], tls)
    [rule] = rendered("HTTPRoute")["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert rule["filters"] == filters


def test_images_come_from_the_configured_registry() -> None:
    rendered = render(EVERYTHING, {"image": {"registry": "registry.example.com/llm/", "tag": "9"}})
    images = {one["image"] for pod in rendered.pods().values() for one in pod["spec"]["containers"]}
    assert images == {"registry.example.com/llm/responses-mw:9"}


def test_a_trial_installation_is_one_pod_with_its_own_valkey() -> None:
    rendered = render(TRYOUT)
    [deployment] = rendered.kind("Deployment")
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"})
    ours, valkey = deployment["spec"]["template"]["spec"]["containers"]
    assert ours["name"] == "proxy"
    assert valkey["image"] == yaml.safe_load((CHART / "values.yaml").read_text())["tryout"]["image"]
    assert {"127.0.0.1", "noeviction"} <= set(valkey["args"])
    assert valkey["securityContext"] == ours["securityContext"]
    assert rendered("ConfigMap")["data"]["RESPONSES_MW_REDIS_URL"] == "redis://127.0.0.1:6379/0"
    assert rendered.kind("PodDisruptionBudget") == []
