"""Put uploaded files into the container of the code interpreter.

The sandbox cannot receive files, so code that runs in the container writes them piece by piece. A file that already exists in
the container is not written again, because the model's code may have changed it.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ..errors import BadRequest, NotFound, TooLarge
from ..protocol.search_results import plain
from .stores import FileReader

if TYPE_CHECKING:
    from mcp_types import CallToolResult

MAX_FILES = 50
MAX_BYTES = 32 * 1024 * 1024
"""Maximum total size in bytes of the files of a container."""
_PIECE = 256 * 1024
_OPEN = "__import__('io').open"  # the model's code may have a variable `open`
_MAX_NAME, _MAX_SUFFIX = 200, 16  # bytes. File systems allow 255, of which the numbers of `_unused` need some
_NOT_IN_NAMES = re.compile(r"[\x00-\x1f\x7f/<>|｜【】]")  # the model sees the names

RunCode = Callable[[str], Awaitable["CallToolResult"]]
"""Runs code in the container, and returns the sandbox's result."""


class NotWritten(Exception):
    """A file could not be written. `result` is the result of the code that should have written it."""

    def __init__(self, name: str, result: CallToolResult) -> None:
        lines = str((result.structured_content or {}).get("error") or "").strip().splitlines()
        super().__init__(": ".join([f"The file {name!r} could not be put into the container", *lines[-1:]]))
        self.result = result


class ContainerFiles:
    """The files with these ids, which must belong to `owner`."""

    def __init__(self, file_ids: Sequence[str], reader: FileReader, owner: str) -> None:
        self._ids = dict[str, int]()  # with the place of each one
        for index, file_id in enumerate(file_ids):
            self._ids.setdefault(file_id, index)
        self._reader = reader
        self._owner = owner
        self.names: dict[str, str] = {}
        """Maps the ids of the files to their names in the container, once `check` has been called."""

    async def check(self, path: str) -> None:
        """Check that the files exist. Raises `BadRequest` if the owner has no such file, or `TooLarge` if they are too large.

        `path` is the path of the ids in the request.
        """
        if self.names:
            return
        names, size = dict[str, str](), 0
        for file_id, index in self._ids.items():
            try:
                file = await self._reader.find(file_id, self._owner)
            except NotFound as error:
                raise BadRequest(error.message, param=f"{path}[{index}]", code="invalid_value") from None
            names[file_id] = _unused(_plain(file.filename) or file_id, names.values())
            size += file.size
        if size > MAX_BYTES:
            raise TooLarge(f"The files of the container are larger than {MAX_BYTES} bytes in total.", param=path)
        self.names = names

    async def write(self, run: RunCode) -> None:
        """Write the files that the container does not have. Raises `NotWritten`, or `APIError` if a file cannot be read."""
        for file_id, name in self.names.items():
            if await _value(run, name, f"__import__('os').path.exists({name!r})") != "True":
                await self._write(run, file_id, name)

    async def _write(self, run: RunCode, file_id: str, name: str) -> None:
        partial, mode = f".{file_id}-{secrets.token_hex(8)}", "wb"  # two runs with the same container may write the file
        async for chunk in await self._reader.chunks(file_id, self._owner):
            for begin in range(0, len(chunk), _PIECE):
                piece = base64.b64encode(chunk[begin : begin + _PIECE]).decode()
                await _value(run, name, f"{_OPEN}({partial!r}, {mode!r}).write(__import__('base64').b64decode({piece!r}))")
                mode = "ab"
        if mode == "wb":
            await _value(run, name, f"{_OPEN}({partial!r}, 'wb').close()")
        await _value(run, name, f"__import__('os').replace({partial!r}, {name!r})")


async def _value(run: RunCode, name: str, code: str) -> str | None:
    """Return the value of an expression in the container, as `repr` writes it."""
    result = await run(code)
    outcome = result.structured_content or {}
    if result.is_error or outcome.get("error"):
        raise NotWritten(name, result)
    value: str | None = outcome.get("result")
    return value


def _plain(name: str) -> str:
    """Return the last part of a path, without characters that are special in paths or in prompts."""
    last = plain(_NOT_IN_NAMES.sub("_", PurePosixPath(name.replace("\\", "/")).name))
    return "" if last in (".", "..") else _cut(last)


def _cut(name: str) -> str:
    """Cut a name to `_MAX_NAME` bytes, but keep its extension."""
    stem, dot, suffix = name.rpartition(".")
    end = dot + suffix if stem and len(suffix.encode(errors="replace")) <= _MAX_SUFFIX else ""
    begin = name[: len(name) - len(end)].encode(errors="replace")
    return begin[: _MAX_NAME - len(end.encode())].decode(errors="ignore") + end


def _unused(name: str, taken: Collection[str]) -> str:
    """Return the name, with a number if it is taken."""
    stem, dot, suffix = name.rpartition(".")
    number, new = 1, name
    while new in taken:
        number += 1
        new = f"{stem}-{number}.{suffix}" if dot and stem else f"{name}-{number}"
    return new
