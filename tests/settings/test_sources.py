"""Sources of settings: flags, the environment and a file, and unknown settings in each of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError
from pydantic_settings import SettingsError

from responses_mw import ResponsesMiddleware, Settings, create_app
from responses_mw.cli import main
from responses_mw.sandbox import SandboxSettings

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve

    Write = Callable[[str], str]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("RESPONSES_MW_"):
            monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a settings file and sets RESPONSES_MW_CONFIG to its path."""

    def write(content: str) -> str:
        path = tmp_path / "responses-mw.toml"
        path.write_text(content, "utf-8")
        monkeypatch.setenv("RESPONSES_MW_CONFIG", str(path))
        return str(path)

    return write


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    if end.value.code:
        raise AssertionError(end.value.code)


# -- file -----------------------------------------------------------------------------------------------------------------


def test_a_file_sets_every_kind_of_value(write: Write) -> None:
    write("""
        [upstream]
        url = "http://vllm:8000/v1"
        forward_headers = ["x-mine"]
        timeout = "90s"
        [auth]
        secret_keys = ["a secret of at least 32 characters"]
        [limits]
        max_request_bytes = "64MiB"
        streams = 3
        [state]
        required = true
        [tools.mcp_servers.weather]
        url = "http://weather/mcp"
        headers = {x-key = "secret"}
    """)
    settings = Settings()
    assert (settings.upstream.url, settings.upstream.forward_headers) == (("http://vllm:8000",), ["x-mine"])
    assert (settings.upstream.timeout, settings.limits.max_request_bytes, settings.limits.streams) == (90, 64 << 20, 3)
    assert settings.state.required is True
    assert settings.auth.secret_keys[0].get_secret_value().startswith("a secret")
    assert settings.tools.mcp_servers["weather"].headers["x-key"].get_secret_value() == "secret"


def test_flags_override_the_environment_and_the_environment_overrides_the_file(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], upstream: ScriptedUpstream, serve: Serve
) -> None:
    url = serve(upstream)
    write(
        '[upstream]\nurl = "http://nobody"\ntimeout = 1\ndialect = "tgi"\n[redis]\nurl = "redis://127.0.0.1:1"\n[state]\nttl = 5'
    )
    monkeypatch.setenv("RESPONSES_MW_UPSTREAM_TIMEOUT", "2")
    monkeypatch.setenv("RESPONSES_MW_UPSTREAM_DIALECT", "sglang")
    settings = Settings(upstream={"dialect": "vllm"})
    assert (settings.upstream.dialect, settings.upstream.timeout, settings.upstream.url) == ("vllm", 2, ("http://nobody",))
    assert settings.state.ttl == 5
    with pytest.raises(AssertionError):  # Redis is unreachable
        run("serve", "--check", "--port=0", "--upstream", url, "--upstream.dialect", "vllm")
    told = capsys.readouterr()
    assert f"upstream: {url} answers" in told.out
    assert "dialect:  vllm (set)" in told.out


def test_the_config_flag_overrides_the_file_named_in_the_environment(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write('[upstream]\nurl = "http://other"')
    path = tmp_path / "own.toml"
    path.write_text('port = 99999\n[upstream]\nurl = "http://own"')
    with pytest.raises(AssertionError, match="port"):
        run("serve", "--config", str(path))


def test_the_middleware_and_create_app_read_the_file(write: Write) -> None:
    write('port = 9000\n[server]\nbase_path = "/llm"\n[upstream]\nurl = "http://vllm:8000"')

    async def app(*_: object) -> None: ...

    assert ResponsesMiddleware(app).settings.server.base_path == "/llm"
    assert create_app().settings.upstream.url == ("http://vllm:8000",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[upstream]\nurll = "http://a"', r"upstream\.urll \(did you mean upstream\.url\?\)"),
        ('[upstreams]\nurl = "http://a"', r"upstreams must be tables: \[upstreams\.NAME\], or \[upstream\]"),
        ('mode = "exact"\n[cache]\nmood = 1\n[x.y]', r"mode.*cache\.mood.*x"),
        ('config = "other.toml"', "config"),
        ('"upstream.url" = "http://a"', r'"upstream\.url" \(remove the quotes'),
        ('[cache]\n"cache.mode" = "exact"', r"cache\.cache\.mode \(did you mean cache\.mode\?\)"),
        ('upstream = "http://a"', r"upstream must be a table: \[upstream\]"),
        ("[upstream", "is not valid TOML"),
        ('[upstream]\nurl = "http://a"\n[upstream]', "is not valid TOML"),
    ],
)
def test_an_unknown_or_malformed_setting_in_a_file_is_an_error_naming_it(write: Write, content: str, message: str) -> None:
    write(content)
    with pytest.raises(SettingsError, match=message):
        Settings()
    with pytest.raises(AssertionError, match=message):
        run("serve", "--upstream", "http://x")


@pytest.mark.parametrize("path", ["/nowhere/responses-mw.toml", "/"])
def test_an_unreadable_file_is_an_error(path: str) -> None:
    with pytest.raises(AssertionError, match=rf"^responses-mw serve: {path} \(config\) cannot be read: "):
        run("serve", "--config", path)


def test_a_binary_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(AssertionError, match="is not valid TOML"):
        run("serve", "--config", str(path))


def test_an_invalid_value_in_a_file_is_an_error(write: Write) -> None:
    write('[cache]\nttl = "7 fortnights"')
    with pytest.raises(ValidationError, match=r"cache\.ttl"):
        Settings()


def test_check_prints_the_source_of_each_setting(
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    upstream: ScriptedUpstream,
    serve: Serve,
    redis_url: str,
) -> None:
    path = write('[state]\nttl = 60\n[cache]\nttl = 7\nmode = "off"\n[server]\nlog_format = "json"')
    monkeypatch.setenv("RESPONSES_MW_CACHE_TTL", "8")
    monkeypatch.setenv("RESPONSES_MW_SERVER_LOG_FORMAT", "json")
    monkeypatch.setenv("RESPONSES_MW_REDIS_URL", redis_url)
    run("serve", "--check", "--port=0", "--upstream", serve(upstream), "--server.log-format", "human", "--jobs.lease", "20")
    told = capsys.readouterr().out.partition("upstream:")[0].splitlines()
    assert [line.strip() for line in told] == [
        "settings: valid",
        "config from RESPONSES_MW_CONFIG",
        "port from a flag",
        "upstream.url from a flag",
        "redis.url from RESPONSES_MW_REDIS_URL",
        f"state.ttl from {path}",
        "jobs.lease from a flag",
        "cache.ttl from RESPONSES_MW_CACHE_TTL",
    ]


def test_check_prints_the_file_selected_by_the_config_flag(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], upstream: ScriptedUpstream, serve: Serve
) -> None:
    path = write("[limits]\nstreams = 3")
    monkeypatch.delenv("RESPONSES_MW_CONFIG")
    with suppress(SystemExit):
        run("serve", "--check", "--port=0", "--upstream", serve(upstream), "--config", str(path))
    assert f"limits.streams from {path}" in capsys.readouterr().out


# -- unknown variables ----------------------------------------------------------------------------------------------------

WRONG = {"CACHE_MOD": "exact", "UPSTREAM_TIME": "1", "SANDBOX_URL": "http://sandbox", "FROBNICATE": "x"}


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WRONG.items():
        monkeypatch.setenv(f"RESPONSES_MW_{name}", value)


@pytest.mark.usefixtures("wrong")
def test_unknown_variables_are_one_warning_with_suggestions(caplog: pytest.LogCaptureFixture) -> None:
    async def app(*_: object) -> None: ...

    settings = ResponsesMiddleware(app).settings
    assert settings.cache.mode == "off"
    [warning] = [record for record in caplog.records if "unknown" in record.message]
    assert warning.levelname == "WARNING"
    assert "RESPONSES_MW_CACHE_MOD (did you mean RESPONSES_MW_CACHE_MODE?)" in warning.message
    assert "RESPONSES_MW_UPSTREAM_TIME (did you mean RESPONSES_MW_UPSTREAM_TIMEOUT?)" in warning.message
    assert "RESPONSES_MW_FROBNICATE" in warning.message
    assert "exact" not in warning.message


@pytest.mark.usefixtures("wrong")
def test_check_fails_if_there_are_unknown_variables(
    redis_url: str, capsys: pytest.CaptureFixture[str], upstream: ScriptedUpstream, serve: Serve
) -> None:
    with pytest.raises(AssertionError):
        run("serve", "--upstream", serve(upstream), "--redis", redis_url, "--check", "--port=0")
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert all(f"RESPONSES_MW_{name}" in told for name in WRONG)
    assert "RESPONSES_MW_SANDBOX_URL (did you mean RESPONSES_MW_TOOLS_SANDBOX_URL?)" in told


def test_variables_of_other_commands_cause_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("SANDBOX_MAX_CONTAINERS", "HOST", "PORT", "DEMO_PORT"):
        monkeypatch.setenv(f"RESPONSES_MW_{name}", "1")
    Settings.from_environment()
    assert not caplog.records


def test_a_variable_named_after_a_group_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESPONSES_MW_UPSTREAM", "http://vllm:8000")
    with pytest.raises(AssertionError, match=r"RESPONSES_MW_UPSTREAM names a group.*RESPONSES_MW_UPSTREAM_URL"):
        run("serve")


def test_service_variables_of_kubernetes_are_ignored_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for service, port in (("", 8080), ("SANDBOX_", 8090), ("REDIS_", 6379), ("WORKER_ADMIN_", 9090)):
        links = {
            "SERVICE_HOST": "10.0.0.1",
            "SERVICE_PORT": str(port),
            "SERVICE_PORT_HTTP": str(port),
            "PORT": f"tcp://10.0.0.1:{port}",
            f"PORT_{port}_TCP": f"tcp://10.0.0.1:{port}",
            f"PORT_{port}_TCP_PROTO": "tcp",
            f"PORT_{port}_TCP_PORT": str(port),
            f"PORT_{port}_TCP_ADDR": "10.0.0.1",
        }
        for name, value in links.items():
            monkeypatch.setenv(f"RESPONSES_MW_{service}{name}", value)
    assert Settings.from_environment() == Settings()
    assert SandboxSettings().port == 8090
    assert not caplog.records
    with pytest.raises(AssertionError, match="no upstream is set"):  # RESPONSES_MW_PORT is ignored
        run("serve")


def test_the_port_can_be_set_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESPONSES_MW_PORT", "lots")
    with pytest.raises(AssertionError, match="port"):
        run("serve", "--upstream", "http://x")


def test_mcp_servers_are_json_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESPONSES_MW_TOOLS_MCP_SERVERS", json.dumps({"a": {"url": "http://a"}}))
    monkeypatch.setenv("responses_mw_cache_mode", "exact")
    settings = Settings()
    assert (settings.tools.mcp_servers["a"].url, settings.cache.mode) == ("http://a", "exact")


@pytest.mark.parametrize(("text", "size"), [("1Gi", 1024**3), ("1GiB", 1024**3), ("64Ki", 64 * 1024), ("2MB", 2_000_000)])
def test_a_size_may_have_the_units_of_kubernetes(text: str, size: int) -> None:
    assert Settings(limits={"memory_bytes": text}).limits.memory_bytes == size
