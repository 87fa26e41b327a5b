"""The page of tools."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import redis

from responses_mw.ids import RunIds
from responses_mw.inspector.tool_pages import calls_of, configured, origin, uses_of
from responses_mw.state.schema import REPLICAS, recent_key
from responses_mw.telemetry.instruments import OTHER
from responses_mw.telemetry.metrics import TOOL_DURATION
from responses_mw.telemetry.process_facts import process_facts
from tests.inspector.browser import needs_browser, violations
from tests.support.configured import make_settings

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.inspector.conftest import Inspect

pytestmark = pytest.mark.usefixtures("nobody_else")

SERVERS: dict[str, Any] = {
    "docs": {
        "url": "https://mcp.example:8443/path-secret/mcp?key=query-secret",
        "headers": {"x-key": "header-secret"},
        "authorization": "token-secret",
        "allowed_tools": ["search", "<read>"],
        "require_approval": "never",
    },
    "wiki": {"url": "http://wiki/mcp"},
}
SETTINGS: dict[str, Any] = {"tools__mcp_servers": SERVERS, "search__provider": "searxng", "search__url": "http://searx:8080/s"}


@pytest.fixture
def used(redis_url: str) -> list[str]:
    """Store the report of a process and the summaries of two responses with tools. Return their ids."""
    rows = [
        {"kind": "mcp", "server": "docs", "calls": 4, "errors": 1, "seconds": 2.0},
        {"kind": "mcp", "server": OTHER, "calls": 3, "errors": 0, "seconds": 0.3},
        {"kind": "<b>", "server": "", "calls": 1, "errors": 0, "seconds": 0.1},
    ]
    now, ids = time.time(), [RunIds().response for _ in range(2)]
    common = {"kind": "stream", "owner": "a" * 32, "ended": now, "tools": ["mcp"]}
    summaries = [
        {**common, "id": ids[0], "status": "completed", "tool_calls": 2, "tool_errors": 1},
        {**common, "id": ids[1], "status": "failed", "tools": ["mcp", "web_search"]},
    ]
    with redis.Redis.from_url(redis_url) as client:
        report = orjson.dumps({"name": "p", "version": "1", "started": now, "reported": now, "tools": rows})
        client.zadd(REPLICAS, {report: now * 1000})
        for number, summary in enumerate(summaries):
            client.xadd(recent_key(number), {"s": orjson.dumps(summary)})
    return ids


async def test_tools_calls_and_failures_are_shown_without_secrets(inspect: Inspect, used: list[str]) -> None:
    inspected = inspect(**SETTINGS)
    page = inspected.admin.get("/ui/tools").text
    assert "secret" not in page.replace("auth.secret_keys", "")
    for shown in ("https://mcp.example:8443", "only search, &lt;read&gt;", "searxng at http://searx:8080", "500 ms", "25.0 %"):
        assert shown in page
    assert "MCP servers that requests name" in page
    assert "&lt;b&gt;" in page
    assert used[0] in page  # a call failed
    assert used[1] not in page
    assert "since=1d&amp;tool=mcp&amp;failed=true" in page
    assert "No response called" in inspected.admin.get("/ui/tools?owner=unknown").text
    assert inspected.admin.get("/ui/tools?since=x").status_code == 400


def test_tools_that_are_not_configured_are_shown_as_not_offered_or_refused() -> None:
    settings = make_settings(tools__omitted=["web_search"])
    found = {one.name: (one.is_served, one.rules) for one in configured(settings, has_stores=True)}
    refused = (False, ["requests get a 400"])
    assert found == {"web_search": (False, ["not offered"]), "file_search": (True, []), "code_interpreter": refused}
    assert {one.name for one in configured(settings, has_stores=False) if one.is_served} == set()


def test_malformed_reports_of_processes_are_skipped() -> None:
    row = {"kind": "mcp", "server": "a", "calls": 1, "errors": 1, "seconds": 1}
    reports: list[dict[str, Any]] = [{}, {"tools": None}, {"tools": ["x", {}, {"calls": "1"}, row]}, {"tools": [row, row]}]
    calls = calls_of(reports)["mcp", "a"]
    assert (calls.calls, calls.errors, calls.mean) == (3, 3, 1.0)


def test_a_process_reports_its_calls() -> None:
    labels = {"responses_mw.tool.kind": "mcp", "responses_mw.tool.server": "reported"}
    for error in ({}, {"error.type": "tool_error"}, {"error.type": "cancelled"}):
        TOOL_DURATION.record(0.5, {**labels, **error})
    [row] = [row for row in process_facts()["tools"] if row["server"] == "reported"]
    assert row == {"kind": "mcp", "server": "reported", "calls": 3, "errors": 1, "seconds": 1.5}


def test_only_the_origin_of_a_url_is_shown() -> None:
    urls = {"https://a:b@c.example/d?e": "https://c.example", "http://[::1]:80/x": "http://[::1]:80", None: "", "x": ""}
    assert {url: origin(url) for url in urls} == urls


def test_responses_are_counted_by_the_kinds_of_their_tools() -> None:
    kinds = [["mcp"], ["mcp", "web_search"], []]
    uses = uses_of([{"tools": tools, "status": "failed", "tool_errors": 1} for tools in kinds])
    assert [(use.kind, use.responses, use.failed, use.with_errors) for use in uses] == [
        ("mcp", 2, 2, 2),
        ("web_search", 1, 1, 1),
    ]


@needs_browser
async def test_the_page_works_in_a_browser(inspect: Inspect, used: list[str], look: Any) -> None:
    inspected = inspect(**SETTINGS)

    def visit(page: Page) -> None:
        page.goto(f"{inspected.url}/ui/tools")
        for scheme in ("dark", "light"):
            media: Any = {"color_scheme": scheme, "reduced_motion": "reduce"}
            page.emulate_media(**media)
            assert violations(page) == []
        page.get_by_role("link", name="web_search").click()
        page.wait_for_url("**tool=web_search**")
        assert page.locator("#responses tbody tr").count() == 1

    look(visit)
