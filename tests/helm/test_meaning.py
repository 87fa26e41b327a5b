"""The meaning of rendered objects: permissions, network access and secrets."""

from __future__ import annotations

import json
import re
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

from responses_mw.settings import Settings
from responses_mw.tools.search import PROVIDERS
from tests.helm.rendering import EXAMPLES, NAME, REQUIRED, Rendered, merged, render
from tests.helm.test_examples import EVERYTHING, LEAST

SETS = {"required": REQUIRED, "everything": EVERYTHING, "least": LEAST} | {path.stem: path for path in EXAMPLES}
each_set = pytest.mark.parametrize("values", SETS.values(), ids=SETS)
SANDBOX = {**REQUIRED, "sandbox": {"enabled": True}}
MINIO = [{"name": "AWS_ENDPOINT_URL", "value": "http://minio:9000"}]


def container(pod: dict[str, Any]) -> dict[str, Any]:
    [only] = pod["spec"]["containers"]
    return only  # type: ignore[no-any-return]


def settings(rendered: Rendered) -> dict[str, str]:
    return rendered("ConfigMap")["data"]  # type: ignore[no-any-return]


def selected(selector: dict[str, str], rendered: Rendered) -> set[str]:
    """Return the components of the pods that a selector selects."""
    return {name for name, pod in rendered.pods().items() if selector.items() <= pod["metadata"]["labels"].items()}


# -- rights


@each_set
def test_pods_have_no_privileges_and_no_token(values: Any) -> None:
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


def test_the_sandbox_has_no_privileges_by_default_and_its_own_account_and_secret() -> None:
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


def test_secret_values_are_only_in_secrets() -> None:
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


def test_an_existing_secret_replaces_the_secret_of_the_chart() -> None:
    rendered = render({"upstream": REQUIRED["upstream"], "existingSecret": "mine"})
    assert rendered.kind("Secret") == []
    assert container(rendered.pods()["proxy"])["envFrom"][-1] == {"secretRef": {"name": "mine"}}


def test_a_missing_secret_key_is_generated_with_enough_length_and_kept() -> None:
    secret = render(REQUIRED)("Secret", "-keys")
    assert len(secret["stringData"]["RESPONSES_MW_AUTH_SECRET_KEYS"]) >= 32
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert [one["metadata"]["name"] for one in render(SECRETS).kind("Secret")] == [NAME + "-sandbox", NAME]


REVISION = "responses-mw/secret-revision"


def pod_annotations(component: str, *values: dict[str, Any]) -> dict[str, str]:
    return render(*values).pods()[component]["metadata"]["annotations"] or {}


def test_pods_restart_when_a_setting_changes() -> None:
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
def test_objects_other_than_secrets_do_not_depend_on_secret_values(change: dict[str, Any]) -> None:
    def others(*values: dict[str, Any]) -> list[dict[str, Any]]:
        return [one for one in render(SECRETS, *values).objects if one["kind"] != "Secret"]

    assert others(change) == others()
    assert render(SECRETS, change).kind("Secret") != render(SECRETS).kind("Secret")


@pytest.mark.parametrize("component", ["proxy", "worker", "sandbox"])
def test_pods_restart_with_every_revision_if_the_release_has_secrets_or_on_request(component: str) -> None:
    assert pod_annotations(component, SECRETS)[REVISION] == "1"  # the release's, which helm template takes for the first
    assert pod_annotations(component, SECRETS, {"secretRevision": "2026-07"})[REVISION] == "2026-07"
    assert pod_annotations(component, SECRETS, {"secretRevision": 7})[REVISION] == "7"


def test_pods_with_existing_secrets_restart_only_on_request() -> None:
    own: dict[str, Any] = {
        "upstream": REQUIRED["upstream"],
        "existingSecret": "mine",
        "sandbox": {"enabled": True, "existingSecret": "mine-too"},
    }
    for component in ("proxy", "sandbox"):
        assert REVISION not in pod_annotations(component, own)
        assert pod_annotations(component, own, {"secretRevision": 2})[REVISION] == "2"


# -- settings


def test_the_server_reads_the_settings_that_the_chart_renders() -> None:
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


def test_with_workers_the_proxies_run_no_jobs_by_default() -> None:
    values = {**REQUIRED, "worker": {"enabled": True, "concurrency": 7}}
    assert "RESPONSES_MW_JOBS_CONCURRENCY" not in settings(render(REQUIRED))
    assert settings(render(values))["RESPONSES_MW_JOBS_CONCURRENCY"] == "0"
    assert settings(render(values, {"settings": {"jobs": {"concurrency": 3}}}))["RESPONSES_MW_JOBS_CONCURRENCY"] == "3"
    worker = container(render(values).pods()["worker"])
    assert {"name": "RESPONSES_MW_JOBS_CONCURRENCY", "value": "7"} in worker["env"]
    assert worker["args"] == ["worker"]


def test_traces_are_exported_to_the_configured_endpoint() -> None:
    assert settings(render(REQUIRED))["OTEL_TRACES_EXPORTER"] == "none"
    told = settings(render(REQUIRED, {"telemetry": {"endpoint": "http://c:4318", "env": {"OTEL_SERVICE_NAME": "mine"}}}))
    assert told["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://c:4318"
    assert told["OTEL_SERVICE_NAME"] == "mine"


# -- life and death


@pytest.mark.parametrize(
    ("drain", "proxy", "worker"),
    [({}, 80, 45), ({"drain_timeout": 0}, 20, 15), ({"drain_timeout": 90.5}, 201, 106), ({"drain_timeout": "2m"}, 260, 135)],
)
def test_a_pod_has_enough_time_to_stop(drain: dict[str, Any], proxy: int, worker: int) -> None:
    pods = render({**REQUIRED, "settings": {"server": drain}, "worker": {"enabled": True}}).pods()
    assert pods["proxy"]["spec"]["terminationGracePeriodSeconds"] == proxy
    assert pods["worker"]["spec"]["terminationGracePeriodSeconds"] == worker
    assert container(pods["proxy"])["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]


@each_set
def test_probes_use_the_admin_port_and_only_readiness_checks_redis_and_the_upstream(values: Any) -> None:
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
def test_a_disruption_budget_exists_only_for_several_replicas(values: Any, budgets: list[str]) -> None:
    rendered = render(REQUIRED, values)
    found = rendered.kind("PodDisruptionBudget")
    assert [one["metadata"]["name"] for one in found] == budgets
    for one in found:
        assert len(selected(one["spec"]["selector"]["matchLabels"], rendered)) == 1
        assert one["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_autoscaled_deployments_have_no_fixed_number_of_replicas() -> None:
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
def test_services_select_the_right_pods(values: Any) -> None:
    rendered = render(values)
    observed = {"proxy", "worker"} & rendered.pods().keys()
    meant = {NAME: {"proxy"}, NAME + "-admin": observed, NAME + "-sandbox": {"sandbox"}}
    for service in rendered.kind("Service"):
        name = service["metadata"]["name"]
        assert selected(service["spec"]["selector"], rendered) == meant[name]
        [port] = service["spec"]["ports"]
        for component in meant[name]:
            assert port["targetPort"] in {one["name"] for one in container(rendered.pods()[component])["ports"]}


def test_the_public_service_does_not_expose_the_admin_port() -> None:
    [port] = render(REQUIRED)("Service")["spec"]["ports"]
    assert port["targetPort"] == "http"


def test_each_deployment_selects_only_its_own_pods() -> None:
    rendered = render(EVERYTHING)
    for deployment in rendered.kind("Deployment"):
        own = deployment["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        assert selected(deployment["spec"]["selector"]["matchLabels"], rendered) == {own}


def test_the_sandbox_has_no_egress_and_ingress_only_from_our_pods() -> None:
    rendered = render(SANDBOX, {"worker": {"enabled": True}, "networkPolicy": {"enabled": False}})
    policy = rendered("NetworkPolicy", "-sandbox")["spec"]
    assert selected(policy["podSelector"]["matchLabels"], rendered) == {"sandbox"}
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []
    [rule] = policy["ingress"]
    [peer] = rule["from"]
    assert peer.keys() == {"podSelector"}
    assert selected(peer["podSelector"]["matchLabels"], rendered) == {"proxy", "worker"}


def test_our_pods_always_reach_the_sandbox_and_the_dns() -> None:
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
        ({"settings": {"cache": {"judge_url": "http://judge:8002"}}}, [6379, 8000, 8002]),
        ({"settings": {"files": {"embedding_url": "http://embeddings:8001"}}}, [6379, 8000, 8001]),
        ({"settings": {"files": {"rerank_url": "http://reranker:8003"}}}, [6379, 8000, 8003]),
        ({"settings": {"files": {"docling_url": "http://docling:5001"}}}, [5001, 6379, 8000]),
        *(({"settings": {"files": {"url": f"{name}://bucket/prefix"}}}, [443, 6379, 8000]) for name in ("s3", "gs", "az")),
        ({"settings": {"files": {"url": "file:///var/lib/files"}}}, [6379, 8000]),
        ({"settings": {"files": {"url": "s3://bucket"}}, "extraEnv": MINIO}, [6379, 8000, 9000]),
        ({"settings": {"search": {"provider": "searxng", "url": "http://searxng:8888"}}}, [6379, 8000, 8888]),
        *(({"settings": {"search": {"provider": name}}}, [443, 6379, 8000]) for name, kind in PROVIDERS.items() if kind.URL),
        ({"settings": {"search": {"provider": "docs/search"}}}, [6379, 8000]),
        ({"telemetry": {"env": {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://collector:4319"}}}, [4319, 6379, 8000]),
        ({"mcpServers": {"mail": {"url": "http://mail:8002/mcp"}}}, [6379, 8000, 8002]),
        ({"upstream": {"url": "http://vllm"}}, [80, 6379]),
        ({"upstream": {"url": "dns+http://vllm:8001,https://b, http://c:8004/v1"}}, [443, 6379, 8001, 8004]),
        ({"upstream": {"url": "http://[fd00::1]:8003"}}, [6379, 8003]),
        ({"redis": {"url": ""}, "existingSecret": "mine"}, [6379, 8000]),
        ({"redis": {"url": "redis://[fd00::12]:6390/0"}}, [6379, 6390, 8000]),
    ],
)
def test_egress_is_limited_to_the_ports_of_configured_servers(values: Any, ports: list[int]) -> None:
    names, named = render(REQUIRED, values)("NetworkPolicy")["spec"]["egress"]
    assert [one["port"] for one in names["ports"]] == [53, 53]
    assert [one["port"] for one in named["ports"]] == ports
    inside, *outside = named["to"]
    assert inside == {"namespaceSelector": {}}
    for block in outside:
        for address in METADATA:
            if address.version == ip_network(block["ipBlock"]["cidr"]).version:
                assert any(address in ip_network(one) for one in block["ipBlock"]["except"])


METADATA = tuple(
    map(
        ip_address,
        (
            *("169.254.169.254", "169.254.170.2", "169.254.170.23", "fd00:ec2::254", "fd00:ec2::23"),  # AWS
            *("168.63.129.16", "fd20:ce::254", "100.100.100.200", "192.0.0.192"),  # Azure, Google, Alibaba, Oracle
            *("64:ff9b::169.254.169.254", "64:ff9b::168.63.129.16", "64:ff9b::100.100.100.200"),  # NAT64
        ),
    )
)


def test_dns_egress_is_limited_to_the_dns_of_the_cluster() -> None:
    names, _ = render(REQUIRED)("NetworkPolicy")["spec"]["egress"]
    pods, node_local = names["to"]
    assert pods["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}
    assert "podSelector" in pods
    assert node_local == {"ipBlock": {"cidr": "169.254.20.10/32"}}


def test_the_dns_can_be_in_another_namespace() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}}}]
    names, _ = render(REQUIRED, {"networkPolicy": {"dnsTo": peers, "dnsPort": 5353}})("NetworkPolicy")["spec"]["egress"]
    assert (names["to"], [one["port"] for one in names["ports"]]) == (peers, [5353, 5353])


@each_set
def test_no_rule_of_the_chart_permits_egress_to_all_ports(values: Any) -> None:
    rules = [rule for one in render(values).kind("NetworkPolicy") for rule in one["spec"]["egress"]]
    own = yaml.safe_load(values.read_text()) if isinstance(values, Path) else values
    assert all("ports" in rule for rule in rules if rule not in own.get("networkPolicy", {}).get("egress", []))


def test_egress_to_configured_servers_can_be_limited_to_peers() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "models"}}}]
    _, named = render(REQUIRED, {"networkPolicy": {"egressTo": peers}})("NetworkPolicy")["spec"]["egress"]
    assert named == {"ports": [{"port": 6379}, {"port": 8000}], "to": peers}


def test_the_admin_port_is_closed_unless_monitoring_is_enabled() -> None:
    def rules(**values: Any) -> dict[str, Any]:
        ingress = render(REQUIRED, values)("NetworkPolicy")["spec"]["ingress"]
        return {rule["ports"][0]["port"]: rule.get("from") for rule in ingress}

    assert rules() == {"http": None}
    assert rules(serviceMonitor={"enabled": True})["admin"] == [{"namespaceSelector": {}}]
    only = [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]
    assert rules(networkPolicy={"metricsFrom": only})["admin"] == only


def test_the_inspector_is_reachable_only_on_the_admin_port_and_only_for_named_peers() -> None:
    proxy = [{"podSelector": {"matchLabels": {"app": "oauth2-proxy"}}}]
    prometheus = [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]
    values: dict[str, Any] = {
        **REQUIRED,
        "ui": {"mode": "content"},
        "worker": {"enabled": True},
        "ingress": {"enabled": True, "hosts": ["a.example.com"]},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
    }

    def peers(**policy: Any) -> list[Any]:
        ingress = render(values, {"networkPolicy": policy})("NetworkPolicy")["spec"]["ingress"]
        return [rule["from"] for rule in ingress if rule["ports"][0]["port"] == "admin"]

    assert peers() == []
    assert peers(uiFrom=proxy) == [proxy]
    assert peers(uiFrom=proxy, metricsFrom=prometheus) == [[*prometheus, *proxy]]
    for kind in ("Ingress", "HTTPRoute"):
        assert "admin" not in json.dumps(render(values)(kind)["spec"])
    for component in ("proxy", "worker"):
        env = {one["name"]: one for one in container(render(values).pods()[component])["env"]}
        assert env["RESPONSES_MW_UI_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": NAME + "-ui", "key": "token"}


def test_the_inspector_is_off_by_default_and_its_token_is_generated() -> None:
    off = render(REQUIRED)
    assert not [one for one in off.objects if "UI_" in str(one) or one["metadata"]["name"].endswith("-ui")]
    on = render(REQUIRED, {"ui": {"mode": "metadata"}})
    assert len(on("Secret", "-ui")["stringData"]["token"]) >= 16
    config = on("ConfigMap")["data"]
    assert (config["RESPONSES_MW_UI_MODE"], config["RESPONSES_MW_UI_ACTIONS"]) == ("metadata", "false")
    own = render(REQUIRED, {"ui": {"mode": "metadata", "existingSecret": "mine"}})
    assert not [one for one in own.kind("Secret") if one["metadata"]["name"].endswith("-ui")]
    assert "'name': 'mine', 'key': 'token'" in str(own.pods()["proxy"])


def test_the_test_pod_is_always_allowed_to_call_the_server() -> None:
    rendered = render(REQUIRED, {"networkPolicy": {"ingressFrom": [{"podSelector": {"matchLabels": {"app": "agent"}}}]}})
    peers = rendered("NetworkPolicy")["spec"]["ingress"][0]["from"]
    assert any(selected(peer["podSelector"]["matchLabels"], rendered) == {"test"} for peer in peers)


# -- streams


def test_an_ingress_does_not_buffer_or_interrupt_streams() -> None:
    annotations = render(REQUIRED, {"ingress": {"enabled": True, "hosts": ["a"]}})("Ingress")["metadata"]["annotations"]
    short = {name.partition("/")[2]: value for name, value in annotations.items()}
    assert short["proxy-buffering"] == "off"
    assert int(short["proxy-read-timeout"]) >= 3600
    assert short["proxy-body-size"] == "32m"


def test_an_ingress_can_forward_only_upgrades_of_get_requests() -> None:
    def snippet(**ingress: Any) -> Any:
        values = {"ingress": {"enabled": True, "hosts": ["a"], **ingress}}
        annotations = render(REQUIRED, values)("Ingress")["metadata"]["annotations"]
        return annotations.get("nginx.ingress.kubernetes.io/configuration-snippet")

    assert snippet() is None  # ingress-nginx refuses snippets unless it is told otherwise
    assert snippet(nginxSnippet=True, streaming="haproxy") is None
    assert snippet(nginxSnippet=True) == 'if ($request_method != GET) {\n  set $connection_upgrade "";\n}'


def test_haproxy_has_timeouts_and_no_options_that_only_its_defaults_section_can_have() -> None:
    ingress = render(REQUIRED, {"ingress": {"enabled": True, "hosts": ["a"], "streaming": "haproxy"}})("Ingress")
    annotations = {name for name in ingress["metadata"]["annotations"] if name.startswith("haproxy.org/")}
    assert annotations == {"haproxy.org/timeout-client", "haproxy.org/timeout-server"}


def test_pods_can_listen_on_both_address_families() -> None:
    assert render(REQUIRED)("ConfigMap")["data"]["RESPONSES_MW_HOST"] == "0.0.0.0"
    settings = render(REQUIRED, {"listenHost": "::"})("ConfigMap")["data"]
    assert (settings["RESPONSES_MW_HOST"], settings["RESPONSES_MW_SERVER_ADMIN_HOST"]) == ("::", "::")


def test_annotations_of_the_user_override_those_of_the_chart() -> None:
    own = {"nginx.ingress.kubernetes.io/proxy-read-timeout": "60", "a": "b"}
    ingress = render(REQUIRED, {"ingress": {"enabled": True, "hosts": ["a"], "annotations": own}})("Ingress")
    assert ingress["metadata"]["annotations"].items() >= own.items()


# -- the image


def test_a_digest_replaces_the_tag_of_an_image() -> None:
    digest = "sha256:" + "a" * 64
    images = {container(pod)["image"] for pod in render(SANDBOX, {"image": {"digest": digest, "tag": "9"}}).pods().values()}
    assert images == {f"responses-mw@{digest}"}


@each_set
def test_no_image_has_the_tag_latest(values: Any) -> None:
    assert all(
        re.search(r":[0-9][^:@]*(@sha256:[0-9a-f]{64})?$", container(pod)["image"]) for pod in render(values).pods().values()
    )


# -- several upstreams

TWO_MODELS = next(path for path in EXAMPLES if path.stem == "two-models")


def environment(rendered: Rendered) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in container(rendered.pods()["proxy"])["env"]}


def test_named_upstreams_are_settings_that_the_server_accepts() -> None:
    found = environment(render(TWO_MODELS))
    key = found["UPSTREAM_API_KEY_hosted"]["valueFrom"]["secretKeyRef"]
    assert key == {"name": "hosted", "key": "token"}
    assert list(found).index("UPSTREAM_API_KEY_hosted") < list(found).index("RESPONSES_MW_UPSTREAMS")
    given = found["RESPONSES_MW_UPSTREAMS"]["value"].replace("$(UPSTREAM_API_KEY_hosted)", "s3cret")
    hash_of_key = "alice:sha256:" + "0" * 64
    chosen = Settings.model_validate({"upstreams": given, "auth": {"api_keys": [hash_of_key]}}).named_upstreams
    assert {name: one.url for name, one in chosen.items()} == {
        "hosted": ("https://api.example.com",),
        "llama": ("dns+http://vllm-llama-headless:8000",),
        "qwen": ("http://qwen-0.qwen:8000", "http://qwen-1.qwen:8000"),
    }
    assert chosen["hosted"].own_headers == {"authorization": "Bearer s3cret"}


def test_without_an_unnamed_upstream_no_url_is_set() -> None:
    assert "RESPONSES_MW_UPSTREAM_URL" not in settings(render(TWO_MODELS))
    named = render({**REQUIRED, "upstream": {"headlessService": "vllm-headless:8000"}})
    assert settings(named)["RESPONSES_MW_UPSTREAM_URL"] == "dns+http://vllm-headless:8000"


def test_one_upstream_with_a_credential_and_several_addresses_needs_no_api_keys() -> None:
    reference = {"name": "secret", "key": "a"}
    upstreams = {"a": {"url": ["http://a-1", "http://a-2"], "apiKeySecret": reference}}
    rendered = render({"redis": REQUIRED["redis"], "upstreams": upstreams})
    assert "UPSTREAM_API_KEY_a" in environment(rendered)


def test_pods_may_reach_the_ports_of_all_upstreams() -> None:
    upstreams = {"a": {"headlessService": "a:8001"}, "b": {"url": ["http://b:8002", "https://c"]}}
    rendered = render({**REQUIRED, "upstreams": upstreams})
    policy = next(one for one in rendered.kind("NetworkPolicy") if one["metadata"]["name"] == NAME)
    ports = {port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", ())}
    assert ports >= {8000, 8001, 8002, 443}
