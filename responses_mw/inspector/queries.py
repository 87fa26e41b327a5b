"""Filters of the list of responses. They are parameters of its URL, so every view can be linked."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlencode

from ..errors import BadRequest
from ..state.recent import FAILED, Position, RecentFilter

STATUSES = ("completed", "incomplete", "failed", "cancelled", "refused", "interrupted")
KINDS = ("json", "stream", "websocket", "background")
CACHE = ("exact", "semantic", "miss")
PERIODS = {"15m": 900, "1h": 3600, "6h": 6 * 3600, "1d": 86400, "7d": 7 * 86400}
MAX_LIMIT = 500

_TEXTS = ("model", "owner", "tool", "reason", "error", "previous", "conversation", "request")
_NAMES = frozenset({*_TEXTS, "status", "kind", "cache", "failed", "unstored", "since", "until", "before", "limit"})
_MAX_TEXT = 256


@dataclass(frozen=True, slots=True)
class Query:
    """The parsed query of the list of responses. `given` has its parameters, without empty ones."""

    given: dict[str, str]
    wanted: RecentFilter
    before: Position | None
    limit: int

    @classmethod
    def parse(cls, params: Mapping[str, str]) -> Query:
        """Parse the parameters of a URL. Raises `BadRequest` if one is unknown or invalid."""
        given = {name: value.strip()[:_MAX_TEXT] for name, value in params.items() if value.strip()}
        if unknown := sorted(given.keys() - _NAMES):
            names = ", ".join(sorted(_NAMES))
            raise BadRequest(f"Unknown parameter '{unknown[0][:64]}'. The known parameters are {names}.", param=unknown[0][:64])
        wanted = RecentFilter(
            statuses=_listed(given, "status", STATUSES) | (FAILED if _is_set(given, "failed") else frozenset()),
            kinds=_listed(given, "kind", KINDS),
            cache=next(iter(_listed(given, "cache", CACHE)), ""),
            unstored=_is_set(given, "unstored"),
            in_conversation=False,
            since=_moment(given, "since"),
            until=_moment(given, "until"),
            **{name: given.get(name, "") for name in _TEXTS},
        )
        before = Position.parse(given["before"]) if "before" in given else None
        return cls(given, wanted, before, _limit(given))

    def url(self, **changes: str | None) -> str:
        """Return the query string of this view with `changes`. None removes a parameter.

        The new view starts at its first page, unless `before` is given.
        """
        params = {**self.given, "before": None, **changes}
        return "?" + urlencode({name: value for name, value in params.items() if value})


def _listed(given: Mapping[str, str], name: str, known: tuple[str, ...]) -> frozenset[str]:
    values = frozenset(filter(None, given.get(name, "").split(",")))
    if not values <= frozenset(known):
        raise BadRequest(f"'{name}' must be one or more of {', '.join(known)}, separated by commas.", param=name)
    return values


def _is_set(given: Mapping[str, str], name: str) -> bool:
    value = given.get(name, "false").lower()
    if value not in ("1", "true", "on", "0", "false"):
        raise BadRequest(f"'{name}' must be true or false.", param=name)
    return value in ("1", "true", "on")


def _moment(given: Mapping[str, str], name: str) -> float:
    """Parse a time: Unix seconds, an ISO date or time, or a period before now such as `1h`. Return 0 if it is not given."""
    text = given.get(name, "")
    if not text:
        return 0.0
    if text in PERIODS:
        return time.time() - PERIODS[text]
    if re.fullmatch(r"\d{1,12}(\.\d{1,6})?", text):
        return float(text)
    try:
        moment = datetime.fromisoformat(text)
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        seconds = math.nan
    if math.isnan(seconds):
        raise BadRequest(f"'{name}' must be Unix seconds, a date or time, or one of {', '.join(PERIODS)}.", param=name)
    return seconds


def _limit(given: Mapping[str, str]) -> int:
    limit = read_number(given.get("limit", "100"))
    if limit is None or not 1 <= limit <= MAX_LIMIT:
        raise BadRequest(f"'limit' must be a number from 1 to {MAX_LIMIT}.", param="limit")
    return limit


def read_number(text: str) -> int | None:
    """Return the number in `text`, or None unless it consists of one to nine decimal digits."""
    return int(text) if text.isdecimal() and len(text) < 10 else None
