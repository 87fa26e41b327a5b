"""What is rendered says what it should: who may do what, who reaches whom, and where secrets lie."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from responses_mw.tools.search import PROVIDERS
from tests.helm.rendering import EXAMPLES, NAME, REQUIRED, Rendered, merged, render
from tests.helm.test_examples import EVERYTHING, LEAST

SETS = {"required": REQUIRED, "everything": EVERYTHING, "least": LEAST} | {path.stem: path for path in EXAMPLES}
each_set = pytest.mark.parametrize("values", SETS.values(), ids=SETS)
SANDBOX = {**REQUIRED, "sandbox": {"enabled": True}}


def container(pod: dict[str, Any]) -> dict[str, Any]:
    [only] = pod["spec"]["containers"]
    return only  # type: ignore[no-any-return]


def settings(rendered: Rendered) -> dict[str, str]:
    return rendered("ConfigMap")["data"]  # type: ignore[no-any-return]


def selected(selector: dict[str, str], rendered: Rendered) -> set[str]:
    """The components of the pods that a selector selects."""
    return {name for name, pod in rendered.pods().items() if selector.items() <= pod["metadata"]["labels"].items()}


# -- rights


@each_set
def test_pods_have_no_rights_and_no_token(values: Any) -> None:
    for name, pod in render(values).pods().items():
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["enableServiceLinks"] is False, "RESPONSES_MW_PORT of a Service would be taken for a setting"
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        security = container(pod)["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"]["drop"] == ["ALL"]
        if name != "sandbox" or "runAsUser" not in security:
            assert security["runAsNonRoot"] is pod["spec"]["securityContext"]["runAsNonRoot"] is True
            assert security["capabilities"].keys() == {"drop"}
        assert {"cpu", "memory"} <= container(pod)["resources"]["limits"].keys()


@each_set
def test_accounts_have_no_token(values: Any) -> None:
    assert all(one["automountServiceAccountToken"] is False for one in render(values).kind("ServiceAccount"))


def test_the_sandbox_has_no_right_unless_told_and_an_account_and_a_secret_of_its_own() -> None:
    rendered = render(SANDBOX)
    sandbox, proxy = rendered.pods()["sandbox"], rendered.pods()["proxy"]
    assert sandbox["spec"]["serviceAccountName"] != proxy["spec"]["serviceAccountName"]
    assert "envFrom" not in container(sandbox)
    references = [one["valueFrom"]["secretKeyRef"]["name"] for one in container(sandbox)["env"] if "valueFrom" in one]
    assert references == [NAME + "-sandbox"]
    assert {"name": "RESPONSES_MW_SANDBOX_ALLOW_WEAK_ISOLATION", "value": "true"} in container(sandbox)["env"]
    assert rendered("Deployment", "-sandbox")["spec"]["replicas"] == 1


@pytest.mark.parametrize("runtime", ["", "gvisor"])
def test_a_sandbox_with_namespaces_is_never_root_on_the_node(runtime: str) -> None:
    values = merged([SANDBOX, {"sandbox": {"isolation": "namespaces", "runtimeClassName": runtime}}])
    sandbox = render(values).pods()["sandbox"]
    assert container(sandbox)["securityContext"]["runAsUser"] == 0
    assert sandbox["spec"].get("runtimeClassName", "") == runtime
    assert sandbox["spec"].get("hostUsers", True) is bool(runtime)
    profile = container(sandbox)["securityContext"].get("appArmorProfile")
    assert profile == (None if runtime else {"type": "Unconfined"})  # the runtimes' default profile forbids mounts
    assert {"name": "RESPONSES_MW_SANDBOX_ALLOW_WEAK_ISOLATION", "value": "false"} in container(sandbox)["env"]


# -- secrets


SECRETS: dict[str, Any] = {
    **REQUIRED,
    "secretKeys": ["s3cret" * 6],
    "secretSettings": {"upstream": {"api_key": "s3cret-upstream"}, "search": {"api_key": "s3cret-search"}},
    "mcpServers": {"docs": {"url": "https://docs.example.com/mcp", "authorization": "s3cret-token"}},
    "sandbox": {"enabled": True, "token": "s3cret-sandbox-token"},
    "worker": {"enabled": True},
}


def test_secrets_lie_in_secrets_only() -> None:
    rendered = render(SECRETS)
    found = {one["kind"] for one in rendered.objects if "s3cret" in str(one)}
    assert found == {"Secret"}
    assert rendered("Secret")["stringData"].keys() == {
        "RESPONSES_MW_REDIS_URL",
        "RESPONSES_MW_AUTH_SECRET_KEYS",
        "RESPONSES_MW_UPSTREAM_API_KEY",
        "RESPONSES_MW_SEARCH_API_KEY",
        "RESPONSES_MW_TOOLS_MCP_SERVERS",
    }


def test_an_existing_secret_takes_the_place_of_ours() -> None:
    rendered = render({"upstream": REQUIRED["upstream"], "existingSecret": "mine"})
    assert rendered.kind("Secret") == []
    assert container(rendered.pods()["proxy"])["envFrom"][-1] == {"secretRef": {"name": "mine"}}


def test_a_secret_key_that_is_not_given_is_made_long_enough_and_kept() -> None:
    secret = render(REQUIRED)("Secret", "-keys")
    assert len(secret["stringData"]["RESPONSES_MW_AUTH_SECRET_KEYS"]) >= 32
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert [one["metadata"]["name"] for one in render(SECRETS).kind("Secret")] == [NAME + "-sandbox", NAME]


REVISION = "responses-mw/secret-revision"


def pod_annotations(component: str, *values: dict[str, Any]) -> dict[str, str]:
    return render(*values).pods()[component]["metadata"]["annotations"] or {}


def test_pods_begin_anew_when_a_setting_changes() -> None:
    before = pod_annotations("proxy", SECRETS)
    assert pod_annotations("proxy", SECRETS) == before
    assert (
        pod_annotations("proxy", SECRETS, {"settings": {"state": {"ttl": 60}}})["checksum/config"] != before["checksum/config"]
    )


@pytest.mark.parametrize(
    "change",
    [
        {"redis": {"url": "redis://:an0ther@redis:6379/0"}},
        {"secretKeys": ["k" * 32]},
        {"secretSettings": {"upstream": {"api_key": "an0ther"}}},
        {"mcpServers": {"docs": {"authorization": "an0ther"}}},
        {"sandbox": {"token": "t" * 16}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_nothing_outside_of_the_secrets_depends_on_a_secret_so_that_none_can_be_guessed_from_it(change: dict[str, Any]) -> None:
    def others(*values: dict[str, Any]) -> list[dict[str, Any]]:
        return [one for one in render(SECRETS, *values).objects if one["kind"] != "Secret"]

    assert others(change) == others()
    assert render(SECRETS, change).kind("Secret") != render(SECRETS).kind("Secret")


@pytest.mark.parametrize("component", ["proxy", "worker", "sandbox"])
def test_pods_begin_anew_with_every_revision_of_a_release_that_holds_secrets_or_when_told(component: str) -> None:
    assert pod_annotations(component, SECRETS)[REVISION] == "1"  # the release's, which helm template takes for the first
    assert pod_annotations(component, SECRETS, {"secretRevision": "2026-07"})[REVISION] == "2026-07"
    assert pod_annotations(component, SECRETS, {"secretRevision": 7})[REVISION] == "7"


def test_pods_whose_secrets_are_the_users_own_begin_anew_only_when_told() -> None:
    own: dict[str, Any] = {
        "upstream": REQUIRED["upstream"],
        "existingSecret": "mine",
        "sandbox": {"enabled": True, "existingSecret": "mine-too"},
    }
    for component in ("proxy", "sandbox"):
        assert REVISION not in pod_annotations(component, own)
        assert pod_annotations(component, own, {"secretRevision": 2})[REVISION] == "2"


# -- settings


def test_settings_arrive_as_the_server_reads_them() -> None:
    given = {
        "state": {"ttl": 604800, "required": False},
        "upstream": {"timeout": 0.5},
        "server": {"cors_origins": ["a", "b"]},
        "limits": {"max_request_bytes": "64MiB", "memory_bytes": 1073741824},
    }
    data = settings(render({**REQUIRED, "settings": given}))
    assert data["RESPONSES_MW_UPSTREAM_URL"] == "http://vllm:8000"
    assert data["RESPONSES_MW_STATE_TTL"] == "604800"
    assert data["RESPONSES_MW_LIMITS_MEMORY_BYTES"] == "1073741824"
    assert data["RESPONSES_MW_UPSTREAM_TIMEOUT"] == "0.5"
    assert data["RESPONSES_MW_STATE_REQUIRED"] == "false"
    assert data["RESPONSES_MW_LIMITS_MAX_REQUEST_BYTES"] == "64MiB"
    assert data["RESPONSES_MW_SERVER_CORS_ORIGINS"] == '["a","b"]'
    assert all(isinstance(value, str) for value in data.values())


def test_with_workers_the_proxies_run_no_jobs_unless_told() -> None:
    values = {**REQUIRED, "worker": {"enabled": True, "concurrency": 7}}
    assert "RESPONSES_MW_JOBS_CONCURRENCY" not in settings(render(REQUIRED))
    assert settings(render(values))["RESPONSES_MW_JOBS_CONCURRENCY"] == "0"
    assert settings(render(values, {"settings": {"jobs": {"concurrency": 3}}}))["RESPONSES_MW_JOBS_CONCURRENCY"] == "3"
    worker = container(render(values).pods()["worker"])
    assert {"name": "RESPONSES_MW_JOBS_CONCURRENCY", "value": "7"} in worker["env"]
    assert worker["args"] == ["worker"]


def test_traces_go_where_they_are_told() -> None:
    assert settings(render(REQUIRED))["OTEL_TRACES_EXPORTER"] == "none"
    told = settings(render(REQUIRED, {"telemetry": {"endpoint": "http://c:4318", "env": {"OTEL_SERVICE_NAME": "mine"}}}))
    assert told["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://c:4318"
    assert told["OTEL_SERVICE_NAME"] == "mine"


# -- life and death


@pytest.mark.parametrize(
    ("drain", "proxy", "worker"), [({}, 80, 45), ({"drain_timeout": 0}, 20, 15), ({"drain_timeout": 90.5}, 201, 106)]
)
def test_a_pod_has_the_time_that_it_needs_to_stop(drain: dict[str, float], proxy: int, worker: int) -> None:
    pods = render({**REQUIRED, "settings": {"server": drain}, "worker": {"enabled": True}}).pods()
    assert pods["proxy"]["spec"]["terminationGracePeriodSeconds"] == proxy
    assert pods["worker"]["spec"]["terminationGracePeriodSeconds"] == worker
    assert container(pods["proxy"])["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]


@each_set
def test_probes_ask_the_admin_port_and_only_readiness_asks_for_redis_and_upstream(values: Any) -> None:
    rendered = render(values)
    for name in ("proxy", "worker"):
        if name in rendered.pods():
            pod = container(rendered.pods()[name])
            probes = {kind: pod[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
            assert {probe["port"] for probe in probes.values()} == {"admin"}
            paths = {kind: probe["path"] for kind, probe in probes.items()}
            assert paths == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
            [admin] = [port["containerPort"] for port in pod["ports"] if port["name"] == "admin"]
            assert settings(rendered)["RESPONSES_MW_SERVER_ADMIN_PORT"] == str(admin)


@pytest.mark.parametrize(
    ("values", "budgets"),
    [
        ({}, [NAME]),
        ({"replicaCount": 1}, []),
        ({"replicaCount": 1, "autoscaling": {"enabled": True, "minReplicas": 2}}, [NAME]),
        ({"autoscaling": {"enabled": True, "minReplicas": 1}}, []),
        ({"podDisruptionBudget": {"enabled": False}}, []),
        ({"worker": {"enabled": True}}, [NAME, NAME + "-worker"]),
        ({"worker": {"enabled": True, "replicaCount": 1}}, [NAME]),
    ],
)
def test_a_disruption_budget_stands_only_where_there_is_more_than_one_replica(values: Any, budgets: list[str]) -> None:
    rendered = render(REQUIRED, values)
    found = rendered.kind("PodDisruptionBudget")
    assert [one["metadata"]["name"] for one in found] == budgets
    for one in found:
        assert len(selected(one["spec"]["selector"]["matchLabels"], rendered)) == 1
        assert one["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_what_scales_has_no_fixed_number_of_replicas() -> None:
    rendered = render(EVERYTHING)
    assert "replicas" not in rendered("Deployment")["spec"]
    assert "replicas" not in rendered("Deployment", "-worker")["spec"]
    assert rendered("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == NAME


def test_replicas_are_added_at_seven_tenths_of_a_core_whatever_a_pod_requests() -> None:
    rendered = render(EVERYTHING, {"resources": {"requests": {"cpu": "100m"}}})
    [metric] = rendered("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["resource"] == {"name": "cpu", "target": {"type": "AverageValue", "averageValue": "700m"}}


# -- who reaches whom


@each_set
def test_services_lead_to_the_pods_that_they_should(values: Any) -> None:
    rendered = render(values)
    observed = {"proxy", "worker"} & rendered.pods().keys()
    meant = {NAME: {"proxy"}, NAME + "-admin": observed, NAME + "-sandbox": {"sandbox"}}
    for service in rendered.kind("Service"):
        name = service["metadata"]["name"]
        assert selected(service["spec"]["selector"], rendered) == meant[name]
        [port] = service["spec"]["ports"]
        for component in meant[name]:
            assert port["targetPort"] in {one["name"] for one in container(rendered.pods()[component])["ports"]}


def test_the_public_service_does_not_lead_to_the_admin_port() -> None:
    [port] = render(REQUIRED)("Service")["spec"]["ports"]
    assert port["targetPort"] == "http"


def test_deployments_do_not_take_one_anothers_pods() -> None:
    rendered = render(EVERYTHING)
    for deployment in rendered.kind("Deployment"):
        own = deployment["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        assert selected(deployment["spec"]["selector"]["matchLabels"], rendered) == {own}


def test_the_sandbox_reaches_nothing_and_only_our_pods_reach_it() -> None:
    rendered = render(SANDBOX, {"worker": {"enabled": True}, "networkPolicy": {"enabled": False}})
    policy = rendered("NetworkPolicy", "-sandbox")["spec"]
    assert selected(policy["podSelector"]["matchLabels"], rendered) == {"sandbox"}
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []
    [rule] = policy["ingress"]
    [peer] = rule["from"]
    assert peer.keys() == {"podSelector"}
    assert selected(peer["podSelector"]["matchLabels"], rendered) == {"proxy", "worker"}


def test_our_pods_reach_the_sandbox_and_the_names_of_things_whatever_else_is_said() -> None:
    egress = [{"to": [{"podSelector": {"matchLabels": {"app": "redis"}}}]}]
    rendered = render(SANDBOX, {"networkPolicy": {"egress": egress}})
    policy = rendered("NetworkPolicy")["spec"]
    assert selected(policy["podSelector"]["matchLabels"], rendered) == {"proxy"}
    names, sandbox, *rest = policy["egress"]
    assert [port["port"] for port in names["ports"]] == [53, 53]
    assert selected(sandbox["to"][0]["podSelector"]["matchLabels"], rendered) == {"sandbox"}
    assert rest == egress


@pytest.mark.parametrize(
    ("values", "ports"),
    [
        ({}, [6379, 8000]),
        ({"upstream": {"url": "https://api.example.com/v1"}}, [443, 6379]),
        ({"redis": {"url": "rediss+sentinel://u:p@a:26379,b:26380/main/0"}}, [6379, 8000, 26379, 26380]),
        ({"redis": {"url": "redis+cluster://u:1234@a:7000,b:7001"}}, [6379, 7000, 7001, 8000]),
        ({"telemetry": {"endpoint": "http://collector:4318"}}, [4318, 6379, 8000]),
        ({"mcpServers": {"docs": {"url": "https://docs.example.com/mcp"}}}, [443, 6379, 8000]),
        ({"networkPolicy": {"egressPorts": [443, 8000]}}, [443, 6379, 8000]),
        ({"settings": {"cache": {"embedding_url": "http://embeddings:8001"}}}, [6379, 8000, 8001]),
        ({"settings": {"search": {"provider": "searxng", "url": "http://searxng:8888"}}}, [6379, 8000, 8888]),
        *(({"settings": {"search": {"provider": name}}}, [443, 6379, 8000]) for name, kind in PROVIDERS.items() if kind.URL),
        ({"settings": {"search": {"provider": "docs/search"}}}, [6379, 8000]),
        ({"telemetry": {"env": {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://collector:4319"}}}, [4319, 6379, 8000]),
        ({"mcpServers": {"mail": {"url": "http://mail:8002/mcp"}}}, [6379, 8000, 8002]),
        ({"upstream": {"url": "http://vllm"}}, [80, 6379]),
        ({"upstream": {"url": "http://[fd00::1]:8003"}}, [6379, 8003]),
        ({"redis": {"url": ""}, "existingSecret": "mine"}, [6379, 8000]),
        ({"redis": {"url": "redis://[fd00::12]:6390/0"}}, [6379, 6390, 8000]),
    ],
)
def test_only_the_ports_of_what_is_configured_can_be_reached_in_the_cluster_or_outside(values: Any, ports: list[int]) -> None:
    names, named = render(REQUIRED, values)("NetworkPolicy")["spec"]["egress"]
    assert [one["port"] for one in names["ports"]] == [53, 53]
    assert [one["port"] for one in named["ports"]] == ports
    inside, *outside = named["to"]
    assert inside == {"namespaceSelector": {}}
    assert "169.254.0.0/16" in outside[0]["ipBlock"]["except"]


@each_set
def test_no_rule_of_ours_lets_out_to_all_ports(values: Any) -> None:
    rules = [rule for one in render(values).kind("NetworkPolicy") for rule in one["spec"]["egress"]]
    own = yaml.safe_load(values.read_text()) if isinstance(values, Path) else values
    assert all("ports" in rule for rule in rules if rule not in own.get("networkPolicy", {}).get("egress", []))


def test_what_is_configured_can_be_narrowed_to_peers() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "models"}}}]
    _, named = render(REQUIRED, {"networkPolicy": {"egressTo": peers}})("NetworkPolicy")["spec"]["egress"]
    assert named == {"ports": [{"port": 6379}, {"port": 8000}], "to": peers}


def test_the_admin_port_is_closed_until_somebody_watches() -> None:
    def rules(**values: Any) -> dict[str, Any]:
        ingress = render(REQUIRED, values)("NetworkPolicy")["spec"]["ingress"]
        return {rule["ports"][0]["port"]: rule.get("from") for rule in ingress}

    assert rules() == {"http": None}
    assert rules(serviceMonitor={"enabled": True})["admin"] == [{"namespaceSelector": {}}]
    only = [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]
    assert rules(networkPolicy={"metricsFrom": only})["admin"] == only


def test_the_test_pod_may_call_even_where_few_may() -> None:
    rendered = render(REQUIRED, {"networkPolicy": {"ingressFrom": [{"podSelector": {"matchLabels": {"app": "agent"}}}]}})
    peers = rendered("NetworkPolicy")["spec"]["ingress"][0]["from"]
    assert any(selected(peer["podSelector"]["matchLabels"], rendered) == {"test"} for peer in peers)


# -- streams


def test_an_ingress_keeps_streams_whole() -> None:
    annotations = render(REQUIRED, {"ingress": {"enabled": True, "hosts": ["a"]}})("Ingress")["metadata"]["annotations"]
    short = {name.partition("/")[2]: value for name, value in annotations.items()}
    assert short["proxy-buffering"] == "off"
    assert int(short["proxy-read-timeout"]) >= 3600
    assert short["proxy-body-size"] == "32m"


def test_an_ingress_may_forward_upgrades_of_get_only() -> None:
    def snippet(**ingress: Any) -> Any:
        values = {"ingress": {"enabled": True, "hosts": ["a"], **ingress}}
        annotations = render(REQUIRED, values)("Ingress")["metadata"]["annotations"]
        return annotations.get("nginx.ingress.kubernetes.io/configuration-snippet")

    assert snippet() is None  # ingress-nginx refuses snippets unless it is told otherwise
    assert snippet(nginxSnippet=True, streaming="haproxy") is None
    assert snippet(nginxSnippet=True) == 'if ($request_method != GET) {\n  set $connection_upgrade "";\n}'


def test_own_annotations_of_an_ingress_win() -> None:
    own = {"nginx.ingress.kubernetes.io/proxy-read-timeout": "60", "a": "b"}
    ingress = render(REQUIRED, {"ingress": {"enabled": True, "hosts": ["a"], "annotations": own}})("Ingress")
    assert ingress["metadata"]["annotations"].items() >= own.items()


# -- the image


def test_a_digest_takes_the_place_of_a_tag() -> None:
    digest = "sha256:" + "a" * 64
    images = {container(pod)["image"] for pod in render(SANDBOX, {"image": {"digest": digest, "tag": "9"}}).pods().values()}
    assert images == {f"responses-mw@{digest}"}


@each_set
def test_no_image_is_named_latest(values: Any) -> None:
    assert all(
        re.search(r":[0-9][^:@]*(@sha256:[0-9a-f]{64})?$", container(pod)["image"]) for pod in render(values).pods().values()
    )
