"""The tour as a user starts it: a process that prints the steps, checks them, and leaves nothing running."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import openai
import pytest

from responses_mw.demo import tour
from responses_mw.demo.deployment import Deployment, ModelServer, our_server
from responses_mw.demo.upstream import demo_upstream

if TYPE_CHECKING:
    from collections.abc import Iterator


def demo(*arguments: str, port: int = 0) -> list[str]:
    return [sys.executable, "-m", "responses_mw", "demo", "--port", str(port), *arguments]


SHORT = """
import sys
from responses_mw.demo import tour
tour.STEPS = tour.STEPS[:1]
sys.exit(tour.run_tour(False, "127.0.0.1", 0))
"""
"""A demo whose tour ends after its first step."""


@contextmanager
def demo_that_has_said(words: str, command: list[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A demo that was started and has come as far as these words, and the port of its server."""
    unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=unbuffered) as process:
        try:
            assert process.stdout is not None
            said = ""
            while words not in said:
                line = process.stdout.readline()
                assert line, f"the demo ended early, after:\n{said}"
                said += line
            yield process, int(re.findall(r"in front of it, at http://127.0.0.1:(\d+)", said)[0])
        finally:
            process.terminate()


def test_once_runs_every_step_and_ends_with_status_0() -> None:
    done = subprocess.run(demo("--once"), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("   ok: ") == len(tour.STEPS)
    assert "get_population says: city Lisbon, population 567131." in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "command", "number", "status"),
    [
        ("1. A streamed answer", demo(), signal.SIGTERM, 128 + signal.SIGTERM),
        ("The demo keeps running", [sys.executable, "-c", SHORT], signal.SIGINT, 0),
    ],
    ids=["during", "after"],
)
def test_a_signal_ends_the_demo_and_its_server_during_the_tour_and_after(
    words: str, command: list[str], number: signal.Signals, status: int
) -> None:
    with demo_that_has_said(words, command) as (process, port):
        socket.create_connection(("127.0.0.1", port)).close()
        process.send_signal(number)
        assert process.wait(60) == status
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_a_port_in_use_is_reported_and_the_exit_status_is_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(demo("--once", port=port), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("The tour cannot start: responses-mw serve ended with status 3")
    assert f"('127.0.0.1', {port}): address already in use" in done.stderr


def test_without_a_port_setting_a_free_port_is_used() -> None:
    with ExitStack() as stack:
        with suppress(OSError):  # another program may have it, which is as good
            stack.enter_context(socket.create_server(("127.0.0.1", 8080)))
        upstream = stack.enter_context(demo_upstream(pace=0))
        ours = stack.enter_context(our_server(upstream, "127.0.0.1", None))
        assert not ours.url.endswith(":8080")
        assert ours.client.models.list().data


def test_a_restarted_model_is_another_process_at_the_same_url() -> None:
    with ModelServer(pace=0) as model:
        url = model.url
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            question: list[Any] = [{"role": "user", "content": "Count to 9999"}]
            stream = client.chat.completions.create(model="demo", messages=question, stream=True)
            next(iter(stream))
            stream.close()
            model.restart()
            assert model.url == url
            assert client.models.list().data
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))


def test_steps_that_fail_fail_the_tour(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(site: Deployment) -> str:
        raise tour.CheckFailed("the right answer")

    monkeypatch.setattr(tour, "STEPS", (*tour.STEPS, ("A wrong answer", wrong)))
    with demo_upstream(pace=0) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        site = Deployment(client, client, lambda: None, lambda: None, f"{url}/metrics", f"{url}/ui", "redis://none")
        status = tour.run_steps(site)  # the upstream alone has no Responses API: every step must fail
    printed = capsys.readouterr().out
    assert status == 1
    assert printed.count("FAILED: ") == len(tour.STEPS)
    assert "FAILED: expected the right answer" in printed
