"""Log records as text or JSON, with the ids of the request, response and trace. They never hold content of requests.

Clients and the upstream choose the paths, models and error messages in records, so characters that could start a line or
control a terminal are escaped.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from traceback import format_tb
from typing import Any, Literal

from opentelemetry.trace import get_current_span

from .context import current_request

_QUIET = ("httpx", "httpx2", "httpcore", "opentelemetry", "uvicorn")
"""Loggers limited to warnings: at `info` they log every request or their own internals."""

# C0, DEL and C1, Unicode's line separators, characters that change the text direction, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_INDENT = "    "
WARNING_INTERVAL = 60.0
"""Minimum number of seconds between two warnings about the same fault."""


def set_up_logs(level: str, form: Literal["human", "json"]) -> None:
    """Log to standard error. Only our own commands call this; a host application configures its logging itself."""
    handler = logging.StreamHandler()
    handler.setFormatter((JSONFormatter if form == "json" else HumanFormatter)(with_messages=level == "debug"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


class WarningLimit:
    """Limits the warnings about one fault."""

    def __init__(self) -> None:
        self._next = float("-inf")

    def is_due(self) -> bool:
        """Return whether to warn now: true at most once in `WARNING_INTERVAL`."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + WARNING_INTERVAL
        return True

    def reset(self) -> None:
        """Allow the next warning at once, because the fault is over."""
        self._next = float("-inf")


class _Formatter(logging.Formatter):
    def __init__(self, format: str | None = None, *, with_messages: bool) -> None:  # noqa: A002 (logging's name)
        """`with_messages` includes the messages of exceptions, which may quote requests: it is meant for debugging.

        Messages are omitted for requests that are not known to be stored.
        """
        super().__init__(format)
        self._with_messages = with_messages

    def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
        """Return the traceback, by default without the exceptions' messages."""
        request = current_request()
        if self._with_messages and (request is None or request.stores):
            return _block(super().formatException(ei))
        return _block("\n".join(_traceback(ei[1]))) if ei[1] is not None else ""

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 (logging's name)
        return _block(stack_info)


class HumanFormatter(_Formatter):
    """Format a record as one line. A traceback follows, indented, so that none of its lines looks like a record."""

    def __init__(self, *, with_messages: bool = False) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(ids)s", with_messages=with_messages)

    def format(self, record: logging.LogRecord) -> str:
        ids = {} if hasattr(record, "facts") else _ids()
        record.ids = " [" + " ".join(f"{name}={value}" for name, value in ids.items()) + "]" if ids else ""
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        return _escaped(super().formatMessage(record))


class JSONFormatter(_Formatter):
    """One JSON object per line."""

    def __init__(self, *, with_messages: bool = False) -> None:
        super().__init__(with_messages=with_messages)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": getattr(record, "subject", None) or record.getMessage(),
            **_ids(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _UNSAFE.sub(_as_json, json.dumps(line, ensure_ascii=False, default=str))


def _escaped(text: str) -> str:
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _as_json(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def _block(text: str) -> str:
    return "\n".join(_INDENT + _escaped(line.expandtabs()) for line in text.split("\n"))


def _ids() -> dict[str, str]:
    """Return the ids of the current trace, request and response."""
    ids: dict[str, str] = {}
    context = get_current_span().get_span_context()
    if context.is_valid:
        ids.update(trace_id=f"{context.trace_id:032x}", span_id=f"{context.span_id:016x}")
    request = current_request()
    if request is not None:
        known = {"request": request.request_id, "response": request.response_id}
        ids.update({name: value for name, value in known.items() if value})
    return ids


def _traceback(error: BaseException) -> Iterator[str]:
    """Describe an exception, its causes and its members by location and class only."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield from _traceback(cause)
        yield "and then:"
    yield from (line.rstrip() for line in format_tb(error.__traceback__))
    yield f"{type(error).__module__}.{type(error).__qualname__}"
    for inner in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield "in it:"
        yield from _traceback(inner)
