"""The pages of conversations."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.inspector.conversations import ITEMS
from tests.inspector.browser import needs_browser, violations
from tests.inspector.conftest import ANSWER
from tests.inspector.test_pages import HOSTILE
from tests.support.scripted import completion, error

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.inspector.conftest import Inspect
    from tests.support.scripted import ScriptedUpstream

pytestmark = pytest.mark.usefixtures("nobody_else")


async def test_the_list_counts_the_responses_of_each_conversation(inspect: Inspect, upstream: ScriptedUpstream) -> None:
    inspected = inspect()
    client = inspected.ours.sync_client
    first, second, unused = (client.conversations.create().id for _ in range(3))
    for number, name in enumerate([first, first, second, None]):
        upstream.whole(ANSWER if number < 2 else completion({"role": "assistant", "content": "."}))
        client.responses.create(model=f"m{number}", input="hi", conversation=name)
    upstream.whole(error("out of memory", 500), 500)
    with pytest.raises(Exception, match="out of memory"):
        client.responses.create(model="m", input="hi", conversation=second)
    inspected.wait_for(5)
    page = inspected.admin.get("/ui/conversations").text
    assert [name in page for name in (first, second, unused)] == [True, True, False]
    assert "m0, m1" in page
    page = inspected.admin.get("/ui/conversations?failed=true").text
    assert [name in page for name in (first, second)] == [False, True]
    assert inspected.admin.get("/ui/conversations?owner=nobody").text.count("conv_") == 1  # of the search box
    assert inspected.admin.get("/ui/conversations?since=yesterday").status_code == 400


async def test_items_are_paginated_and_each_view_is_logged(
    inspect: Inspect, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "responses_mw")
    inspected = inspect()
    client = inspected.ours.sync_client
    items: Any = [{"role": "user", "content": f"text {number:03}"} for number in range(20)]
    made = client.conversations.create(items=items, metadata={"topic": "the <sea>"})
    for _ in range(2):
        client.conversations.items.create(made.id, items=items)
    client.conversations.items.create(made.id, items=[{"role": "user", "content": "x" * 30_000}])
    path = f"/ui/conversations/{made.id}"
    page = inspected.admin.get(path).text
    assert page.count('class="item user"') == ITEMS
    assert "the &lt;sea&gt;" in page
    assert "10,000 more characters" in page
    newest = client.conversations.items.list(made.id, limit=1).data[0]
    assert inspected.admin.get(f"{path}/text?item={newest.id}").text == "x" * 30_000
    earlier = page.partition('href="?before=')[2].partition('"')[0]
    assert inspected.admin.get(f"{path}?before={earlier}").text.count('class="item user"') == 61 - ITEMS
    looks = [record.__dict__["facts"] for record in caplog.records if record.name == "responses_mw.audit"]
    assert looks == [{"client": "127.0.0.1", "conversation": made.id}] * 3
    assert inspected.admin.get(f"{path}?before=msg_unknown").status_code == 400
    assert inspected.admin.get(f"{path}/text?item=msg_unknown").status_code == 404
    client.conversations.delete(made.id)
    for gone in (path, f"{path}/text?item={newest.id}", "/ui/conversations/conv_unknown"):
        assert inspected.admin.get(gone).status_code == 404


async def test_the_page_of_a_deleted_conversation_still_lists_its_responses(
    inspect: Inspect, upstream: ScriptedUpstream
) -> None:
    inspected = inspect()
    client = inspected.ours.sync_client
    made = client.conversations.create().id
    upstream.whole(ANSWER)
    response = client.responses.create(model="tiny", input="a question", conversation=made).id
    client.conversations.delete(made)
    inspected.wait_for(1)
    page = inspected.admin.get(f"/ui/conversations/{made}").text
    assert "it was deleted, or has expired" in page
    assert response in page


async def test_metadata_mode_shows_no_content(inspect: Inspect) -> None:
    inspected = inspect(ui__mode="metadata")
    made = inspected.ours.sync_client.conversations.create(
        items=[{"role": "user", "content": "a secret"}], metadata={"topic": "a secret"}
    )
    page = inspected.admin.get(f"/ui/conversations/{made.id}")
    assert page.status_code == 200
    assert "a secret" not in page.text
    item = inspected.ours.sync_client.conversations.items.list(made.id).data[0]
    assert inspected.admin.get(f"/ui/conversations/{made.id}/text?item={item.id}").status_code == 403


@needs_browser
async def test_a_hostile_conversation_is_shown_harmlessly(inspect: Inspect, upstream: ScriptedUpstream, look: Any) -> None:
    inspected = inspect()
    client = inspected.ours.sync_client
    made = client.conversations.create(metadata={HOSTILE[:64]: HOSTILE}).id
    upstream.whole(completion({"role": "assistant", "content": HOSTILE}))
    client.responses.create(model=HOSTILE, input=HOSTILE, conversation=made)
    inspected.wait_for(1)

    def visit(page: Page) -> None:
        page.goto(f"{inspected.url}/ui/conversations")
        assert violations(page) == []
        page.locator(f'a[title="{made}"]').click()
        assert page.locator("article.user .text").inner_text() == HOSTILE
        assert "owned" not in page.title()
        for scheme in ("dark", "light"):
            media: Any = {"color_scheme": scheme, "reduced_motion": "reduce"}
            page.emulate_media(**media)
            assert violations(page) == []
        page.get_by_role("searchbox").fill(made)
        page.get_by_role("searchbox").press("Enter")
        page.locator("h1", has_text=made).wait_for()
        page.locator("table.list a.id").first.click()
        page.locator(f'.chain a[title="{made}"]').click()
        page.locator("h1", has_text=made).wait_for()
        page.get_by_role("link", name="Continue it").click()
        assert made in page.get_by_label("Further members as JSON").input_value()
        assert page.get_by_label("Model").input_value() == HOSTILE
        assert page.get_by_label("Store the response").is_checked()

    look(visit)
