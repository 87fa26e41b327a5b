"""The pages of files and vector stores."""

from __future__ import annotations

import logging
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.auth import owner_of_key
from responses_mw.inspector.file_pages import PAGE
from tests.inspector.browser import needs_browser, violations
from tests.inspector.conftest import until
from tests.inspector.test_pages import HOSTILE

if TYPE_CHECKING:
    from openai import OpenAI
    from playwright.sync_api import Page

    from tests.inspector.conftest import Inspect

pytestmark = pytest.mark.usefixtures("nobody_else")

KEYS = [f"alice:sha256:{sha256(b'key').hexdigest()}"]
OWNER = owner_of_key("alice")
CONTENT = b"# The sea\n\nThe sea is <b>4000 m</b> deep on average.\n"


def filled(client: OpenAI, name: str = "a handbook") -> tuple[str, str, str]:
    """Create a store with an ingested file and a failed one. Return the ids of the store and of both files."""
    store = client.vector_stores.create(name=name).id
    files = [
        client.files.create(file=(filename, content), purpose="assistants").id
        for filename, content in (("sea.md", CONTENT), ("broken.pdf", b"%PDF-1.4 nothing"))
    ]
    client.vector_stores.files.create(store, file_id=files[0], attributes={"topic": HOSTILE})
    client.vector_stores.files.create(store, file_id=files[1])
    until(lambda: client.vector_stores.retrieve(store).file_counts.in_progress == 0)
    return store, files[0], files[1]


async def test_stores_failures_and_searches_are_shown_and_logged(inspect: Inspect, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "responses_mw")
    inspected = inspect(ui__actions=True, auth__api_keys=KEYS)
    store, good, bad = filled(inspected.ours.sync_client)
    owners = inspected.admin.get("/ui/files").text
    assert f"/ui/files?owner={OWNER}" in owners
    assert '<span class="status failed">1</span>' in owners
    page = inspected.admin.get("/ui/files?owner=alice").text
    for shown in (store, good, bad, "a handbook", "broken.pdf"):
        assert shown in page
    path = f"/ui/files/{OWNER}/{store}"
    assert inspected.admin.get(f"/ui/jump?id={store}").headers["location"] == f"/ui/files?store={store}"
    assert inspected.admin.get(f"/ui/files?store={store}").headers["location"] == path
    for unknown in ("vs_" + "a" * 25, "vs_x", "}{"):
        assert inspected.admin.get("/ui/files", params={"store": unknown}).status_code == 404
    page = inspected.admin.get(path).text
    assert "1 completed" in page
    assert "invalid_file" in page
    assert good not in inspected.admin.get(f"{path}?status=failed").text
    page = inspected.admin.post(f"{path}/search", data={"query": "How deep is the sea?"}).text
    assert "&lt;b&gt;4000 m&lt;/b&gt;" in page
    assert "must not be blank" in inspected.admin.post(f"{path}/search", data={"query": " "}).text
    logged = [record.__dict__["facts"] for record in caplog.records if record.name == "responses_mw.audit"]
    assert {"client": "127.0.0.1", "owner": OWNER, "store": store} in logged
    for gone, status in (
        (f"/ui/files/{OWNER}/vs_unknown", 404),
        (f"/ui/files/{'0' * 32}/{store}", 404),
        ("/ui/files/A B/x", 400),
    ):
        assert inspected.admin.get(gone).status_code == status
    for wrong in (f"{path}?status=x", f"{path}?after=x", "/ui/files?owner=}{", f"/ui/files?owner={OWNER}&after=x"):
        assert inspected.admin.get(wrong).status_code == 400


async def test_metadata_mode_shows_no_name_and_searches_nothing(inspect: Inspect) -> None:
    inspected = inspect(ui__mode="metadata", ui__actions=True, auth__api_keys=KEYS)
    store, good, _ = filled(inspected.ours.sync_client, "a secret name")
    pages = [inspected.admin.get(path).text for path in (f"/ui/files?owner={OWNER}", f"/ui/files/{OWNER}/{store}")]
    for page in pages:
        assert good in page
        for hidden in ("a secret name", "sea.md", "topic", "malformed"):
            assert hidden not in page
    assert "invalid_file" in pages[1]
    assert inspected.admin.post(f"/ui/files/{OWNER}/{store}/search", data={"query": "sea"}).status_code == 403


async def test_a_search_needs_actions(inspect: Inspect) -> None:
    inspected = inspect(auth__api_keys=KEYS)
    store = inspected.ours.sync_client.vector_stores.create().id
    path = f"/ui/files/{OWNER}/{store}"
    assert inspected.admin.post(f"{path}/search", data={"query": "sea"}).status_code == 403
    assert "A search needs" in inspected.admin.get(path).text


async def test_vector_stores_are_paginated(inspect: Inspect) -> None:
    inspected = inspect(auth__api_keys=KEYS)
    made = [inspected.ours.sync_client.vector_stores.create().id for _ in range(PAGE + 1)]
    page = inspected.admin.get("/ui/files?owner=alice").text
    assert (made[-1] in page, made[0] in page) == (True, False)
    link = page.partition('aria-label="Further vector stores"><a href="')[2].partition('"')[0].replace("&amp;", "&")
    page = inspected.admin.get(f"/ui/files{link}").text
    assert (made[-1] in page, made[0] in page) == (False, True)


@needs_browser
async def test_the_pages_work_in_a_browser(inspect: Inspect, look: Any) -> None:
    inspected = inspect(ui__actions=True, auth__api_keys=KEYS)
    store, _, _ = filled(inspected.ours.sync_client, HOSTILE)

    def visit(page: Page) -> None:
        page.goto(f"{inspected.url}/ui/files")
        assert violations(page) == []
        page.get_by_role("link", name="alice").click()
        for scheme in ("dark", "light"):
            media: Any = {"color_scheme": scheme, "reduced_motion": "reduce"}
            page.emulate_media(**media)
            assert violations(page) == []
        page.locator(f'a[title="{store}"]').click()
        page.get_by_label("Query").fill("How deep is the sea?")
        page.get_by_role("button", name="Search").click()
        page.get_by_text("<b>4000 m</b>").wait_for()
        assert "owned" not in page.title()
        assert violations(page) == []
        page.get_by_role("link", name="Failed").click()
        page.get_by_text("invalid_file").wait_for()

    look(visit)
