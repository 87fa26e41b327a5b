"""The inspector's pages in a real browser: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import redis

from responses_mw.ids import RunIds
from responses_mw.state.schema import RECENT_SHARDS, recent_key
from tests.inspector.browser import expect, needs_browser, violations
from tests.inspector.conftest import ANSWER, TOKEN
from tests.support.scripted import Signal, call, completion, error, finish, reasoning, text, usage

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.inspector.conftest import Inspect, Inspected
    from tests.support.scripted import ScriptedUpstream

pytestmark = [pytest.mark.usefixtures("nobody_else"), needs_browser]

HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\"> \u202eevil\u202c مرحبا 😀"
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

SVG = (
    "data:image/svg+xml;base64,"
    + b64encode(b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>").decode()
)


def ask(inspected: Inspected, upstream: ScriptedUpstream, question: str = "a question", **options: Any) -> str:
    upstream.whole(ANSWER)
    response_id: str = inspected.ours.sync_client.responses.create(model="tiny", input=question, **options).id
    return response_id


async def test_a_failed_answer_is_two_clicks_from_what_was_sent(
    inspect: Inspect, upstream: ScriptedUpstream, look: Any
) -> None:
    inspected = inspect()
    ask(inspected, upstream)
    upstream.stream(text("a partial answer"), error("the engine died", 500))
    with inspected.ours.sync_client.responses.stream(model="tiny", input="a question that fails") as stream:
        list(stream)
    inspected.wait_for(2)

    def visit(page: Page) -> None:
        page.goto(f"{inspected.url}/ui/responses")
        page.get_by_role("link", name="Failed only").click()
        page.wait_for_url("**failed=true**")
        rows = page.locator("#responses tbody tr")
        assert rows.count() == 1
        rows.locator("a.id").click()
        translation = page.locator("#translation")
        translation.get_by_text("Sent to the upstream").wait_for()
        assert "the engine died" in translation.inner_text()
        marks = translation.get_by_text("a question that fails", exact=True)
        assert marks.count() == 2
        marks.first.hover()
        assert translation.locator("mark.same").count() == 2

    look(visit)


async def test_new_responses_appear_unless_the_view_is_paused(inspect: Inspect, upstream: ScriptedUpstream, look: Any) -> None:
    inspected = inspect()
    ask(inspected, upstream)
    inspected.wait_for(1)

    def visit(page: Page) -> None:
        page.goto(f"{inspected.url}/ui/responses?kind=json")
        rows = page.locator("#responses tbody tr")
        expect(rows).to_have_count(1)
        second = ask(inspected, upstream)
        expect(rows).to_have_count(2)
        assert rows.first.locator("a.id").get_attribute("title") == second
        assert page.url.endswith("?kind=json")
        page.get_by_role("button", name="Live").click()
        ask(inspected, upstream)
        page.get_by_text("1 new").wait_for()
        assert rows.count() == 2
        page.get_by_role("button", name="Live").click()
        expect(rows).to_have_count(3)

    look(visit)


async def test_a_running_response_is_followed_and_cancelled(inspect: Inspect, upstream: ScriptedUpstream, look: Any) -> None:
    inspected = inspect(ui__actions=True)
    more, end = Signal(), Signal()
    upstream.stream(text("first words"), more, text("second words"), end, finish())
    made = inspected.ours.sync_client.responses.create(model="tiny", input="a question", background=True)

    def visit(page: Page) -> None:
        page.goto(f"{inspected.url}/ui/background")
        page.locator(f'a[title="{made.id}"]').click()
        events = page.locator("#events tbody")
        events.get_by_text("first words").wait_for()
        more.set()
        events.get_by_text("second words").wait_for()
        numbers = [int(number) for number in events.locator("td.number").all_inner_texts()]
        assert numbers == list(range(len(numbers)))
        page.get_by_role("button", name="Cancel").click()
        page.locator("h1 + .status.cancelled").wait_for()

    look(visit)
    assert inspected.ours.sync_client.responses.retrieve(made.id).status == "cancelled"
    end.set()


async def test_hostile_texts_are_shown_harmlessly(inspect: Inspect, upstream: ScriptedUpstream, look: Any) -> None:
    inspected = inspect()
    client = inspected.ours.sync_client
    upstream.whole(completion({"role": "assistant", "content": HOSTILE + "x" * 5_000_000}))
    content: Any = [
        {"type": "input_text", "text": HOSTILE},
        {"type": "input_image", "image_url": PIXEL},
        {"type": "input_image", "image_url": SVG},
    ]
    made = client.responses.create(
        model=HOSTILE,
        input=[{"role": "user", "content": content}],
        instructions=HOSTILE,
        extra_headers={"x-responses-capture": "1"},
    )
    inspected.wait_for(1)

    def visit(page: Page) -> None:
        for path in ("/ui", "/ui/responses", f"/ui/responses/{made.id}"):
            page.goto(f"{inspected.url}{path}")
            assert "owned" not in page.title()
        assert page.locator("article.user .text").first.inner_text() == HOSTILE
        assert page.locator("article img").count() == 1
        assert page.locator("article img").evaluate("image => image.naturalWidth") == 1
        assert len(page.content()) < 1_500_000
        whole = page.request.get(f"{inspected.url}/ui/responses/{made.id}/text?list=output&item=0")
        assert whole.headers["content-type"].startswith("text/plain")
        assert len(whole.text()) > 5_000_000

    look(visit)


async def test_hostile_chunks_are_shown_harmlessly_beside_their_events(
    inspect: Inspect, upstream: ScriptedUpstream, look: Any
) -> None:
    inspected = inspect()
    upstream.stream(text(HOSTILE), text("</td></table><script>document.title = 'owned'</script>"), finish(), usage())
    capture = {"x-responses-capture": "1"}
    with inspected.ours.sync_client.responses.stream(model="tiny", input=HOSTILE, extra_headers=capture) as stream:
        made = stream.get_final_response()
    inspected.wait_for(1)

    def visit(page: Page) -> None:
        page.goto(f"{inspected.url}/ui/responses/{made.id}")
        steps = page.locator(".steps")
        steps.wait_for()
        assert "owned" not in page.title()
        assert page.locator("article img, .steps img, .steps script").count() == 0
        mark = steps.locator(".made mark", has_text="</td></table>").first
        mark.hover()
        assert steps.locator("mark.same").count() >= 2

    look(visit)


@pytest.mark.slow
async def test_ten_thousand_responses_are_listed_quickly(inspect: Inspect, redis_url: str, look: Any) -> None:
    inspected = inspect()
    with redis.Redis.from_url(redis_url) as client, client.pipeline(transaction=False) as pipeline:
        for number in range(10_000):
            facts = {
                "status": "failed" if number % 100 == 0 else "completed",
                "kind": "stream",
                "model": "tiny",
                "ended": number,
            }
            summary = orjson.dumps({"id": RunIds().response, "owner": "a" * 32, **facts})
            pipeline.xadd(recent_key(number % RECENT_SHARDS), {"s": summary})
        pipeline.execute()

    def visit(page: Page) -> None:
        page.goto(f"{inspected.url}/ui/responses")
        rows = page.locator("#responses tbody tr")
        assert rows.count() == 100
        seen = set(rows.locator("a.id").evaluate_all("links => links.map(link => link.title)"))
        page.get_by_role("link", name="Older").click()
        page.wait_for_url("**before=**")
        assert seen.isdisjoint(rows.locator("a.id").evaluate_all("links => links.map(link => link.title)"))
        page.goto(f"{inspected.url}/ui/responses?failed=true&limit=500")
        assert rows.count() == 100

    look(visit)


@pytest.mark.parametrize(
    ("trace_id", "expected"), [("0af7" * 8, f"https://jaeger.test/trace/{'0af7' * 8}?uiEmbed=v0"), ("/../x", None)]
)
async def test_a_response_links_to_its_trace(inspect: Inspect, redis_url: str, trace_id: str, expected: str | None) -> None:
    inspected = inspect(ui__trace_url="https://jaeger.test/trace/{trace_id}?uiEmbed=v0")
    response_id = RunIds().response
    facts = {"id": response_id, "owner": "a" * 32, "status": "completed", "kind": "stream", "ended": 1, "trace_id": trace_id}
    with redis.Redis.from_url(redis_url) as client:
        for shard in range(RECENT_SHARDS):  # only one of them is read
            client.xadd(recent_key(shard), {"s": orjson.dumps(facts)})
    page = inspected.admin.get(f"/ui/responses/{response_id}").text
    assert f"trace {trace_id}" in page
    links = re.findall(r'<a href="(https?://[^"]+)"', page)
    assert links == ([expected] if expected else [])


async def test_an_entered_id_leads_to_its_page_without_javascript(
    inspect: Inspect, upstream: ScriptedUpstream, look: Any
) -> None:
    inspected = inspect()
    first = ask(inspected, upstream)
    upstream.stream(reasoning("a thought"), text("an answer"), finish(), usage())
    with inspected.ours.sync_client.responses.stream(model="tiny", input="more", previous_response_id=first) as stream:
        second = stream.get_final_response().id
    request = inspected.wait_for(2)[-1]["request"]

    def visit(page: Page) -> None:
        page.goto(f"{inspected.url}/ui")
        page.get_by_role("searchbox").fill(first)
        page.get_by_role("searchbox").press("Enter")
        page.locator("h1", has_text=first).wait_for()
        assert "the answer" in page.locator("article.assistant").inner_text()
        page.locator(f'a[title="{second}"]').click()
        page.locator("h1", has_text=second).wait_for()
        page.get_by_text("Reasoning", exact=True).click()
        page.get_by_text("a thought").first.wait_for()
        page.get_by_role("searchbox").fill(request)
        page.get_by_role("searchbox").press("Enter")
        page.locator("h1", has_text=first).wait_for()
        page.get_by_role("searchbox").fill("unknown")
        page.get_by_role("searchbox").press("Enter")
        page.get_by_text("No response matches").wait_for()

    look(visit, java_script_enabled=False)


async def test_a_login_lasts_until_the_logout(inspect: Inspect, look: Any) -> None:
    inspected = inspect(ui__token=TOKEN)

    def visit(page: Page) -> None:
        page.goto(f"{inspected.url}/ui/responses")
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("heading", name="Responses").wait_for()
        page.goto(f"{inspected.url}/ui")
        page.get_by_role("heading", name="Overview").wait_for()
        page.get_by_role("button", name="Log out").click()
        page.get_by_label("Token").wait_for()
        page.goto(f"{inspected.url}/ui/background")
        page.get_by_label("Token").wait_for()

    look(visit)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
async def test_every_page_is_accessible(inspect: Inspect, upstream: ScriptedUpstream, look: Any, scheme: str) -> None:
    inspected = inspect(ui__actions=True)
    held = Signal()
    first = ask(inspected, upstream, extra_headers={"x-responses-capture": "1"})
    upstream.stream(call('{"city": "Paris"}', name="get_weather", call_id="call_1"), error("the engine died", 500))
    capture = {"x-responses-capture": "1"}
    with inspected.ours.sync_client.responses.stream(model="tiny", input="a question", extra_headers=capture) as stream:
        failed = next(event.response.id for event in stream if event.type == "response.failed")
    inspected.wait_for(2)
    upstream.stream(text("first words"), held, finish())
    running = inspected.ours.sync_client.responses.create(model="tiny", input="a question", background=True)

    def visit(page: Page) -> None:
        media: Any = {"color_scheme": scheme, "reduced_motion": "reduce"}
        page.emulate_media(**media)
        for path in ("", "/responses", "/background", *(f"/responses/{one}" for one in (first, failed, running.id))):
            page.goto(f"{inspected.url}/ui{path}")
            found = violations(page)
            assert not found, json.dumps([path, found], indent=1)

    look(visit)
    held.set()
