"""Runs code like a notebook: cell by cell in one namespace. The value of a cell's last expression is its result.

A frame on the channel is a length (four bytes, big-endian) followed by JSON: ``{"nonce", "code"}`` in, ``{"nonce", "result",
"error", "files"}`` out. The code runs in this process and can forge frames, but only to misreport its own results.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import linecache
import os
import stat
import sys
import traceback
from collections.abc import Iterator
from types import CodeType, ModuleType, TracebackType
from typing import Any

MAX_FILES = 100
_MAX_SCANNED = 20_000
_MAX_NAME = 1024
_LENGTH = 4

Listing = dict[str, tuple[int, int]]


def prepare(directory: str, packages: list[str]) -> None:
    """Set the environment variables of the code and its child processes, and the import path."""
    os.environ.clear()
    os.environ.update(
        HOME=directory,
        PATH="/usr/local/bin:/usr/bin:/bin",
        LANG="C.UTF-8",
        USER="sandbox",
    )
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)] + packages
    sys.argv[:] = [""]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # normally set by the site module


def serve(channel: int, directory: str, output_bytes: int) -> None:
    """Run the cells that arrive until the channel is closed."""
    os.set_inheritable(channel, False)
    process = os.getpid()
    notebook = Notebook(output_bytes)
    with open(channel, "rb", buffering=0) as requests:
        while True:
            request = json.loads(_exactly(requests, int.from_bytes(_exactly(requests, _LENGTH), "big")))
            before = dict(_files(directory))
            result, error = notebook.run(request["code"])
            if os.getpid() != process:  # a child forked by the code has reached the end of the cell
                os._exit(0)
            after = _files(directory)
            files = [(name, seen[0]) for name, seen in after if before.get(name) != seen]
            reply = {"nonce": request["nonce"], "result": result, "error": error, "files": files[:MAX_FILES]}
            frame = json.dumps(reply).encode("ascii")
            _write_all(channel, len(frame).to_bytes(_LENGTH, "big") + frame)


def _exactly(requests: Any, size: int) -> bytes:
    read = b""
    while len(read) < size:
        part = requests.read(size - len(read))
        if not part:
            os._exit(0)
        read += part
    return read


def _write_all(channel: int, frame: bytes) -> None:
    while frame:
        frame = frame[os.write(channel, frame) :]


class Notebook:
    """A namespace in which cells run."""

    def __init__(self, output_bytes: int) -> None:
        self._output_bytes = output_bytes
        self._cells = 0
        self._module = ModuleType("__main__")  # pickle looks here for the classes of cells
        self._module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self._module

    def run(self, code: str) -> tuple[str | None, str | None]:
        """Run a cell. Return the repr of its last expression and the traceback of its error, each None if there is none."""
        self._cells += 1
        name = f"<cell {self._cells}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        try:
            return self._evaluate(*_compiled(code, name)), None
        except BaseException as error:  # noqa: BLE001 (including SystemExit and KeyboardInterrupt: the notebook continues)
            return None, self._explained(error)

    def _evaluate(self, statements: CodeType, expression: CodeType | None) -> str | None:
        exec(statements, self._module.__dict__)  # noqa: S102 (its purpose)
        if expression is None:
            return None
        value = eval(expression, self._module.__dict__)  # noqa: S307
        self._module.__dict__["_"] = value
        return None if value is None else repr(value)[: self._output_bytes]

    def _explained(self, error: BaseException) -> str:
        try:
            lines = traceback.format_exception(type(error), error, _from_cell(error.__traceback__))
            text = "".join(lines)
        except BaseException:  # noqa: BLE001 (the methods of the code's exception run here)
            text = f"{type(error).__name__} (it cannot be shown)\n"
        text = text.replace(os.path.dirname(os.__file__), "<python>")  # noqa: PTH120 (hide the machine's paths)
        return text if len(text) <= self._output_bytes else "...\n" + text[-self._output_bytes :]


def _compiled(code: str, name: str) -> tuple[CodeType, CodeType | None]:
    tree = ast.parse(code, name)
    if not (tree.body and isinstance(tree.body[-1], ast.Expr)):
        return compile(tree, name, "exec", dont_inherit=True), None
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    expression = ast.Expression(last.value)
    return compile(tree, name, "exec", dont_inherit=True), compile(expression, name, "eval", dont_inherit=True)


def _from_cell(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without our own frames, or None if the code did not run."""
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
        trace = trace.tb_next
    return trace


def _files(directory: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name, size and modification time of each regular file. Links are neither followed nor listed."""
    scanned = 0
    folders = [directory]
    while folders:
        for path in _paths(folders.pop()):
            scanned += 1
            if scanned > _MAX_SCANNED or len(path) > _MAX_NAME:
                return
            with contextlib.suppress(OSError):  # removed by a thread of the code
                found = os.lstat(path)
                if stat.S_ISDIR(found.st_mode):
                    folders.append(path)
                elif stat.S_ISREG(found.st_mode):
                    yield os.path.relpath(path, directory), (found.st_size, found.st_mtime_ns)


def _paths(folder: str) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(folder)]
    except OSError:
        return []  # removed, or made unreadable by the code
