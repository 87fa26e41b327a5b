"""Settings and the command line made from them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.applications import Starlette

from benchmarks.processes import free_port
from responses_mw import ResponsesMiddleware, Settings
from responses_mw.asgi.access import APIKeyMiddleware
from responses_mw.auth import APIKeys
from responses_mw.cli import main
from responses_mw.settings import groups
from tests.support.configured import make_settings
from tests.support.scripted import TINY, completion

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("RESPONSES_MW_"):
            monkeypatch.delenv(name)


def run(*arguments: str) -> int:
    """Run a command and return its exit status, which is 1 for an error message, as in Python."""
    try:
        main(arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


# -- environment --------------------------------------------------------------------------------------------------------------


def test_settings_can_be_set_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "UPSTREAM_URL": "http://vllm:8000/v1/", "UPSTREAM_API_KEY": "secret", "UPSTREAM_DIALECT": "vllm",
        "UPSTREAM_STATUS_GRACE": "0.2", "SERVER_BASE_PATH": "/openai/", "STATE_REQUIRED": "true",
        "LIMITS_MAX_REQUEST_BYTES": "1000", "SERVER_LOG_LEVEL": "debug",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(f"RESPONSES_MW_{name}", value)
    settings = Settings()
    assert settings.upstream.url == ("http://vllm:8000",)
    assert settings.upstream.api_key is not None
    assert settings.upstream.api_key.get_secret_value() == "secret"
    assert (settings.upstream.dialect, settings.upstream.status_grace, settings.server.base_path) == ("vllm", 0.2, "/openai")
    assert (settings.state.required, settings.limits.max_request_bytes, settings.server.log_level) == (True, 1000, "debug")


@pytest.mark.parametrize(
    "value",
    [
        "https://a.example,https://b.example",
        ' ["https://a.example", "https://b.example"]',
        "https://a.example , https://b.example,",
    ],
)
def test_lists_are_comma_separated_or_json(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("RESPONSES_MW_SERVER_CORS_ORIGINS", value)
    assert Settings().server.cors_origins == ["https://a.example", "https://b.example"]


def test_an_empty_value_is_an_empty_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESPONSES_MW_UPSTREAM_FORWARD_HEADERS", "")
    assert Settings().upstream.forward_headers == []


def test_names_of_forwarded_headers_are_case_insensitive() -> None:
    assert make_settings(upstream__forward_headers="X-Mine, x-yours").upstream.forward_headers == ["x-mine", "x-yours"]


def test_durations_and_sizes_may_have_a_unit() -> None:
    settings = make_settings(
        state__ttl="7d", upstream__timeout="1.5m", upstream__status_grace="50ms", redis__timeout="3",
        limits__max_request_bytes="64MiB", cache__max_owner_bytes="1GB", limits__stored_bytes=7,
    )  # fmt: skip
    assert settings.state.ttl == 7 * 24 * 3600
    assert (settings.upstream.timeout, settings.upstream.status_grace, settings.redis.timeout) == (90, 0.05, 3)
    assert (settings.limits.max_request_bytes, settings.cache.max_owner_bytes, settings.limits.stored_bytes) == (
        64 << 20,
        10**9,
        7,
    )


def test_secrets_are_not_shown() -> None:
    assert "sesame" not in repr(make_settings(upstream__api_key="sesame", redis__url="redis://:sesame@host"))


def test_the_middleware_without_settings_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM creates the middleware with the application as its only argument."""
    monkeypatch.setenv("RESPONSES_MW_SERVER_BASE_PATH", "/llm")

    async def app(*_: object) -> None: ...

    assert ResponsesMiddleware(app).settings.server.base_path == "/llm"


@pytest.mark.parametrize(
    "settings",
    [
        {"upstream__url": "vllm:8000"},
        {"upstream__url": "ftp://vllm"},
        {"upstream__url": "http://vllm?version=1"},
        {"upstream__url": "http://token@vllm"},
        {"upstream__url": "http://:password@vllm"},
        {"upstream__url": "http://user:password@vllm"},
        {"search__url": "http://searxng/#top"},
        {"upstream__dialect": "klingon"},
        {"server__base_path": "openai"},
        {"upstream__status_grace": -1},
        {"upstream__timeout": 0},
        {"limits__max_request_bytes": 0},
        {"server__cors_origins": "[1"},
        {"auth__secret_keys": "short"},
        {"upstream__forward_headers": "x-mine,Content-Length"},
        {"no_such_group": 1},
        {"cache__no_such_setting": 1},
        {"state__ttl": "7 fortnights"},
        {"limits__max_request_bytes": "64 acres"},
    ],
)
def test_an_invalid_value_is_an_error_naming_the_setting(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(settings)).replace("__", r"\.")):
        make_settings(**settings)


# -- command line -------------------------------------------------------------------------------------------------------------


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--help") == 0
    told = capsys.readouterr().out
    for group, settings in groups(Settings).items():
        for name, setting in settings.model_fields.items():
            assert f"--{group}.{name.replace('_', '-')}" in told
            assert setting.description
    assert told.startswith("usage: responses-mw serve [options]\n")
    assert "RESPONSES_MW_" in told


def test_help_groups_the_options_and_shows_the_kind_of_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--help") == 0
    told = capsys.readouterr().out
    sections = [
        line.removesuffix(":") for line in told.splitlines() if line.endswith(":") and not line.startswith((" ", "Serve"))
    ]
    assert sections == ["options", *(f"{group} options" for group in groups(Settings))]
    for flag in (
        "--upstream.timeout SECONDS",
        "--limits.max-request-bytes SIZE",
        "--server.cors-origins A,B,...",
        "--host ADDRESS",
    ):
        assert f"  {flag} " in told.replace("\n", " ")
    assert re.search(r"  --upstream( URL)?, --upstream\.url URL\s", told)  # Python 3.13 names the value only once
    for noise in ("null", "False", "SecretStr", "list[", "['"):
        assert noise not in told


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_without_a_command_the_available_commands_are_printed(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert run(*arguments) == 0
    assert "serve" in capsys.readouterr().out


def test_an_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("dance") == 1
    assert "unknown command 'dance'" in capsys.readouterr().err


def test_serve_without_an_upstream_names_the_flag_that_sets_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve") == 1
    assert "--upstream" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--upstream", "vllm:8000"), "upstream"),
        (("--upstream", "http://user:password@x"), "upstream"),
        (("--upstream", "http://x", "--port", "lots"), "port"),
        (("--upstream", "http://x", "--port", "99999"), "port"),
        (("--upstream", "http://x", "--upstream.timeout", "0"), "upstream.timeout"),
        (("--upstream", "http://x", "--upstream.dialect", "klingon"), "dialect"),
        (("--upstream", "http://x", "--server.cors-origins", "[1"), "cors_origins"),
    ],
)
def test_an_invalid_flag_value_is_a_one_line_error(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    assert run("serve", *arguments) == 1
    message = capsys.readouterr().err
    assert told in message
    assert len(message.strip().splitlines()) == 1
    assert "Traceback" not in message


def test_an_unknown_flag_is_a_two_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--upstream", "http://x", "--dance", "1") != 0
    told = capsys.readouterr().err
    assert "--dance" in told
    assert len(told.splitlines()) == 2


def test_an_invalid_value_in_the_environment_is_a_one_line_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESPONSES_MW_UPSTREAM_STATUS_GRACE", "soon")
    assert run("serve", "--upstream", "http://x") == 1
    message = capsys.readouterr().err
    assert "status_grace" in message
    assert len(message.strip().splitlines()) == 1


# -- serve --check ------------------------------------------------------------------------------------------------------------


def test_check_prints_the_dialect_and_the_models(
    upstream: ScriptedUpstream, serve: Serve, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream.models = [TINY, {**TINY, "id": "huge"}]
    assert run("serve", "--upstream", serve(upstream), "--redis", redis_url, "--check", "--port=0") == 0
    told = capsys.readouterr().out
    assert "vllm" in told
    assert "tiny, huge" in told


def test_check_reports_an_unreachable_upstream(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert run("serve", "--upstream", url, "--redis", redis_url, "--check", "--port=0") == 1
    told = capsys.readouterr()
    assert url in told.err
    assert "cannot be reached" in told.err


def test_check_reports_a_url_that_is_not_an_upstream(serve: Serve, redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = serve(Starlette())
    assert run("serve", "--upstream", url, "--redis", redis_url, "--check", "--port=0") == 1
    assert url in capsys.readouterr().err


def test_check_names_the_flag_of_a_rejected_api_key(
    upstream: ScriptedUpstream, serve: Serve, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve(APIKeyMiddleware(upstream, APIKeys(["operator:sha256:" + "0" * 64])))
    assert run("serve", "--upstream", url, "--redis", redis_url, "--check", "--port=0") == 1
    assert "--upstream.api-key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "told"),
    [("--auth.api-keys=@/nowhere", "auth.api_keys"), ("--server.prompts-dir=/nowhere", "prompts_dir")],
)
def test_check_names_the_setting_of_a_missing_file(
    upstream: ScriptedUpstream, serve: Serve, redis_url: str, capsys: pytest.CaptureFixture[str], flag: str, told: str
) -> None:
    assert run("serve", "--upstream", serve(upstream), "--redis", redis_url, "--check", "--port=0", flag) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://", "http://[", "http://a b"])
def test_check_reports_an_invalid_url_without_a_traceback(redis_url: str, capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert run("serve", "--upstream", url, "--redis", redis_url, "--check", "--port=0") == 1
    message = capsys.readouterr().err
    assert "upstream" in message
    assert "Traceback" not in message


# -- process ------------------------------------------------------------------------------------------------------------------


def test_the_module_can_be_run() -> None:
    done = subprocess.run([sys.executable, "-m", "responses_mw"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: responses-mw")


def test_serve_answers_requests_until_sigterm(upstream: ScriptedUpstream, serve: Serve, redis_url: str) -> None:
    port = free_port()
    upstream.whole(completion({"content": "Hello"}))
    command = [sys.executable, "-m", "responses_mw", "serve", "--upstream", serve(upstream), "--port", str(port)]
    process = subprocess.Popen([*command, "--redis", redis_url], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False) as client:
            _wait_for(client)
            response = client.post("/v1/responses", json={"input": "Hi", "model": "tiny"})
            assert response.json()["output_text"] == "Hello"
            assert "server" not in response.headers
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM)
    assert f"http://127.0.0.1:{port}/v1" in output
    assert "Traceback" not in output


def test_a_missing_package_is_reported_with_the_extra_to_install() -> None:
    hidden = "import sys; sys.modules['uvicorn'] = None; from responses_mw.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", hidden, "serve", "--upstream", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "responses-mw serve needs uvicorn: install responses-mw with the extra 'all' (in a clone: pip install '.[all]')"
    )
    assert "Traceback" not in done.stderr


def test_a_startup_failure_is_reported_without_a_traceback(redis_url: str) -> None:
    command = [sys.executable, "-m", "responses_mw", "serve", "--upstream", "http://127.0.0.1:9", "--port", "0"]
    options = ["--redis", redis_url, "--server.prompts-dir", "/nowhere"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "prompts_dir: No such file or directory: /nowhere" in done.stderr
    assert "Traceback" not in done.stderr
    assert 'File "' not in done.stderr


def _wait_for(client: httpx.Client) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            client.get("/v1/models")
        except httpx.TransportError:
            time.sleep(0.05)
        else:
            return
    raise TimeoutError("the server did not start")
