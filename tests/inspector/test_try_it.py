"""The page *Try it*: the operator creates responses on behalf of an owner."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from responses_mw.auth import APIKeys
from responses_mw.inspector.snippets import snippets
from responses_mw.inspector.try_it import MAX_CONCURRENT, MAX_MORE, Draft
from tests.inspector.browser import needs_browser, violations
from tests.inspector.conftest import ANSWER, TOKEN, until
from tests.support.scripted import Signal, finish, reasoning, text, usage

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.inspector.conftest import Inspect
    from tests.support.scripted import ScriptedUpstream

pytestmark = pytest.mark.usefixtures("nobody_else")

LINES = [f"{name}:sha256:{sha256(f'key-of-{name}'.encode()).hexdigest()}" for name in ("one", "all")]
KEYS = {"auth__api_keys": [f"{LINES[0]};models=llama", LINES[1]], "upstream__api_key": "operators"}
"""Keys named `one`, for the model `llama`, and `all`, for all models."""
BODY = {"input": "a question", "store": "on"}
CONTENT = {"ui__actions": True}


def documents(answer: Any) -> list[dict[str, Any]]:
    """Return the JSON of a stream's events."""
    frames = (line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: "))
    return [orjson.loads(frame) for frame in frames if frame != "[DONE]"]


@pytest.mark.both_mounts
async def test_a_response_belongs_to_the_chosen_key(
    inspect: Inspect, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "responses_mw")
    inspected = inspect(**CONTENT, **KEYS)
    upstream.stream(text("an answer"), finish(), usage())
    answer = inspected.admin.post("/ui/try/stream", data={**BODY, "key": "one"})
    made = documents(answer)[-1]["response"]
    assert (answer.status_code, made["status"], made["model"]) == (200, "completed", "llama")
    assert upstream.requests[-1].headers["authorization"] == "Bearer operators"
    for key, status in (("key-of-one", 200), ("key-of-all", 404)):
        path, headers = f"/v1/responses/{made['id']}", {"authorization": f"Bearer {key}"}
        assert (await inspected.ours.http.get(path, headers=headers)).status_code == status
    [summary] = inspected.wait_for(1)
    assert (summary["id"], summary["key"]) == (made["id"], "one")
    assert "<option selected>one</option>" in inspected.admin.get(f"/ui/try?from={made['id']}").text
    audited, _ = [record.__dict__["facts"] for record in caplog.records if record.name == "responses_mw.audit"]
    assert audited == {"client": "127.0.0.1", "key": "one", "request": summary["request"]}


async def test_the_rules_for_the_chosen_key_apply(inspect: Inspect, upstream: ScriptedUpstream) -> None:
    inspected = inspect(**CONTENT, **KEYS, limits__requests_per_minute=1)
    refused = inspected.admin.post("/ui/try/stream", data={**BODY, "key": "one", "model": "secret"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    upstream.stream(text("an answer"), finish())
    for status in (200, 429):
        assert inspected.admin.post("/ui/try/stream", data={**BODY, "key": "all", "model": "m"}).status_code == status
    for key in ("", "unknown", "one:", "key-of-one"):
        refused = inspected.admin.post("/ui/try/stream", data={**BODY, "key": key})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "key")
    assert len(upstream.requests) == 1


async def test_without_api_keys_the_credential_is_that_of_the_upstream(inspect: Inspect, upstream: ScriptedUpstream) -> None:
    inspected = inspect(**CONTENT, auth__tenant_header="X-Tenant")
    refused = inspected.admin.post("/ui/try/stream", data={**BODY, "model": "tiny"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_tenant_header")
    for fault in ({"credential": "a\r\nb: c"}, {"tenant": "a\r\nb: c"}):
        refused = inspected.admin.post("/ui/try/stream", data={**BODY, **fault})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(fault)))
    upstream.stream(text("an answer"), finish())
    fields = {**BODY, "model": "tiny", "tenant": "blue", "credential": "sk-mine"}
    assert inspected.admin.post("/ui/try/stream", data=fields).status_code == 200
    assert upstream.requests[-1].headers["authorization"] == "Bearer sk-mine"
    page = inspected.admin.post("/ui/try", data={**fields, "do": "code"}).text
    assert "blue" in page
    assert "sk-mine" not in page


@pytest.mark.parametrize("settings", [{}, {"ui__actions": True, "ui__mode": "metadata"}])
async def test_requests_need_actions_and_mode_content(inspect: Inspect, upstream: ScriptedUpstream, settings: Any) -> None:
    inspected = inspect(**settings)
    assert inspected.admin.get("/ui/try").status_code == 200
    assert inspected.admin.post("/ui/try/stream", data=BODY).status_code == 403
    assert "can be sent only if" in inspected.admin.post("/ui/try", data={**BODY, "do": "send"}).text
    assert "curl" in inspected.admin.post("/ui/try", data={**BODY, "do": "code"}).text
    assert upstream.requests == []


@pytest.mark.parametrize("path", ["/ui/try", "/ui/try/stream"])
async def test_other_pages_cannot_send_requests(inspect: Inspect, upstream: ScriptedUpstream, path: str) -> None:
    inspected = inspect(**CONTENT)
    for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}):
        assert inspected.admin.post(path, data={**BODY, "do": "send"}, headers=headers).status_code == 403
    assert inspected.admin.get(path, params={**BODY, "do": "send"}).status_code in (200, 400)
    assert upstream.requests == []


@pytest.mark.both_mounts
async def test_a_disconnect_cancels_the_response_and_concurrency_is_limited(
    inspect: Inspect, upstream: ScriptedUpstream
) -> None:
    inspected = inspect(**CONTENT)
    held, lines = Signal(), list[Any]()
    with ExitStack() as stack:
        for _ in range(MAX_CONCURRENT):
            upstream.stream(text("first words"), held, finish())
            answer = stack.enter_context(inspected.admin.stream("POST", "/ui/try/stream", data={**BODY, "model": "tiny"}))
            lines.append(answer.iter_lines())
            next(line for line in lines[-1] if "first words" in line)
        assert inspected.admin.post("/ui/try/stream", data={**BODY, "model": "tiny"}).status_code == 429
    assert {one["status"] for one in inspected.wait_for(MAX_CONCURRENT)} <= {"cancelled", "interrupted"}
    held.set()
    upstream.stream(text("an answer"), finish())
    assert until(lambda: inspected.admin.post("/ui/try/stream", data={**BODY, "model": "tiny"}).status_code == 200)


async def test_without_javascript_the_page_shows_the_answer(inspect: Inspect, upstream: ScriptedUpstream) -> None:
    inspected = inspect(**CONTENT)
    upstream.stream(text("an <b>answer</b>"), finish())
    page = inspected.admin.post("/ui/try", data={**BODY, "model": "tiny", "do": "send"}).text
    assert page.count("an &lt;b&gt;answer&lt;/b&gt;") >= 3  # the text, an event, and as received
    assert "response.output_text.delta" in page
    upstream.whole(ANSWER)
    page = inspected.admin.post("/ui/try", data={**BODY, "more": '{"stream": false}', "model": "tiny", "do": "send"}).text
    assert "the answer" in page
    for more in ("[]", "{", '{"a": 1', "null"):
        page = inspected.admin.post("/ui/try", data={**BODY, "more": more, "model": "tiny", "do": "send"}).text
        assert "The further members" in page


async def test_a_response_can_be_repeated(inspect: Inspect, upstream: ScriptedUpstream) -> None:
    inspected = inspect(**CONTENT)
    upstream.whole(ANSWER)
    options: dict[str, Any] = {"model": "tiny", "instructions": "be <brief>", "max_output_tokens": 17, "temperature": 0.25}
    made = inspected.ours.sync_client.responses.create(input="a question", **options)
    page = inspected.admin.get(f"/ui/try?from={made.id}").text
    for shown in ("a question</textarea>", "be &lt;brief&gt;</textarea>", 'value="17"', "&#34;temperature&#34;: 0.25"):
        assert shown in page
    upstream.whole(ANSWER)
    long: Any = [{"role": "user", "content": "x" * MAX_MORE}, {"role": "user", "content": "a question"}]
    made = inspected.ours.sync_client.responses.create(model="tiny", input=long)
    page = inspected.admin.get(f"/ui/try?from={made.id}").text
    assert "too long for this form" in page
    assert len(page) < MAX_MORE
    assert inspected.admin.get("/ui/try?from=resp_unknown").status_code == 404


def test_the_code_streams_and_includes_members_of_other_apis() -> None:
    draft = Draft.of({"input": "it's", "store": "on", "more": '{"top_k": 3, "temperature": 0.5}'})
    curl, python, script = (one.code for one in snippets(draft.body()))
    assert "it'\\''s" in curl
    assert "stream=True" in python
    assert "extra_body={'top_k': 3}" in python
    assert "for await" in script
    assert "store" not in curl + python + script
    compile(python, "snippet", "exec")


def test_several_keys_with_one_name_may_use_only_their_common_models() -> None:
    lines = [f"a:sha256:{number:064x}{models}" for number, models in enumerate([";models=x,y", ";models=y,z", ""])]
    known = APIKeys(lines).named("a")
    assert known is not None
    assert known.models == frozenset({"y"})
    assert APIKeys(lines).named("b") is None


@needs_browser
async def test_an_expired_session_is_explained(inspect: Inspect, look: Any) -> None:
    inspected = inspect(**CONTENT, ui__token=TOKEN)

    def visit(page: Page) -> None:
        page.goto(f"{inspected.url}/ui/try")
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Log in").click()
        page.goto(f"{inspected.url}/ui/try?input=hi")
        page.context.clear_cookies()
        page.get_by_role("button", name="Send").click()
        page.get_by_text("Your session has ended").wait_for()

    look(visit, expected="401 (Unauthorized)")


@needs_browser
async def test_errors_in_the_form_are_shown(inspect: Inspect, look: Any) -> None:
    inspected = inspect(**CONTENT, **KEYS)

    def visit(page: Page) -> None:
        page.goto(f"{inspected.url}/ui/try?model=secret&input=hi")
        page.get_by_label("API key").select_option("one")
        page.get_by_label("Further members as JSON").evaluate("area => area.closest('details').open = true")
        page.get_by_label("Further members as JSON").fill("{")
        page.get_by_role("button", name="Show the code").click()
        page.get_by_text("The further members are not JSON").wait_for()
        page.get_by_label("Further members as JSON").fill("")
        page.get_by_role("button", name="Show the code").click()
        page.get_by_text("curl -N").wait_for()

    look(visit)


@needs_browser
async def test_the_events_of_an_answer_appear_while_it_streams(inspect: Inspect, upstream: ScriptedUpstream, look: Any) -> None:
    inspected = inspect(**CONTENT, **KEYS)
    more = Signal()
    hostile = "<img src=x onerror=\"document.title = 'owned'\">"
    upstream.stream(reasoning("a thought"), text(hostile), more, text(" and more"), finish(), usage())

    def visit(page: Page) -> None:
        page.goto(f"{inspected.url}/ui/try")
        page.get_by_label("API key").select_option("one")
        page.get_by_label("Input").fill("a question")
        page.get_by_label("Input").press("Control+Enter")
        page.get_by_text(hostile).first.wait_for()
        assert page.get_by_role("button", name="Stop").is_visible()
        more.set()
        page.locator("#state .completed").wait_for()
        assert page.locator("#text").inner_text() == f"{hostile} and more"
        numbers = page.locator("#events td:first-child").all_inner_texts()
        assert numbers == [str(number) for number in range(len(numbers))]
        assert "document.title" not in page.title()
        page.get_by_text("Python", exact=True).click()
        page.get_by_text("responses.create(").first.wait_for()
        for scheme in ("dark", "light"):
            media: Any = {"color_scheme": scheme, "reduced_motion": "reduce"}
            page.emulate_media(**media)
            assert violations(page) == []
        page.get_by_role("link", name="Open the response").click()
        page.get_by_text("a question").first.wait_for()

    look(visit)
