"""Fixtures: commands as processes, and their output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from responses_mw.cli import main
from tests.support.servers import PATIENCE


class Command:
    """A running command; `output` is what it has printed and logged so far."""

    def __init__(self, log: Path, *arguments: str, files: int = 0) -> None:
        """`files` limits the number of open files, unless it is 0."""
        self._log = log
        limit = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh"] if files else []
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [*limit, sys.executable, "-m", "responses_mw", *arguments],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(log.parent)},
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the output contains the pattern."""
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.output)):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)
        return found

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


Launch = Callable[..., Command]


@pytest.fixture
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    with ExitStack() as stack:

        def launch(*arguments: str, files: int = 0) -> Command:
            command = Command(tmp_path_factory.mktemp("c") / "log", *arguments, files=files)
            stack.callback(command.process.wait)
            stack.callback(command.process.kill)
            return command

        yield launch


Print = Callable[..., str]


@pytest.fixture
def printed(redis_url: str, capsys: pytest.CaptureFixture[str]) -> Print:
    """Return a function that runs a command with the servers' Redis, checks its exit status, and returns what it prints."""

    def run(*arguments: str, status: int = 0) -> str:
        command = partial(main, [*arguments, "--redis", redis_url, "--redis.timeout", "20"])
        with ThreadPoolExecutor() as threads, pytest.raises(SystemExit) as end:  # the command has its own event loop
            threads.submit(command).result()
        captured = capsys.readouterr()
        assert end.value.code == status, captured
        return captured.out if status == 0 else captured.err

    return run
