"""Fixtures: commands as processes, and their output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.servers import PATIENCE


class Command:
    """A running command; `output` is what it has printed and logged so far."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "responses_mw", *arguments],
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

        def launch(*arguments: str) -> Command:
            command = Command(tmp_path_factory.mktemp("c") / "log", *arguments)
            stack.callback(command.process.wait)
            stack.callback(command.process.kill)
            return command

        yield launch
