"""The compose files match the server, the image and each other."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from responses_mw.sandbox import SandboxSettings
from tests.support.configured import make_settings
from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy"


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / name).read_text())  # type: ignore[no-any-return]


SERVICES: dict[str, dict[str, Any]] = load("compose.yaml")["services"]
SANDBOX: dict[str, dict[str, Any]] = load("compose.sandbox.yaml")["services"]
OURS = {"server": SERVICES["server"], "demo": SERVICES["demo"], "sandbox": SANDBOX["sandbox"]}


# What must not be guessed, and so has no value in the files.
SECRETS = ("GRAFANA_PASSWORD", "SANDBOX_TOKEN", "SECRET_KEYS")
FILLED_IN = "0123456789abcdef" * 4


def environment(service: dict[str, Any], prefix: str) -> dict[str, str]:
    """Return the settings of a service if the user sets only the secrets."""
    given = {
        name: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", re.sub(r"\$\{\w+:\?.*?\}", FILLED_IN, value))
        for name, value in service.get("environment", {}).items()
    }
    return {name.removeprefix(prefix).lower(): value for name, value in given.items() if name.startswith(prefix)}


def test_the_settings_of_the_server_exist() -> None:
    given = environment(SERVICES["server"], "RESPONSES_MW_") | environment(SANDBOX["server"], "RESPONSES_MW_")
    make_settings(**{name.replace("_", "__", 1): value for name, value in given.items()})


def extended(name: str) -> dict[str, Any]:
    """Return a service of the small file, including what it inherits from the full one."""
    small = load("compose.small.yaml")["services"][name]
    assert small["extends"] == {"file": "compose.yaml", "service": name}
    whole = SERVICES[name]
    return {**whole, **small, "environment": {**whole.get("environment", {}), **small.get("environment", {})}}


def test_the_small_file_has_only_the_server_and_a_valkey() -> None:
    small = load("compose.small.yaml")
    assert small["services"].keys() == {"server", "valkey"}
    given = extended("server")["environment"]
    settings = environment(extended("server"), "RESPONSES_MW_") | {"upstream_url": "http://vllm:8000"}
    make_settings(**{name.replace("_", "__", 1): value for name, value in settings.items()})
    assert given["OTEL_TRACES_EXPORTER"] == given["OTEL_METRICS_EXPORTER"] == "none"
    assert not re.search("demo|collector", given["RESPONSES_MW_UPSTREAM_URL"])
    assert given["RESPONSES_MW_REDIS_URL"] == "redis://valkey:6379/0"
    assert {volume.split(":")[0] for volume in extended("valkey")["volumes"]} == small["volumes"].keys()


def test_the_settings_of_the_sandbox_exist() -> None:
    settings = SandboxSettings.model_validate(environment(SANDBOX["sandbox"], "RESPONSES_MW_SANDBOX_"))
    url = environment(SANDBOX["server"], "RESPONSES_MW_")["tools_sandbox_url"]
    assert url == f"http://sandbox:{settings.port}/mcp"
    assert settings.token is not None
    assert settings.token.get_secret_value() == environment(SANDBOX["server"], "RESPONSES_MW_")["tools_sandbox_token"]


def test_the_sandbox_has_no_network_access_to_other_hosts() -> None:
    assert load("compose.sandbox.yaml")["networks"] == {"sandbox": {"internal": True}}
    assert SANDBOX["sandbox"]["networks"] == ["sandbox"]
    assert "ports" not in SANDBOX["sandbox"]


def test_secrets_are_not_in_the_files_and_the_error_says_how_to_create_them() -> None:
    text = "".join((DEPLOY / name).read_text() for name in ("compose.yaml", "compose.sandbox.yaml"))
    required = re.findall(r"\$\{(\w+):\?(.*?)\}", text)
    assert {name for name, _ in required} == set(SECRETS)
    assert {message for _, message in required} == {"create deploy/.env first, as described at the top of deploy/compose.yaml"}
    given = [service["environment"].items() for service in [*SERVICES.values(), *SANDBOX.values()] if "environment" in service]
    secret = [value for pairs in given for name, value in pairs if re.search("TOKEN|PASSWORD|SECRET|API_KEY", name)]
    assert len(secret) == 4
    assert all(re.fullmatch(r"\$\{\w+:\?[^}]+\}", value) for value in secret)


def test_the_command_for_secrets_creates_strong_secrets_once_and_only_for_the_user(tmp_path: Path) -> None:
    [line] = re.findall(r"^#   (test -e deploy/\.env .*)$", (DEPLOY / "compose.yaml").read_text(), re.MULTILINE)
    assert line in (DEPLOY.parent / "docs" / "operation" / "kubernetes.md").read_text()
    (tmp_path / "deploy").mkdir()
    subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True)
    made = tmp_path / "deploy" / ".env"
    text = made.read_text()
    values = dict(line.split("=") for line in text.splitlines())
    assert sorted(values) == sorted(SECRETS)
    assert len(set(values.values())) == len(SECRETS)
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in values.values())
    assert made.stat().st_mode & 0o777 == 0o600
    subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True)
    assert made.read_text() == text
    ignored = subprocess.run(["git", "check-ignore", "-q", "deploy/.env"], cwd=DEPLOY.parent, check=False)
    assert ignored.returncode == 0


def test_ports_are_published_only_on_the_loopback_address() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) >= 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_images_have_a_version() -> None:
    images = [service["image"] for service in (SERVICES | SANDBOX).values() if "image" in service]
    assert all(image == "responses-mw:local" or re.search(r":v?\d+\.\d+", image) for image in images)
    assert {service["image"] for service in OURS.values()} == {SERVICES["server"]["image"]}


@pytest.mark.parametrize("name", OURS)
def test_our_containers_have_no_privileges(name: str) -> None:
    assert OURS[name]["read_only"] is True
    assert OURS[name]["cap_drop"] == ["ALL"]
    assert OURS[name]["security_opt"] == ["no-new-privileges:true"]


def test_every_service_has_a_memory_limit() -> None:
    assert all("mem_limit" in service for service in SERVICES.values())


def test_mounted_files_exist() -> None:
    sources = [volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])]
    files = [source for source in sources if source.startswith(".")]
    assert len(files) >= 5
    assert all((DEPLOY / source).exists() for source in files)
    assert {source for source in sources if not source.startswith(".")} == load("compose.yaml")["volumes"].keys()


def test_valkey_persists_its_data() -> None:
    command = shlex.join(SERVICES["valkey"]["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert "--maxmemory 1gb" in command


def test_traces_reach_jaeger_through_the_collector() -> None:
    collector = load("collector.yaml")
    pipeline = collector["service"]["pipelines"]["traces"]
    for part in ("receivers", "processors", "exporters"):
        assert set(pipeline[part]) <= collector[part].keys()
    told = SERVICES["server"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert told == "http://collector:" + collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"].split(":")[1]
    assert collector["exporters"]["otlp/jaeger"]["endpoint"].split(":")[0] in SERVICES


def test_prometheus_scrapes_the_admin_port_as_the_job_in_the_alerts() -> None:
    [scraped] = load("prometheus.yaml")["scrape_configs"]
    assert scraped["job_name"] == "responses-mw"
    [found] = scraped["dns_sd_configs"]
    assert found["names"] == ["server"]
    assert str(found["port"]) == SERVICES["server"]["environment"]["RESPONSES_MW_SERVER_ADMIN_PORT"]


def test_grafana_uses_services_that_exist() -> None:
    for source in load("grafana/datasources/datasources.yaml")["datasources"]:
        assert source["url"].removeprefix("http://").split(":")[0] in SERVICES
