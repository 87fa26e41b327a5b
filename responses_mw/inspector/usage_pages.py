"""The usage page: responses and tokens by day, owner and model."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..errors import BadRequest
from ..telemetry.metrics import ModelUsage, OwnerUsage
from .charts import days_plot
from .inspector_context import InspectorContext
from .rendering import Renderer

DAYS = ("1", "7", "31")
DEFAULT_DAYS = "7"
MAX_ROWS = 200
"""Maximum number of owners, and of models, on the page. The CSV file has all of them."""
_COLUMNS = ("responses", "input_tokens", "cached_tokens", "output_tokens", "requests_without_usage")
_NAMES = frozenset({"days", "day", "owner"})


@dataclass(slots=True)
class Row(ModelUsage):
    """The usage of a day, an owner or a model."""

    name: str = ""

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def add(self, used: ModelUsage) -> None:
        for column in _COLUMNS:
            setattr(self, column, getattr(self, column) + getattr(used, column))


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """The parsed query of the page: the days from `first` to `last` (UTC), and an owner, or "" for all owners."""

    given: Mapping[str, str]
    first: date
    last: date
    owner: str

    @classmethod
    def parse(cls, params: Mapping[str, str], today: date) -> UsageQuery:
        """Parse the parameters of a URL. Raises `BadRequest` if one is unknown or invalid."""
        given = {name: value.strip() for name, value in params.items() if value.strip()}
        if unknown := sorted(given.keys() - _NAMES):
            raise BadRequest(f"Unknown parameter '{unknown[0][:64]}'. The known parameters are {', '.join(sorted(_NAMES))}.")
        days = given.get("days", DEFAULT_DAYS)
        if days not in DAYS:
            raise BadRequest(f"'days' must be one of {', '.join(DAYS)}.", param="days")
        try:
            day = date.fromisoformat(given["day"]) if "day" in given else None
        except ValueError:
            raise BadRequest("'day' must be a date such as 2026-01-15.", param="day") from None
        first = day or today - timedelta(days=int(days) - 1)
        return cls(given, first, day or today, given.get("owner", ""))

    @property
    def days(self) -> Iterator[date]:
        return (self.first + timedelta(days=number) for number in range((self.last - self.first).days + 1))

    def is_wanted(self, owner: str) -> bool:
        return not self.owner or owner == self.owner or (len(self.owner) >= 8 and owner.startswith(self.owner))


class UsagePages:
    def __init__(self, context: InspectorContext, renderer: Renderer) -> None:
        self._context = context
        self._render = renderer.page

    def routes(self) -> list[BaseRoute]:
        return [Route("/ui/usage", self._page), Route("/ui/usage.csv", self._csv)]

    def _query(self, request: Request) -> UsageQuery:
        params = dict(request.query_params)
        if owner := params.get("owner", "").strip():
            params["owner"] = self._context.owner_named(owner)
        return UsageQuery.parse(params, datetime.now(UTC).date())

    async def _read(self, query: UsageQuery) -> dict[date, dict[str, OwnerUsage]]:
        """Return the usage by day and owner."""
        return {
            day: {owner: used for owner, used in (await self._context.state.ledger.read(day)).items() if query.is_wanted(owner)}
            for day in query.days
        }

    async def _page(self, request: Request) -> Response:
        query = self._query(request)
        found = await self._read(query)
        days = [_sum(day.isoformat(), used.values()) for day, used in found.items()]
        every = _sum("", days)
        owners = _rows((owner, used) for day in found.values() for owner, used in day.items())
        models = _rows(pair for day in found.values() for used in day.values() for pair in used.models.items())
        return self._render(
            request,
            "usage.html",
            query=query,
            shown=dict(request.query_params),
            periods=DAYS,
            every=every,
            days=days,
            owners=owners[:MAX_ROWS],
            models=models[:MAX_ROWS],
            hidden=max(0, len(owners) - MAX_ROWS),
            plot=days_plot([(row.name, row.input_tokens, row.output_tokens) for row in days]) if len(days) > 1 else None,
        )

    async def _csv(self, request: Request) -> Response:
        """Return the usage by day, owner and model as a CSV file."""
        query, file = self._query(request), io.StringIO(newline="")
        writer = csv.writer(file)
        writer.writerow(["day", "owner", "key", "model", *_COLUMNS])
        for day, owners in (await self._read(query)).items():
            for owner, used in owners.items():
                name = _cell(self._context.keys.get(owner, ""))
                for model, counts in used.models.items():
                    writer.writerow([day, owner, name, _cell(model), *(getattr(counts, column) for column in _COLUMNS)])
        disposition = f'attachment; filename="usage-{query.first}-{query.last}.csv"'
        return Response(file.getvalue(), media_type="text/csv; charset=utf-8", headers={"content-disposition": disposition})


def _sum(name: str, used: Iterable[ModelUsage]) -> Row:
    row = Row(name=name)
    for one in used:
        row.add(one)
    return row


def _rows(used: Iterable[tuple[str, ModelUsage]]) -> list[Row]:
    """Return the total usage by name, largest first."""
    rows: dict[str, Row] = {}
    for name, one in used:
        rows.setdefault(name, Row(name=name)).add(one)
    return sorted(rows.values(), key=lambda row: (-row.tokens, -row.responses))


def _cell(text: str) -> str:
    """Escape a text that a spreadsheet would take for a formula. Clients choose the names of models."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
