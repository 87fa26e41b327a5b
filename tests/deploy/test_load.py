"""The load script, run against real servers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from responses_mw.demo.deployment import our_server
from responses_mw.demo.upstream import demo_upstream
from tests.support.paths import ROOT

SCRIPT = ROOT / "deploy" / "load.py"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with demo_upstream(0.0) as upstream, our_server(upstream, "127.0.0.1", 0) as ours:
        yield ours.url


def load(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--seconds", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_load_script_reports_the_latency_of_streams_and_background_responses(url: str) -> None:
    done = load("--url", url, "--streams", "4", "--background", "2")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "demo: 4 responses" in done.stdout
    assert "response.completed   4" in done.stdout
    assert "first token" in done.stdout


def test_the_load_script_fails_if_responses_fail(url: str) -> None:
    done = load("--url", url, "--streams", "1", "--model", "no-such-model")
    assert done.returncode == 1
    assert "HTTP 404" in done.stdout
