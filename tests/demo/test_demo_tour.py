"""The tour as a user starts it: a process that shows the stops, checks them, and leaves nothing running."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import openai
import psutil
import pytest

from responses_mw.demo import tour
from responses_mw.demo.servers import demo_upstream

if TYPE_CHECKING:
    from collections.abc import Iterator

DEMO = [sys.executable, "-m", "responses_mw", "demo", "--port", "0"]


@pytest.fixture
def staying() -> Iterator[subprocess.Popen[str]]:
    """A demo that has made its tour and stays up."""
    with subprocess.Popen(DEMO, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("The demo stays up"):
                break
        try:
            yield process
        finally:
            process.kill()


def test_once_makes_every_stop_and_ends_with_status_0() -> None:
    done = subprocess.run([*DEMO, "--once"], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("   ok: ") == len(tour.STOPS)
    assert "17 * 23 + 9 = 400." in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_and_its_server(staying: subprocess.Popen[str], number: signal.Signals) -> None:
    children = psutil.Process(staying.pid).children(recursive=True)
    assert children
    staying.send_signal(number)
    assert staying.wait(20) == (0 if number == signal.SIGINT else 128 + number)
    _, alive = psutil.wait_procs(children, timeout=1)
    assert alive == []


def test_a_taken_port_is_told_and_ends_with_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*DEMO[:-1], str(port), "--once"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"The tour cannot start: cannot serve at 127.0.0.1, port {port}")


def test_stops_that_do_not_see_what_they_expect_fail_the_tour(capsys: pytest.CaptureFixture[str]) -> None:
    with demo_upstream(pace=0) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        status = tour.visit(client)  # the upstream alone has no Responses API: every stop must fail
    printed = capsys.readouterr().out
    assert status == 1
    assert printed.count("FAILED: ") == len(tour.STOPS)
    assert "FAILED: expected the message to name the model" in printed
