"""Runs code as a notebook does: cell by cell in one namespace, the value of the last expression is the cell's result.

A frame on the channel is a length of four bytes, big-endian, and so much JSON. In come ``{"nonce", "code"}``; out go
``{"nonce", "result", "error", "files"}``. The code runs in this process and can write frames too: it can only lie about itself.
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

MOST_FILES = 100
_MOST_SCANNED = 20_000
_LONGEST_NAME = 1024
_LENGTH = 4

Listing = dict[str, tuple[int, int]]


def prepare(directory: str, packages: list[str]) -> None:
    """The environment that code and its child processes see, and where it imports from."""
    os.environ.clear()
    os.environ.update(
        HOME=directory,
        PATH="/usr/local/bin:/usr/bin:/bin",
        LANG="C.UTF-8",
        USER="sandbox",
    )
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)] + packages
    sys.argv[:] = [""]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # which the site module would have made


def serve(channel: int, directory: str, output_bytes: int) -> None:
    """Runs the cells that come in until the channel is closed."""
    os.set_inheritable(channel, False)
    process = os.getpid()
    notebook = Notebook(output_bytes)
    with open(channel, "rb", buffering=0) as requests:
        while True:
            request = json.loads(_exactly(requests, int.from_bytes(_exactly(requests, _LENGTH), "big")))
            before = dict(_files(directory))
            result, error = notebook.run(request["code"])
            if os.getpid() != process:  # a child that the code has forked, and that came out at the cell's end
                os._exit(0)
            after = _files(directory)
            files = [(name, seen[0]) for name, seen in after if before.get(name) != seen]
            reply = {"nonce": request["nonce"], "result": result, "error": error, "files": files[:MOST_FILES]}
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
    """A namespace, and what is needed to run cells in it and explain how they failed."""

    def __init__(self, output_bytes: int) -> None:
        self._output_bytes = output_bytes
        self._cells = 0
        self._module = ModuleType("__main__")  # where pickle looks for the classes that a cell defines
        self._module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self._module

    def run(self, code: str) -> tuple[str | None, str | None]:
        """The repr of the cell's last expression (None: it has none, or it is None), and the error, as a traceback."""
        self._cells += 1
        name = f"<cell {self._cells}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        try:
            return self._evaluate(*_compiled(code, name)), None
        except BaseException as error:  # noqa: BLE001 (also SystemExit and KeyboardInterrupt: the notebook goes on)
            return None, self._explained(error)

    def _evaluate(self, statements: CodeType, expression: CodeType | None) -> str | None:
        exec(statements, self._module.__dict__)  # noqa: S102 (what it is for)
        if expression is None:
            return None
        value = eval(expression, self._module.__dict__)  # noqa: S307
        self._module.__dict__["_"] = value
        return None if value is None else repr(value)[: self._output_bytes]

    def _explained(self, error: BaseException) -> str:
        try:
            lines = traceback.format_exception(type(error), error, _from_cell(error.__traceback__))
            text = "".join(lines)
        except BaseException:  # noqa: BLE001 (the exception's own methods are the code's, and run here)
            text = f"{type(error).__name__} (it cannot be shown)\n"
        text = text.replace(os.path.dirname(os.__file__), "<python>")  # noqa: PTH120 (the machine's paths are not shown)
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
    """The traceback without our own frames. None where the code did not get to run."""
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
        trace = trace.tb_next
    return trace


def _files(directory: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names, sizes and times of change of the regular files. Links are neither followed nor listed."""
    scanned = 0
    folders = [directory]
    while folders:
        for path in _paths(folders.pop()):
            scanned += 1
            if scanned > _MOST_SCANNED or len(path) > _LONGEST_NAME:
                return
            with contextlib.suppress(OSError):  # a thread of the code may just have removed it
                found = os.lstat(path)
                if stat.S_ISDIR(found.st_mode):
                    folders.append(path)
                elif stat.S_ISREG(found.st_mode):
                    yield os.path.relpath(path, directory), (found.st_size, found.st_mtime_ns)


def _paths(folder: str) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(folder)]
    except OSError:
        return []  # gone, or closed by the code to itself
