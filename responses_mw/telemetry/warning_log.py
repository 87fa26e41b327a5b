"""Keep the last warnings of this process for the inspector."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..redaction import Redactor, redacted

MAX_WARNINGS = 8
"""Maximum number of warnings that are kept, so that they fit into the report of a process."""
MAX_TEXT = 300  # maximum length of a warning

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]+")


class LoggedWarning(NamedTuple):
    """A warning, the time when it was last logged, and the number of times in a row."""

    time: float
    logger: str
    text: str
    times: int


class WarningLog(logging.Handler):
    """Keeps the last warnings of the package, without secrets, tracebacks and control characters."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[LoggedWarning] = deque(maxlen=MAX_WARNINGS)
        self._redactors: list[Redactor] = []

    @contextmanager
    def collecting(self, redactor: Redactor) -> Iterator[None]:
        """Keep warnings in the `with` block. Blocks may overlap, because the applications of a process end in any order."""
        logger = logging.getLogger("responses_mw")
        logger.addHandler(self)  # has no effect if it was already added
        self._redactors.append(redactor)
        try:
            yield
        finally:
            self._redactors.remove(redactor)
            if not self._redactors:
                logger.removeHandler(self)
                self._kept.clear()

    def emit(self, record: logging.LogRecord) -> None:
        text = redacted(record.getMessage())
        for redactor in self._redactors:
            text = redactor(text)
        text, times = _UNSAFE.sub(" ", text)[:MAX_TEXT], 1
        if self._kept and self._kept[-1][1:3] == (record.name, text):
            times += self._kept.pop().times
        self._kept.append(LoggedWarning(round(record.created, 3), record.name, text, times))
        if logging.lastResort is not None and not logging.getLogger().handlers:
            logging.lastResort.handle(record)  # as if this handler, which prints nothing, did not exist

    def latest(self) -> list[LoggedWarning]:
        """Return the kept warnings, the oldest first."""
        return list(self._kept)

    def report(self) -> list[list[float | str | int]]:
        """Return the members of the kept warnings for the report of this process."""
        return [[*one] for one in self._kept]


WARNINGS = WarningLog()
