"""Log records: as text or JSON, each with the ids by which it is found again. None holds what was asked or answered."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from traceback import format_tb
from typing import Any, Literal

from opentelemetry.trace import get_current_span

from .exchange import current

_QUIET = ("httpx", "httpx2", "httpcore", "opentelemetry", "uvicorn")
"""Loggers that tell at ``info`` of every request, or of what only they find worth telling."""


def set_up_logs(level: str, form: Literal["human", "json"]) -> None:
    """Has the process's log written to standard error: for our own commands, never in a host application."""
    to_stderr = logging.StreamHandler()
    to_stderr.setFormatter((JSONFormatter if form == "json" else HumanFormatter)(with_messages=level == "debug"))
    logging.basicConfig(level=level.upper(), handlers=[to_stderr])
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


class _Formatter(logging.Formatter):
    def __init__(self, format: str | None = None, *, with_messages: bool) -> None:  # noqa: A002 (logging's name)
        """``with_messages``: the text of an exception is shown. It may quote what was asked, so that is for debugging."""
        super().__init__(format)
        self._with_messages = with_messages

    def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
        """The traceback, by default without the exceptions' own texts."""
        if self._with_messages:
            return super().formatException(ei)
        return "\n".join(_traceback(ei[1])) if ei[1] is not None else ""


class HumanFormatter(_Formatter):
    def __init__(self, *, with_messages: bool = False) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(ids)s", with_messages=with_messages)

    def format(self, record: logging.LogRecord) -> str:
        ids = {} if hasattr(record, "facts") else _ids()
        record.ids = " [" + " ".join(f"{name}={value}" for name, value in ids.items()) + "]" if ids else ""
        return super().format(record)


class JSONFormatter(_Formatter):
    """One object a line."""

    def __init__(self, *, with_messages: bool = False) -> None:
        super().__init__(with_messages=with_messages)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_ids(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _ids() -> dict[str, str]:
    """What the record belongs to."""
    ids: dict[str, str] = {}
    context = get_current_span().get_span_context()
    if context.is_valid:
        ids.update(trace_id=f"{context.trace_id:032x}", span_id=f"{context.span_id:016x}")
    exchange = current()
    if exchange is not None:
        told = {"request": exchange.request_id, "response": exchange.response_id}
        ids.update({name: value for name, value in told.items() if value})
    return ids


def _traceback(error: BaseException) -> Iterator[str]:
    """Where an exception was raised and of what kind it is, and the same of those behind it."""
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if behind is not None:
        yield from _traceback(behind)
        yield "and then:"
    yield from (line.rstrip() for line in format_tb(error.__traceback__))
    yield f"{type(error).__module__}.{type(error).__qualname__}"
    for inner in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield "in it:"
        yield from _traceback(inner)
