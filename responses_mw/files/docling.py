"""Recognize the text of scanned documents and images (OCR) with docling-serve, API version 1.

    POST /v1/convert/source/async       the document as base64; returns the id of a task
    GET  /v1/status/poll/<id>?wait=5    `task_status`: pending, started, success, partial_success, skipped or failure
    GET  /v1/result/<id>                `document.md_content`

A task is polled because a document may take minutes, and the server ends synchronous requests after two minutes.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import orjson

from ..errors import Unavailable, UpstreamError
from ..network import failure_reason
from ..tasks import by_size
from .extraction import MAX_TEXT_BYTES, ExtractionFailed

logger = logging.getLogger(__name__)

Post: TypeAlias = Callable[[str, bytes], Awaitable[Any]]
Get: TypeAlias = Callable[[str], Awaitable[Any]]
"""Send a request to a path of the server, and return the decoded response. Raises `UpstreamError` if it fails."""

MAX_BYTES = 32 * 1024 * 1024
"""Maximum size in bytes of a document that is sent."""
_PAUSE = 0.5  # seconds between polls, if the server ignores `wait`
_RUNNING = ("pending", "started")
_TASK = re.compile(r"[\w-]{1,128}", re.ASCII)
_OPTIONS = {"to_formats": ["md"], "do_ocr": True, "image_export_mode": "placeholder"}


class Docling:
    """A client of docling-serve."""

    def __init__(self, post: Post, get: Get, *, timeout: float) -> None:
        """`timeout` is the maximum number of seconds for a document."""
        self._post = post
        self._get = get
        self._timeout = timeout

    async def read(self, data: bytes, filename: str) -> str:
        """Return the text of a document as Markdown. Raises `ExtractionFailed`, or `Unavailable` if this may succeed later."""
        if len(data) > MAX_BYTES:
            raise ExtractionFailed(f"The scanned document is larger than {MAX_BYTES} bytes.")
        try:
            async with asyncio.timeout(self._timeout):
                text = _text(await self._convert(await by_size(4 * len(data), _body, data, filename)))
        except TimeoutError:
            raise ExtractionFailed("Recognizing the text of the document takes too long.", "server_error") from None
        except UpstreamError as error:
            raise _failure(error) from error
        except (LookupError, TypeError):
            raise ExtractionFailed("docling-serve sent a malformed answer.", "server_error") from None
        if len(text) > MAX_TEXT_BYTES:
            raise ExtractionFailed(f"The text of the document is longer than {MAX_TEXT_BYTES} bytes.")
        return text

    async def check(self) -> None:
        """Check that the server is a docling-serve that accepts the API key. Raises what `read` raises."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._probe()
        except TimeoutError:
            raise Unavailable("The text recognition server did not answer in time.") from None
        except UpstreamError as error:
            raise _failure(error) from error
        except (LookupError, TypeError):
            raise ExtractionFailed("The text recognition server is not a docling-serve.", "server_error") from None

    async def _probe(self) -> None:
        """Get the health, and the status of an unknown task: only the latter needs the API key."""
        if (await self._get("/health"))["status"] != "ok":
            raise LookupError("the status is not 'ok'")
        try:
            await self._get("/v1/status/poll/00000000-0000-0000-0000-000000000000")
        except UpstreamError as error:
            if error.upstream_status != 404:
                raise

    async def _convert(self, body: bytes) -> Any:
        task = await self._post("/v1/convert/source/async", body)
        task_id = str(task["task_id"])
        if not _TASK.fullmatch(task_id):
            raise LookupError("the id of the task is malformed")
        while task["task_status"] in _RUNNING:
            await asyncio.sleep(_PAUSE)
            task = await self._get(f"/v1/status/poll/{task_id}?wait=5")
        if task["task_status"] == "failure":
            raise _task_failure(task)
        return await self._get(f"/v1/result/{task_id}")


def _body(data: bytes, filename: str) -> bytes:
    source = {"kind": "file", "base64_string": base64.b64encode(data).decode(), "filename": filename or "document"}
    return orjson.dumps({"sources": [source], "options": _OPTIONS})


def _task_failure(task: Any) -> Exception:
    """Return the error for a failed task. The server is the cause: for a malformed document, the task succeeds."""
    logger.warning("docling-serve (files.docling_url) has failed: %.200s", task.get("error_message") or "it does not say why")
    failure = task.get("failure")
    if isinstance(failure, dict) and failure.get("retryable"):
        return Unavailable("The text recognition server has failed.")
    return ExtractionFailed("The text recognition server has failed.", "server_error")


def _text(result: Any) -> str:
    if result["status"] in ("failure", "skipped"):
        raise ExtractionFailed("The text of the document could not be recognized.")
    text = result["document"]["md_content"]
    if not isinstance(text, str):
        raise TypeError("the text is not a string")
    return text


def _failure(error: UpstreamError) -> Exception:
    status = error.upstream_status
    if status is None:
        reason = failure_reason(error)
        return Unavailable(f"The text recognition server did not answer{f': {reason}' if reason else ''}.")
    if status in (413, 415):
        return ExtractionFailed("The text recognition server refused the document.")
    if status in (401, 403):
        return ExtractionFailed("The text recognition server refused the API key.", "server_error")
    if status in (400, 422):
        logger.warning("docling-serve (files.docling_url) refused a request: %.200s", error.message)
        return ExtractionFailed("The text recognition server refused the request.", "server_error")
    return Unavailable(f"The text recognition server answered {status}.")
