"""`helm test` checks whether a deployment answers. The rendered program is run against real servers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from responses_mw.demo.deployment import our_server
from responses_mw.demo.upstream import demo_upstream
from tests.helm.rendering import REQUIRED, render


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with demo_upstream(0.0) as upstream, our_server(upstream, "127.0.0.1", 0) as ours:
        yield ours.url


def hook(url: str, model: str = "") -> subprocess.CompletedProcess[str]:
    [container] = render(REQUIRED).pods()["test"]["spec"]["containers"]
    assert container["command"] == ["python", "-c"]
    env = {**os.environ, "URL": url, "MODEL": model, "NO_PROXY": "*"}
    return subprocess.run([sys.executable, "-c", *container["args"]], env=env, capture_output=True, text=True, check=False)


def test_the_hook_creates_reads_continues_and_deletes_a_response(url: str) -> None:
    done = hook(url)
    assert done.returncode == 0, done.stderr
    assert "demo answered" in done.stdout


def test_the_hook_fails_with_the_reason_if_the_model_does_not_exist(url: str) -> None:
    done = hook(url, model="no-such-model")
    assert done.returncode == 1
    assert "no-such-model" in done.stderr


def test_the_hook_fails_if_no_server_listens() -> None:
    assert hook("http://127.0.0.1:9").returncode == 1
