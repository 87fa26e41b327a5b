"""Settings, and the command line that is made of them."""

from __future__ import annotations

import os
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
    """The exit status of the command; a message of its own counts 1, as Python has it."""
    try:
        main(arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


# -- the environment ----------------------------------------------------------------------------------------------------------


def test_every_setting_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "UPSTREAM_URL": "http://vllm:8000/v1/", "UPSTREAM_API_KEY": "secret", "UPSTREAM_DIALECT": "vllm",
        "UPSTREAM_STATUS_GRACE": "0.2", "SERVER_BASE_PATH": "/openai/", "STATE_REQUIRED": "true",
        "LIMITS_MAX_REQUEST_BYTES": "1000", "SERVER_LOG_LEVEL": "debug",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(f"RESPONSES_MW_{name}", value)
    settings = Settings()
    assert settings.upstream.url == "http://vllm:8000"
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


def test_an_empty_list_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESPONSES_MW_UPSTREAM_FORWARD_HEADERS", "")
    assert Settings().upstream.forward_headers == []


def test_headers_are_named_in_whatever_case() -> None:
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


def test_the_middleware_reads_the_environment_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is how vLLM builds it: with the application, and nothing else."""
    monkeypatch.setenv("RESPONSES_MW_SERVER_BASE_PATH", "/llm")

    async def app(*_: object) -> None: ...

    assert ResponsesMiddleware(app).settings.server.base_path == "/llm"


@pytest.mark.parametrize(
    "settings",
    [
        {"upstream__url": "vllm:8000"},
        {"upstream__url": "ftp://vllm"},
        {"upstream__url": "http://vllm?version=1"},
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
def test_a_wrong_value_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(settings)).replace("__", r"\.")):
        make_settings(**settings)


# -- the command line ---------------------------------------------------------------------------------------------------------


def test_help_tells_of_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--help") == 0
    told = capsys.readouterr().out
    for group, settings in groups(Settings).items():
        for name, setting in settings.model_fields.items():
            assert f"--{group}.{name.replace('_', '-')}" in told
            assert setting.description
    assert told.startswith("usage: responses-mw serve [options]\n")
    assert "RESPONSES_MW_" in told


def test_help_is_in_groups_and_says_what_a_value_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--help") == 0
    told = capsys.readouterr().out
    sections = [
        line.removesuffix(":") for line in told.splitlines() if line.endswith(":") and not line.startswith((" ", "Serve"))
    ]
    assert sections == ["options", *(f"{group} options" for group in groups(Settings))]
    for flag in (
        "--upstream URL, --upstream.url URL",
        "--upstream.timeout SECONDS",
        "--limits.max-request-bytes SIZE",
        "--server.cors-origins A,B,...",
        "--host ADDRESS",
    ):
        assert f"  {flag} " in told.replace("\n", " ")
    for noise in ("null", "False", "SecretStr", "list[", "['"):
        assert noise not in told


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_without_a_command_it_says_which_there_are(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    assert run(*arguments) == 0
    assert "serve" in capsys.readouterr().out


def test_an_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("dance") == 1
    assert "unknown command 'dance'" in capsys.readouterr().err


def test_without_an_upstream_it_says_how_to_set_one(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_wrong_flag_is_told_in_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str) -> None:
    assert run("serve", *arguments) == 1
    message = capsys.readouterr().err
    assert told in message
    assert len(message.strip().splitlines()) == 1
    assert "Traceback" not in message


def test_an_unknown_flag_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--upstream", "http://x", "--dance", "1") != 0
    told = capsys.readouterr().err
    assert "--dance" in told
    assert len(told.splitlines()) == 2


def test_a_wrong_value_in_the_environment_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESPONSES_MW_UPSTREAM_STATUS_GRACE", "soon")
    assert run("serve", "--upstream", "http://x") == 1
    message = capsys.readouterr().err
    assert "status_grace" in message
    assert len(message.strip().splitlines()) == 1


# -- serve --check ------------------------------------------------------------------------------------------------------------


def test_check_says_what_it_found(
    upstream: ScriptedUpstream, serve: Serve, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream.models = [TINY, {**TINY, "id": "huge"}]
    assert run("serve", "--upstream", serve(upstream), "--redis", redis_url, "--check", "--port=0") == 0
    told = capsys.readouterr().out
    assert "vllm" in told
    assert "tiny, huge" in told


def test_check_says_that_the_upstream_is_away(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert run("serve", "--upstream", url, "--redis", redis_url, "--check", "--port=0") == 1
    told = capsys.readouterr()
    assert url in told.err
    assert "cannot be reached" in told.err


def test_check_says_that_the_url_is_wrong(serve: Serve, redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = serve(Starlette())
    assert run("serve", "--upstream", url, "--redis", redis_url, "--check", "--port=0") == 1
    assert url in capsys.readouterr().err


def test_check_says_whose_key_is_refused(
    upstream: ScriptedUpstream, serve: Serve, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve(APIKeyMiddleware(upstream, APIKeys(["operator:sha256:" + "0" * 64])))
    assert run("serve", "--upstream", url, "--redis", redis_url, "--check", "--port=0") == 1
    assert "--upstream.api-key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "told"),
    [("--auth.api-keys=@/nowhere", "auth.api_keys"), ("--server.prompts-dir=/nowhere", "prompts_dir")],
)
def test_check_says_which_file_is_missing(
    upstream: ScriptedUpstream, serve: Serve, redis_url: str, capsys: pytest.CaptureFixture[str], flag: str, told: str
) -> None:
    assert run("serve", "--upstream", serve(upstream), "--redis", redis_url, "--check", "--port=0", flag) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://", "http://[", "http://a b"])
def test_check_says_that_the_url_is_none(redis_url: str, capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert run("serve", "--upstream", url, "--redis", redis_url, "--check", "--port=0") == 1
    message = capsys.readouterr().err
    assert "upstream" in message
    assert "Traceback" not in message


# -- the process --------------------------------------------------------------------------------------------------------------


def test_the_module_can_be_run() -> None:
    done = subprocess.run([sys.executable, "-m", "responses_mw"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: responses-mw")


def test_serve_serves_until_it_is_told_to_stop(upstream: ScriptedUpstream, serve: Serve, redis_url: str) -> None:
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


def test_a_package_that_is_missing_is_named_with_what_to_install() -> None:
    hidden = "import sys; sys.modules['uvicorn'] = None; from responses_mw.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", hidden, "serve", "--upstream", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "responses-mw serve needs uvicorn: install responses-mw with the extra 'all'"
    assert "Traceback" not in done.stderr


def test_what_cannot_be_served_is_told_at_the_start_without_a_traceback(redis_url: str) -> None:
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
