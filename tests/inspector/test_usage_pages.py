"""The page of usage."""

from __future__ import annotations

import csv
import io
from datetime import UTC, date, datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
import redis

from responses_mw.auth import owner_of_key
from responses_mw.errors import BadRequest
from responses_mw.inspector.usage_pages import UsageQuery
from tests.inspector.browser import needs_browser, violations

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.inspector.conftest import Inspect

pytestmark = pytest.mark.usefixtures("nobody_else")

ALICE, OTHER = owner_of_key("alice"), "0f" * 16
KEYS = [f"alice:sha256:{sha256(b'a key').hexdigest()}"]


@pytest.fixture
def used(redis_url: str) -> date:
    """Store the usage of two owners on two days, and return the later one."""
    today = datetime.now(UTC).date()
    with redis.Redis.from_url(redis_url) as client:
        for days, owner, model, counts in (
            (0, ALICE, "qwen", (2, 100, 40, 30, 1)),
            (0, ALICE, "=cmd()", (1, 10, 0, 5, 0)),
            (0, OTHER, "qwen", (1, 1000, 0, 500, 0)),
            (3, ALICE, "qwen", (5, 7, 0, 3, 0)),
        ):
            key = f"rmw:{{usage}}:{today - timedelta(days=days)}"
            client.hset(f"{key}:models", f"{owner} {model}", " ".join(map(str, counts)))
            known = [int(number) for number in (client.hget(key, owner) or b"0 0 0 0").split()]
            client.hset(key, owner, " ".join(str(one + more) for one, more in zip(known, counts, strict=False)))
    return today


async def test_usage_is_added_up_by_owner_model_and_day(inspect: Inspect, used: date) -> None:
    inspected = inspect(auth__api_keys=KEYS)
    page = inspected.admin.get("/ui/usage").text
    assert "<dd>1,117</dd>" in page
    assert page.index(">0f0f0f0f<") < page.index(">alice<")  # the most tokens first
    for query in (f"?owner={ALICE}", "?owner=alice", f"?owner={ALICE[:8]}"):
        page = inspected.admin.get(f"/ui/usage{query}").text
        assert "<dd>117</dd>" in page
        assert ">0f0f0f0f<" not in page
    assert "<dd>110</dd>" in inspected.admin.get(f"/ui/usage?owner=alice&day={used}").text
    assert "<dd>7</dd>" in inspected.admin.get(f"/ui/usage?owner=alice&day={used - timedelta(days=3)}").text
    for bad in ("?days=2", "?day=yesterday", "?unknown=1"):
        assert inspected.admin.get(f"/ui/usage{bad}").status_code == 400


async def test_the_csv_file_has_all_rows_and_escapes_formulas(inspect: Inspect, used: date) -> None:
    inspected = inspect(auth__api_keys=KEYS)
    answer = inspected.admin.get("/ui/usage.csv?days=31")
    assert answer.headers["content-disposition"].startswith("attachment")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert len(rows) == 4
    assert {row["model"] for row in rows} == {"qwen", "'=cmd()"}
    [row] = [row for row in rows if row["owner"] == ALICE and row["day"] == str(used) and row["model"] == "qwen"]
    assert [row["key"], row["responses"], row["cached_tokens"]] == ["alice", "2", "40"]


def test_a_query_selects_days_and_an_owner() -> None:
    today = date(2026, 3, 1)
    assert [*map(str, UsageQuery.parse({"days": "7"}, today).days)][::6] == ["2026-02-23", "2026-03-01"]
    assert [*UsageQuery.parse({"day": "2026-01-15"}, today).days] == [date(2026, 1, 15)]
    assert not UsageQuery.parse({"owner": "0f"}, today).is_wanted(OTHER)  # too short for a prefix
    with pytest.raises(BadRequest):
        UsageQuery.parse({"day": "2026-13-01"}, today)


@needs_browser
async def test_the_page_works_in_a_browser(inspect: Inspect, used: date, look: Any) -> None:
    inspected = inspect(auth__api_keys=KEYS)

    def visit(page: Page) -> None:
        page.goto(f"{inspected.url}/ui/usage")
        for scheme in ("dark", "light"):
            media: Any = {"color_scheme": scheme, "reduced_motion": "reduce"}
            page.emulate_media(**media)
            assert violations(page) == []
        page.get_by_role("link", name="alice").click()
        page.get_by_role("link", name=str(used)).click()
        page.wait_for_url(f"**day={used}**")
        assert ALICE in page.url
        page.get_by_role("link", name="31 days").click()
        assert ALICE in page.url

    look(visit)
