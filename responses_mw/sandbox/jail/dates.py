"""Dates and times in spreadsheets, which are numbers of days with a format (ECMA-376, part 1, 18.8.30 and 18.17.4)."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

_BUILT_IN_DATES = frozenset([*range(14, 18), 22, *range(27, 32), 36, *range(50, 55), 57, 58])
_BUILT_IN_TIMES = frozenset([*range(18, 22), *range(32, 36), *range(45, 48), 55, 56])
# Texts in quotes or after a backslash, fillers, and conditions, colours and locales in brackets, except elapsed times.
_LITERAL = re.compile(r'"[^"]*"|\\.|_.|\*.|\[(?!h+\]|m+\]|s+\])[^\]]*\]', re.IGNORECASE)
_FIRST_1900, _FIRST_1904 = datetime(1899, 12, 30), datetime(1904, 1, 1)  # noqa: DTZ001 (spreadsheets have no time zones)
_NO_LEAP_DAY = 60  # the number of 29 February 1900, which did not exist
_MAX_DAYS = 2_950_000  # in the year 9976 or 9980; the last year is 9999
_MAX_CODE = 255  # maximum length of a code
_DAY_SECONDS = 86_400


def format_kind(number: int, code: str) -> str:
    """Return `date`, `time` or "" for the format with this number and code. Built-in formats have no code."""
    if not code:
        return "date" if number in _BUILT_IN_DATES else "time" if number in _BUILT_IN_TIMES else ""
    letters = set(_LITERAL.sub("", code[:_MAX_CODE].partition(";")[0].lower()))
    if letters & set("yd") or ("m" in letters and not letters & set("hs")):
        return "date"
    return "time" if letters & set("hs") else ""


def format_days(value: str, kind: str, *, is_1904: bool) -> str:
    """Return a number of days as `2026-11-28`, `2026-11-28 17:30:00` or `17:30:00`. Other values stay as they are."""
    try:
        days = float(value)
    except ValueError:
        return value
    if not 0 <= days < _MAX_DAYS:
        return value
    seconds = round(days * _DAY_SECONDS)
    if kind == "time":
        minutes, second = divmod(seconds, 60)
        return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}"
    first = _FIRST_1904 if is_1904 else _FIRST_1900 + timedelta(days=days < _NO_LEAP_DAY)
    moment = first + timedelta(seconds=seconds)
    return moment.date().isoformat() if seconds % _DAY_SECONDS == 0 else moment.isoformat(" ")
