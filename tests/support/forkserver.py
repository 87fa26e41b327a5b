"""Run `responses-mw` in processes forked from one that has imported it, which saves half a second of CPU time each.

A forked process does what `python -m responses_mw` does after its imports, until the interpreter ends. tests/cli, tests/settings
and tests/demo start commands as a user does.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Self

import responses_mw.__main__
from tests.support.paths import ROOT

PATIENCE = 60.0

SERVER = (
    "responses_mw.cli",
    "responses_mw.server.protocols",
    "uvloop",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk.trace.export",
)
"""The modules that a server imports whose telemetry is exported."""


class ForkServer:
    """A process that imports `modules` and then forks on request. The context manager starts and ends it."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules

    def __enter__(self) -> Self:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forkserver", *self._modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=PATIENCE)

    def start(
        self, *arguments: str, env: dict[str, str] | None = None, stdout: Path | None = None, stderr: Path | None = None
    ) -> Forked:
        """Start `responses-mw *arguments` with the variables `env`. Write its output to these files, or discard it."""
        files = [os.devnull, *(str(path or os.devnull) for path in (stdout, stderr))]
        return Forked(self, self.ask({"arguments": arguments, "env": {**os.environ, **(env or {})}, "files": files}))

    def run(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run `responses-mw *arguments` with the variables `env` to its end, as `subprocess.run` does."""
        with TemporaryDirectory() as folder:
            files = Path(folder, "stdout"), Path(folder, "stderr")
            process = self.start(*arguments, env=env, stdout=files[0], stderr=files[1])
            try:
                status = process.wait()
            finally:
                process.kill()
            return subprocess.CompletedProcess(arguments, status, *(path.read_text() for path in files))

    def ask(self, request: dict[str, Any]) -> Any:
        with self._lock:
            requests, replies = self._process.stdin, self._process.stdout
            assert requests is not None
            assert replies is not None
            requests.write(json.dumps(request) + "\n")
            requests.flush()
            return json.loads(replies.readline())


@dataclass
class Forked:
    """A forked process, with the methods of `subprocess.Popen`."""

    _server: ForkServer
    pid: int
    returncode: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._server.ask({"status_of": self.pid})
            return self.returncode

    def wait(self, timeout: float = PATIENCE) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("responses-mw", timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = subprocess.Popen[bytes] | Forked
"""A process that was started or forked."""


def _serve(requests: IO[str]) -> list[str]:
    """Answer requests until the tests have ended. Return only in a forked process, with the arguments of its command."""
    for line in requests:
        request = json.loads(line)
        if "status_of" in request:
            pid, status = os.waitpid(request["status_of"], os.WNOHANG)
            reply = os.waitstatus_to_exitcode(status) if pid else None
        else:
            reply = os.fork()
            if not reply:
                _become(request["env"], request["files"])
                arguments: list[str] = request["arguments"]
                return arguments
        print(json.dumps(reply), flush=True)
    os._exit(0)


def _become(env: dict[str, str], files: list[str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    for number, path in enumerate(files):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)


if __name__ == "__main__":
    gc.disable()
    for module in sys.argv[1:]:
        import_module(module)
    gc.freeze()
    sys.argv[1:] = _serve(sys.stdin)
    responses_mw.__main__.main()
