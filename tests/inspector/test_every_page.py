"""Properties of all pages: size and speed with many responses, damaged data, and static files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import redis

import responses_mw
from responses_mw.ids import RunIds
from responses_mw.inspector.rendering import NAVIGATION
from responses_mw.state.schema import RECENT_SHARDS, REPLICAS, recent_key
from tests.inspector.browser import needs_browser

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.inspector.conftest import Inspect

INSPECTOR = Path(responses_mw.__file__).parent / "inspector"


@pytest.mark.slow
@needs_browser
@pytest.mark.usefixtures("nobody_else")
async def test_every_page_is_small_and_fast_with_ten_thousand_responses(inspect: Inspect, redis_url: str, look: Any) -> None:
    inspected = inspect()
    now, ids = time.time(), RunIds
    with redis.Redis.from_url(redis_url) as client, client.pipeline(transaction=False) as pipeline:
        for number in range(10_000):
            summary = {
                "id": ids().response,
                "status": "failed" if number % 100 == 0 else "completed",
                "kind": "stream",
                "owner": f"{number % 500:032x}",
                "ended": now - number / 10,
                "model": f"model-{number % 50}",
                "cache": "miss" if number % 2 else "exact",
                "cache_reason": f"guard:{number % 40}",
                "tools": ["mcp"],
                "tool_errors": number % 2,
                "conversation": f"conv_{number:025}",
            }
            pipeline.xadd(recent_key(number % RECENT_SHARDS), {"s": orjson.dumps(summary)})
        pipeline.execute()

    def visit(page: Page) -> None:
        page.set_viewport_size({"width": 480, "height": 800})
        for url, name in NAVIGATION:
            page.goto(f"{inspected.url}{url}")
            assert page.locator(".top nav [aria-current=page]").inner_text() == name
            assert page.locator("tr").count() < 400
            assert len(page.content()) < 300_000
            assert page.evaluate("document.documentElement.scrollWidth") <= 480
        page.goto(f"{inspected.url}/ui/conversations")
        page.get_by_label("Model").fill("model-7")
        page.get_by_role("button", name="Apply").click()
        page.wait_for_url(f"{inspected.url}/ui/conversations?model=model-7")
        page.locator("h1").click()
        page.keyboard.press("/")
        page.keyboard.type("resp_unknown")
        assert page.get_by_role("searchbox").input_value() == "resp_unknown"

    look(visit)


@pytest.mark.usefixtures("nobody_else")
async def test_damaged_data_breaks_no_page(inspect: Inspect, redis_url: str) -> None:
    inspected = inspect(cache__mode="exact")
    whole = {"id": RunIds().response, "status": "completed", "kind": "json", "ended": time.time(), "tools": ["mcp"]}
    numbers = ("ended", "seconds", "tokens_in", "tokens_out", "first_token", "tool_errors")
    texts = ("status", "kind", "owner", "model", "cache", "cache_reason", "conversation", "error_code")
    damage: list[Any] = [*({name: "<7>"} for name in numbers), *({name: [7]} for name in texts), {"tools": 7}]
    missing = [{name: value for name, value in whole.items() if name != left_out} for left_out in whole]
    damaged = [{**whole, **one} for one in damage] + missing[:-1]
    with redis.Redis.from_url(redis_url) as client:
        for summary in (*damaged, [], 7, whole):
            client.xadd(recent_key(0), {"s": orjson.dumps(summary)})
        client.xadd(recent_key(0), {"s": b"{"})
        process = {"name": "x", "version": "1", "started": 7, "reported": 7}
        for report in ({"name": 7}, 7, *({**process, name: "7"} for name in ("started", "judge", "tools", "endpoints"))):
            client.zadd(REPLICAS, {orjson.dumps(report): 9e12})
    assert [one["id"] for one in inspected.summaries()] == [whole["id"]]
    ours = [link.url for link in NAVIGATION]
    assert {url: inspected.admin.get(url).status_code for url in ours} == dict.fromkeys(ours, 200)


def test_static_files_have_less_than_60_kb_and_no_external_links() -> None:
    files = [path for path in INSPECTOR.joinpath("static").iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 60_000
    assert not any("http://" in path.read_text() or "https://" in path.read_text() for path in files)
