"""Extract the text of documents.

Plain text is decoded here. Each other document is parsed in a process of its own (`sandbox/jail/parse.py`). That process cannot
open files, use the network or start processes, and its time, memory and output are limited.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import sysconfig
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

from ..tasks import by_size
from .fair_slots import FairSlots

logger = logging.getLogger(__name__)

MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
"""Maximum size in bytes of a document."""
MAX_TEXT_BYTES = 16 * 1024 * 1024
"""Maximum size in bytes of the text of a document."""
MAX_PARSERS = 2
"""Maximum number of documents that are parsed concurrently."""
_TIMEOUT = 90.0
_FAILED, _UNSUPPORTED = 3, 4  # exit statuses `FAILED` and `UNSUPPORTED` of `sandbox/jail/parse.py`
_LIMITS = {
    "cpu_seconds": 60,
    "memory_bytes": 1024**3,
    "disk_bytes": 0,
    "file_bytes": 0,
    "max_processes": 1,
    "max_open_files": 64,
}
_BOOT = (
    "import sys, json; sys.path.insert(0, sys.argv[1]); from jail.parse import main; sys.path.pop(0); "
    "packages = json.loads(sys.argv[4]); sys.path += packages; main(sys.argv[2], json.loads(sys.argv[3]), packages)"
)
_JAIL = str(Path(__file__).parents[1] / "sandbox")
_INHERITED = ("LD_LIBRARY_PATH",)  # the interpreter may need it to start
_UNKNOWN = "The file is neither UTF-8 text nor a document of a supported type."
_IMAGES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8")
_BINARY = (
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "The file has an old Office format: save it as DOCX, PPTX or XLSX."),
    *((magic, "The file is an image, and this server cannot recognize text in images.") for magic in _IMAGES),
    (b"\x1f\x8b", "It is compressed."),
)


Code: TypeAlias = Literal["invalid_file", "unsupported_file", "server_error"]


class ExtractionFailed(Exception):
    """The document has no text that can be extracted. The message is a sentence for the user."""

    def __init__(self, message: str, code: Code = "invalid_file") -> None:
        super().__init__(message)
        self.code = code


class Extractor:
    """Extracts the text of documents. Parses up to `MAX_PARSERS` documents concurrently.

    `recognize` gets the bytes and the name of an image or of a PDF file without text, and returns its text.
    """

    def __init__(self, recognize: Callable[[bytes, str], Awaitable[str]] | None = None) -> None:
        self._parsers = FairSlots(MAX_PARSERS)
        self._recognize = recognize

    async def extract(self, data: bytes, filename: str = "", owner: str = "") -> str:
        """Return the text of a document, which is never blank. Documents of different owners are parsed in turn.

        Raises `ExtractionFailed`.
        """
        if len(data) > MAX_DOCUMENT_BYTES:
            raise ExtractionFailed(f"The document is larger than {MAX_DOCUMENT_BYTES} bytes.")
        if self._recognize is not None and data.startswith(_IMAGES):
            return _not_blank(await self._recognize(data, filename))
        kind = await by_size(len(data), kind_of, data, filename)
        text = await by_size(len(data), _decode, data) if kind == "text" else await self._parse(data, kind, owner)
        if kind != "pdf" or text.strip():
            return _not_blank(text)
        if self._recognize is None:
            raise ExtractionFailed("The document contains no text. It may consist of scanned images.")
        return _not_blank(await self._recognize(data, filename))

    async def _parse(self, data: bytes, kind: str, owner: str) -> str:
        async with self._parsers.slot(owner):
            return await _parse(data, kind)


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ExtractionFailed("The document contains no text.")
    return text


def kind_of(data: bytes, filename: str = "") -> str:
    """Return the kind of a document: `text`, or the name of a format to parse. Raises `ExtractionFailed` for other files.

    The kind is detected from the content. The filename only distinguishes HTML from other text.
    """
    if b"%PDF-" in data[:1024]:
        return "pdf"
    if data.startswith(b"PK\x03\x04"):
        return "office"
    for magic, message in _BINARY:
        if data.startswith(magic):
            raise ExtractionFailed(message, "unsupported_file")
    start = data[:1024].lstrip(BOM_UTF8 + b" \t\r\n").lower()
    is_html = filename.lower().endswith((".html", ".htm", ".xhtml")) or start.startswith((b"<!doctype html", b"<html"))
    return "html" if is_html else "text"


def _decode(data: bytes) -> str:
    encoding = "utf-16" if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        raise ExtractionFailed(_UNKNOWN, "unsupported_file") from None
    if "\0" in text:
        raise ExtractionFailed(_UNKNOWN, "unsupported_file")
    if len(text) > MAX_TEXT_BYTES:
        raise ExtractionFailed(f"The text of the document is longer than {MAX_TEXT_BYTES} bytes.")
    return text


async def _parse(data: bytes, kind: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", _BOOT, _JAIL, kind, json.dumps(_LIMITS), json.dumps(_packages())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: os.environ[name] for name in _INHERITED if name in os.environ},
        cwd="/",
    )
    try:
        async with asyncio.timeout(_TIMEOUT):
            output, errors = await _communicate(process, data)
            status = await process.wait()
    except TimeoutError:
        raise ExtractionFailed("Reading the document takes too long.") from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if status in (_FAILED, _UNSUPPORTED):
        message = errors.decode(errors="replace").strip() or "The document is malformed."
        raise ExtractionFailed(message, "unsupported_file" if status == _UNSUPPORTED else "invalid_file")
    if status < 0:  # a signal: it exceeded a limit, or the parser crashed
        raise ExtractionFailed("Reading the document takes too much time or memory.")
    if status != 0:
        reason = (errors.decode(errors="replace").strip().splitlines() or [""])[-1]
        logger.error("documents cannot be parsed, because the parser process does not start: %s", reason)
        raise ExtractionFailed("This server cannot read documents.", "server_error")
    return output.decode(errors="replace")


async def _communicate(process: asyncio.subprocess.Process, data: bytes) -> tuple[bytes, bytes]:
    """Write `data` to the process. Return its standard output and the beginning of its standard error."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None

    async def feed(stdin: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):  # the process has ended; its standard error gives the reason
            stdin.write(data)
            await stdin.drain()
        stdin.close()

    output = bytearray()
    async with asyncio.TaskGroup() as group:
        group.create_task(feed(process.stdin))
        complaints = group.create_task(_beginning(process.stderr, 4096))
        while chunk := await process.stdout.read(64 * 1024):
            output += chunk
            if len(output) > MAX_TEXT_BYTES:
                with suppress(ProcessLookupError):
                    process.kill()
    if len(output) > MAX_TEXT_BYTES:
        raise ExtractionFailed(f"The text of the document is longer than {MAX_TEXT_BYTES} bytes.")
    return bytes(output), complaints.result()


async def _beginning(stream: asyncio.StreamReader, maximum: int) -> bytes:
    """Read a stream to its end, and return its first `maximum` bytes."""
    data = bytearray()
    while chunk := await stream.read(64 * 1024):
        data += chunk[: maximum - len(data)]
    return bytes(data)


def _packages() -> list[str]:
    """Return the directories from which the parser process may import packages, also if `PYTHONPATH` names them."""
    own = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    pdfium = find_spec("pypdfium2")
    return sorted(own if pdfium is None or pdfium.origin is None else own | {str(Path(pdfium.origin).parents[1])})
