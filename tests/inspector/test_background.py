"""The page of background responses, and its actions."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.inspector import pages
from tests.inspector.browser import expect, needs_browser
from tests.inspector.conftest import until
from tests.support.scripted import HELLO, Signal, finish, text

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.inspector.conftest import Inspect
    from tests.support.scripted import ScriptedUpstream

pytestmark = pytest.mark.usefixtures("nobody_else")


async def test_a_requeued_response_is_run_again(inspect: Inspect, upstream: ScriptedUpstream) -> None:
    inspected = inspect(ui__actions=True)
    client = inspected.ours.sync_client
    held = upstream.stream(*HELLO, before=Signal())
    made = client.responses.create(model="tiny", input="hello", background=True)
    await held.asked.wait()
    upstream.stream(*HELLO)
    answer = await asyncio.to_thread(inspected.admin.post, f"/ui/responses/{made.id}/requeue")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/background")
    done = await asyncio.to_thread(until, lambda: (shown := client.responses.retrieve(made.id)).status == "completed" and shown)
    assert (done.output_text, len(upstream.requests)) == ("Hello", 2)
    numbers = [event.sequence_number for event in client.responses.retrieve(made.id, stream=True)]
    assert numbers == list(range(len(numbers)))
    again = inspected.admin.post(f"/ui/responses/{made.id}/requeue")
    assert again.status_code == 400
    assert "has ended" in again.text


async def test_jobs_are_counted_and_listed_by_owner(inspect: Inspect) -> None:
    keys = [f"{name}:sha256:{sha256(f'key of {name}'.encode()).hexdigest()}" for name in ("alice", "bob")]
    inspected = inspect(jobs__concurrency=0, auth__api_keys=keys, upstream__api_key="operators")
    for name, count in (("alice", 2), ("bob", 1)):
        client = inspected.ours.sync_client.with_options(api_key=f"key of {name}")
        for _ in range(count):
            client.responses.create(model="tiny", input="hello", background=True)
    jobs = inspected.admin.get("/admin/api/jobs").json()
    assert sorted(jobs["owners"].values()) == [1, 2]
    [bob] = [owner for owner, count in jobs["owners"].items() if count == 1]
    html = inspected.admin.get("/ui/background").text
    assert html.count('class="status waiting"') == 3
    assert f'href="/ui/background?owner={bob}">bob 1</a>' in html
    only = inspected.admin.get(f"/ui/background?owner={bob}").text
    assert only.count('class="status waiting"') == 1


@needs_browser
async def test_the_page_updates_itself_unless_an_action_is_open(
    inspect: Inspect, upstream: ScriptedUpstream, look: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "REFRESH_SECONDS", 0.05)
    inspected = inspect(ui__actions=True)
    end = Signal()
    upstream.stream(text("hello"), end, finish())
    create = inspected.ours.sync_client.responses.create

    def visit(page: Page) -> None:
        page.goto(f"{inspected.url}/ui/background")
        page.get_by_text("No background response").wait_for()
        first = create(model="tiny", input="a question", background=True).id
        row = page.locator("tr", has=page.locator(f'a[title="{first}"]'))
        expect(row.locator(".status")).to_have_text("running")
        row.get_by_text("Requeue…").click()
        end.set()
        until(lambda: inspected.ours.sync_client.responses.retrieve(first).status == "completed")
        expect(row.get_by_text("Take the job from its worker?")).to_be_visible()
        row.get_by_text("Requeue…").click()
        page.locator("h1").click()
        page.get_by_text("No background response").wait_for()
        page.get_by_role("button", name="Live").click()
        expect(page.get_by_role("button", name="Live")).to_have_attribute("aria-pressed", "false")

    look(visit)
