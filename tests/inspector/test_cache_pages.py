"""The page of the cache."""

from __future__ import annotations

import logging
import re
import time
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.inspector.cache_pages import REASONS, grouped, lookups_by, meaning
from responses_mw.inspector.charts import hits_plot
from responses_mw.telemetry.instruments import Counter, Histogram
from tests.inspector.browser import needs_browser, violations
from tests.inspector.conftest import ANSWER
from tests.support.judges import says

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.inspector.conftest import Inspect, Inspected
    from tests.support.scripted import ScriptedUpstream

pytestmark = pytest.mark.usefixtures("nobody_else")


def ask(inspected: Inspected, upstream: ScriptedUpstream, *questions: str, **options: Any) -> None:
    for question in questions:
        upstream.whole(ANSWER)
        inspected.ours.sync_client.responses.create(model="tiny", input=question, **options)


def facts(html: str) -> dict[str, str]:
    """Return the facts on a page by name."""
    return dict(re.findall(r"<dt>([^<]+)</dt><dd>(?:<a[^>]*>)?([^<]+)<", html))


async def test_hits_and_the_reasons_of_misses_are_counted(inspect: Inspect, upstream: ScriptedUpstream) -> None:
    inspected = inspect(cache__mode="exact")
    ask(inspected, upstream, "one", "one", " one ", "two")
    ask(inspected, upstream, "three", tools=[{"type": "function", "name": "f", "parameters": {}}])
    ask(inspected, upstream, "four", extra_body={"cache": {"mode": "off"}})
    inspected.wait_for(6)
    page = inspected.admin.get("/ui/cache?size=true").text
    shown = facts(page)
    assert (shown["Hits"], shown["Exact"], shown["Not looked up"]) == ("40.0 %", "2", "1")
    assert shown["Tokens saved"] == "24"
    assert shown["Size"] == "2 entries"
    assert "cache=miss&amp;reason=not_found" in page
    assert "cache=miss&amp;reason=uncacheable%3Atools" in page
    assert len(inspected.summaries("?cache=miss&reason=not_found")) == 2
    assert len(inspected.summaries("?reason=uncacheable:tools")) == 1
    for bad in ("?since=x", "?size=true&owner=A%20B", "?unknown=1"):
        assert inspected.admin.get(f"/ui/cache{bad}").status_code == 400


async def test_two_questions_are_compared_and_the_judge_is_asked_only_with_actions(
    inspect: Inspect, upstream: ScriptedUpstream
) -> None:
    texts = {
        "one": "How far is it from Bonn to Ulm?",
        "other": "What is the distance from Bonn to Ulm?",
        "answer": "<b>420 km</b>",
        "model": "tiny",
    }
    for actions in (False, True):
        inspected = inspect(cache__mode="semantic", ui__actions=actions)
        if actions:
            upstream.whole(says("no"))
        asked = len(upstream.requests)
        page = inspected.admin.post("/ui/cache/explain", data=texts).text
        assert "reaches cache.threshold" in page
        assert "How far is it from Bonn to Ulm?</textarea>" in page
        assert "&lt;b&gt;420 km&lt;/b&gt;</textarea>" in page
        [verdict] = re.findall(r"<dt>judge</dt><dd>([^<]*)</dd>", page)
        assert verdict.partition(" ")[0] == ("refuses" if actions else "not"), verdict
        assert len(upstream.requests) - asked == actions
        assert inspected.admin.post("/ui/cache/explain", data={"one": "a", "other": " "}).status_code == 400


async def test_the_purge_removes_the_entries_of_one_owner_or_of_all(
    inspect: Inspect, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "responses_mw")
    inspected = inspect(cache__mode="exact", ui__actions=True)
    ask(inspected, upstream, "one", "two")
    [owner] = {one["owner"] for one in inspected.wait_for(2)}
    for fields, status in (({}, 400), ({"owner": " "}, 400), ({"owner": "A B"}, 400), ({"owner": "0" * 32}, 303)):
        assert inspected.admin.post("/ui/cache/purge", data=fields).status_code == status
    assert inspected.admin.post("/ui/cache/purge", data={"owner": owner}).headers["location"] == "/ui/cache?purged=2"
    ask(inspected, upstream, "one")
    assert inspected.admin.post("/ui/cache/purge", data={"all": "on"}).headers["location"] == "/ui/cache?purged=1"
    logged = [record.__dict__["facts"]["owner"] for record in caplog.records if record.name == "responses_mw.audit"]
    assert logged == ["0" * 32, owner, "all"]
    foreign = inspected.admin.post("/ui/cache/purge", data={"all": "on"}, headers={"origin": "https://evil.example"})
    assert foreign.status_code == 403
    reader = inspect(cache__mode="exact")
    assert reader.admin.post("/ui/cache/purge", data={"all": "on"}).status_code == 403


def test_lookups_are_counted_by_owner_and_plotted_over_time() -> None:
    now = time.time()
    results: list[dict[str, Any]] = [
        {"cache": "exact", "tokens_in": 3, "tokens_out": None},
        {"cache": "miss", "cache_reason": "guard:numbers"},
        {},
    ]
    summaries = [{"owner": owner, "ended": now - 30, **one} for owner in ("a", "a", "b") for one in results]
    first, second = lookups_by(attrgetter("owner"), grouped(summaries))
    assert (first.name, first.total, first.rate, first.saved, first.unused) == ("a", 4, 0.5, 6, 2)
    assert (second.name, second.reasons) == ("b", {"guard:numbers": 1})
    plot = hits_plot(summaries, now, 86400)
    assert (plot.value, plot.top, plot.since, len(plot.bars)) == ("3 hits, 3 misses", "6", "1 d ago", 2)


def test_each_documented_reason_of_a_miss_is_explained(pytestconfig: pytest.Config) -> None:
    guide = pytestconfig.rootpath / "docs" / "guides" / "cache.md"
    table = guide.read_text().partition("## Why was this a miss?")[2].partition("## ")[0]
    documented = {reason.partition(":")[0] for reason in re.findall(r"^\| `([a-z_:<>]+)`", table, re.MULTILINE)}
    assert documented == set(REASONS)
    assert meaning("guard:numbers") == REASONS["guard"]
    assert meaning("a newer one") == ""


def test_the_values_of_a_metric_are_read_by_label() -> None:
    counter = Counter("tests.read", "{test}", "For a test.", {"kind": ["a"]})
    counter.add(2, {"kind": "b"})
    assert counter.read("total") == {("a",): 0.0, ("b",): 2.0}
    histogram = Histogram("tests.read.duration", "s", "For a test.", ("kind", "error"), (1.0,))
    histogram.record(0.25, {"kind": "a"})
    histogram.record(0.5, {"kind": "a"})
    assert histogram.read("sum") == {("a", ""): 0.75}
    assert histogram.read("count") == {("a", ""): 2.0}


@needs_browser
async def test_the_page_works_in_a_browser(inspect: Inspect, upstream: ScriptedUpstream, look: Any) -> None:
    inspected = inspect(cache__mode="exact", ui__actions=True)
    ask(inspected, upstream, "one", "one", "two")
    inspected.wait_for(3)

    def visit(page: Page) -> None:
        page.goto(f"{inspected.url}/ui/cache")
        page.get_by_label("Cached question").fill("What is <b>it</b>?")
        page.get_by_label("New question").fill("what is <b>it</b>")
        page.get_by_role("button", name="Compare").click()
        page.get_by_text("normal form", exact=True).wait_for()
        page.get_by_text("Empty the cache").click()
        for scheme in ("dark", "light"):
            media: Any = {"color_scheme": scheme, "reduced_motion": "reduce"}
            page.emulate_media(**media)
            assert violations(page) == []
        page.get_by_label("all owners").check()
        page.get_by_role("button", name="Remove the entries").click()
        page.get_by_text("2 entries were removed").wait_for()
        page.get_by_role("link", name="not_found").click()
        page.wait_for_url("**reason=not_found**")
        assert page.locator("#responses tbody tr").count() == 2
        page.get_by_role("link", name="reason: not_found").click()
        page.wait_for_url(lambda url: "reason" not in url)
        assert page.locator("#responses tbody tr").count() == 2  # the two misses

    look(visit)
