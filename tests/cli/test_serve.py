"""Messages of `responses-mw serve` and `worker` when they start and stop."""

from __future__ import annotations

import json
import resource
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest

from benchmarks.processes import free_port
from responses_mw.app import check_platform
from responses_mw.cli.serve import allow_open_files
from tests.support.scripted import Signal, finish, text
from tests.support.servers import PATIENCE

if TYPE_CHECKING:
    from tests.cli.conftest import Launch
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve

SECRET = "a secret that all the replicas of the deployment have"


def test_the_startup_summary_names_the_address_the_base_path_and_the_main_settings(
    launch: Launch, serve: Serve, upstream: ScriptedUpstream
) -> None:
    url = serve(upstream)
    server = launch(
        "serve",
        f"--upstream={url}",
        "--redis=redis://default:geheim@127.0.0.1:1/0?protocol=2",
        "--port=0",
        "--server.base-path=/llm",
        "--limits.streams=7",
        "--search.provider=searxng",
        "--search.url=http://searx",
        '--tools.mcp-servers={"weather": {"url": "http://weather/mcp"}}',
        f"--auth.secret-keys={SECRET}",
    )
    listening = server.wait_for(r"listens on (http://127\.0\.0\.1:[1-9]\d+/llm)/v1\n")[1]
    server.wait_for("admin port")
    assert httpx.get(f"{listening}/v1/responses", verify=False, trust_env=False).status_code == 405
    for line in (
        rf"upstream +{url} \(vllm\)",
        r"store +redis://127\.0\.0\.1:1/0",
        r"tools +MCP weather; web search \(searxng\)",
        "cache +off",
        "keys +none: the upstream checks credentials; 1 secret key",
        "limits +7 streams per owner",
        "admin port +off",
    ):
        server.wait_for(rf"\n  {line}\n")
    assert server.end() == 0
    assert "geheim" not in server.output
    assert SECRET not in server.output


def test_the_startup_summary_is_one_json_line_if_logs_are_json(launch: Launch) -> None:
    server = launch("serve", "--upstream=http://127.0.0.1:1", "--port=0", "--server.log-format=json")
    server.wait_for("listens on")
    assert server.end() == 0  # after this, the last line is complete
    lines = [json.loads(line) for line in server.output.splitlines()]
    [start] = [line for line in lines if "listens on" in line["message"]]
    assert start["upstream"] == "http://127.0.0.1:1 (dialect not detected yet)"
    assert start["store"].startswith("embedded Valkey in memory")
    assert start["files"] == "in the store, up to 1 MiB each (vector stores use the embedding model builtin)"
    assert start["level"] == "info"


def test_a_server_that_cannot_open_its_port_does_not_report_that_it_listens(launch: Launch, redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = launch("serve", "--upstream=http://127.0.0.1:1", f"--redis={redis_url}", f"--port={port}")
        assert server.process.wait(PATIENCE) == 3
    assert "address already in use" in server.output
    assert "listens" not in server.output
    assert "Traceback" not in server.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopping_server_reports_the_requests_that_it_waits_for(
    launch: Launch, serve: Serve, upstream: ScriptedUpstream, redis_url: str, number: int
) -> None:
    server = launch("serve", f"--upstream={serve(upstream)}", f"--redis={redis_url}", "--port=0", "--server.drain-timeout=600")
    url = server.wait_for(r"listens on (\S+)")[1]
    go = Signal()
    answer = upstream.stream(text("Hel"), go, text("lo"), finish())
    with ThreadPoolExecutor(1) as pool, httpx.Client(verify=False, trust_env=False, timeout=PATIENCE) as client:
        asked = pool.submit(client.post, f"{url}/responses", json={"model": "tiny", "input": "Hi", "stream": True})
        while not answer.asked.is_set():
            assert not asked.done()
        server.process.send_signal(number)
        server.wait_for(r"stopping: waiting up to 600 s for 1 request; a second signal stops them now\n")
        go.set()
        assert '"lo"' in asked.result().text
    assert server.process.wait(PATIENCE) == 0
    assert "did not finish in time" not in server.output


def test_an_idle_server_stops_without_a_message(launch: Launch, redis_url: str) -> None:
    server = launch("serve", "--upstream=http://127.0.0.1:1", f"--redis={redis_url}", "--port=0")
    server.wait_for("admin port")
    assert server.end() == 0
    assert "stopping" not in server.output


def test_serve_and_worker_raise_the_limit_of_open_files_to_the_hard_limit(launch: Launch, redis_url: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    common = ("--upstream=http://127.0.0.1:1", f"--redis={redis_url}", f"--auth.secret-keys={SECRET}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    try:
        commands = [launch("serve", "--port=0", *common), launch("worker", *common)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for command, said in zip(commands, ("listens on", "runs background responses"), strict=True):
        command.wait_for(said)
        assert resource.prlimit(command.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_a_worker_prints_a_startup_summary(launch: Launch, redis_url: str) -> None:
    worker = launch("worker", "--upstream=http://127.0.0.1:1", f"--redis={redis_url}", f"--auth.secret-keys={SECRET}")
    worker.wait_for(r"responses-mw \S+ runs background responses\n")
    worker.wait_for(r"\n  background  up to 32 responses at a time\n")
    assert worker.end() == 0


def test_the_start_message_has_the_url_of_the_inspector(launch: Launch, redis_url: str) -> None:
    flags = ["--upstream=http://127.0.0.1:1", f"--redis={redis_url}", "--port=0", "--ui.mode=metadata"]
    port = free_port()
    local = launch("serve", *flags, f"--server.admin-port={port}")
    remote = launch("serve", *flags, f"--server.admin-port={free_port()}", "--server.admin-host=0.0.0.0")
    local.wait_for(rf"\n  inspector   +http://127.0.0.1:{port}/ui\n")
    remote.wait_for(r"\n  inspector   +closed: set ui.token\n")


def test_a_worker_without_redis_warns_once_a_minute(launch: Launch) -> None:
    flags = [f"--auth.secret-keys={SECRET}", "--redis=redis://127.0.0.1:1", "--server.log-level=debug"]
    worker = launch("worker", "--upstream=http://127.0.0.1:1", *flags)
    worker.wait_for(r"DEBUG responses_mw\.jobs\.queue_worker: cannot claim background responses: .* the connection was refused")
    assert worker.output.count("WARNING responses_mw.jobs.queue_worker: cannot claim background responses") == 1


def test_a_low_limit_of_open_files_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    for hard, warns in ((1024, True), (65_536, False), (resource.RLIM_INFINITY, False)):
        caplog.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (hard, hard))
        allow_open_files()
        assert ["this process may open only 1024 files" in message for message in caplog.messages] == [True] * warns


def test_starting_on_windows_logs_that_it_is_not_supported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check_platform()
    assert not caplog.messages
    monkeypatch.setattr("platform.system", lambda: "Windows")
    check_platform()
    assert "Windows is not supported" in caplog.text
