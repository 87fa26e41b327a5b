"""The inspector's JSON, and who may read it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from urllib.parse import quote

import openai
import orjson
import pytest
import redis

from responses_mw.ids import RunIds
from responses_mw.inspector.security import COOKIE, Guard
from responses_mw.state.schema import recent_key
from tests.inspector.conftest import ANSWER, SECRET, TOKEN, until
from tests.support.scripted import error, finish, text, usage

if TYPE_CHECKING:
    from tests.inspector.conftest import Inspect
    from tests.support.scripted import ScriptedUpstream

pytestmark = pytest.mark.usefixtures("nobody_else")


def audited(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the subjects of the audit lines that have been logged."""
    return [record.__dict__["subject"] for record in caplog.records if record.name == "responses_mw.audit"]


async def test_the_list_is_filtered_and_paginated(inspect: Inspect, upstream: ScriptedUpstream) -> None:
    inspected = inspect()
    for number in range(5):
        upstream.whole(ANSWER)
        inspected.ours.sync_client.responses.create(model="tiny", input=f"q{number}", store=number != 2)
    upstream.whole(error("out of memory", 500), 500)
    with pytest.raises(openai.InternalServerError):
        inspected.ours.sync_client.responses.create(model="tiny", input="fails")
    everything = inspected.wait_for(6)
    assert [one["status"] for one in inspected.summaries("?failed=true")] == ["failed"]
    assert [one["unstored"] for one in inspected.summaries("?unstored=1")] == ["request"]
    assert len(inspected.summaries("?status=completed,cancelled&kind=json&since=1h")) == 5
    assert inspected.summaries("?since=1d&until=2020-01-01") == []
    first = inspected.admin.get("/admin/api/responses?limit=4").json()
    rest = inspected.admin.get(f"/admin/api/responses?limit=4&before={first['next']}").json()
    assert {one["id"] for one in first["data"] + rest["data"]} == {one["id"] for one in everything}
    assert rest["next"] is None


async def test_a_request_is_found_by_its_id(inspect: Inspect, upstream: ScriptedUpstream) -> None:
    inspected = inspect()
    for name in ("one.of:mine", "another"):
        upstream.whole(error("out of memory", 500), 500)
        with pytest.raises(openai.InternalServerError):
            inspected.ours.sync_client.responses.create(model="tiny", input="fails", extra_headers={"x-request-id": name})
    inspected.wait_for(2)
    [one] = inspected.summaries("?request=one.of:mine")
    assert one["request"] == "one.of:mine"
    assert inspected.admin.get("/ui/jump?id=one.of:mine").headers["location"] == f"/ui/responses/{one['id']}"
    assert inspected.admin.get("/ui/jump?id=no:one").headers["location"] == "/ui/responses?request=no%3Aone"
    assert inspected.admin.get("/ui/jump", params={"id": "x&failed=true"}).headers["location"].endswith("x%26failed%3Dtrue")
    assert inspected.admin.get("/ui/jump").headers["location"] == "/ui/responses"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?status=good", "status"),
        ("?kind=a", "kind"),
        ("?limit=0", "limit"),
        ("?limit=501", "limit"),
        ("?limit=0000000019999", "limit"),
        ("?before=x", "before"),
        ("?since=yesterday", "since"),
        ("?failed=maybe", "failed"),
        ("?colour=red", "colour"),
    ],
)
async def test_an_invalid_parameter_is_named(inspect: Inspect, query: str, param: str) -> None:
    refused = inspect().admin.get(f"/admin/api/responses{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_a_response_without_a_known_model_or_owner_is_listed(inspect: Inspect, redis_url: str) -> None:
    inspected = inspect()
    response_id = RunIds().response
    facts = {"id": response_id, "status": "failed", "kind": "background", "ended": 1.0, "seconds": 0.0}
    with redis.Redis.from_url(redis_url) as client:
        client.xadd(recent_key(0), {"s": orjson.dumps(facts)})
    page = inspected.admin.get("/ui/responses")
    assert page.status_code == 200
    assert response_id in page.text


@pytest.mark.parametrize("item", ["1", "00000000099", "9" * 5000, "x"])
async def test_an_unknown_item_is_refused(inspect: Inspect, upstream: ScriptedUpstream, item: str) -> None:
    inspected = inspect()
    upstream.whole(ANSWER)
    made = inspected.ours.sync_client.responses.create(model="tiny", input="q")
    assert inspected.admin.get(f"/ui/responses/{made.id}/text?list=output&item=0").text == "the answer"
    assert inspected.admin.get(f"/ui/responses/{made.id}/text?list=output&item={item}").status_code == 400


async def test_content_is_shown_only_on_demand_and_in_mode_content(
    inspect: Inspect, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    upstream.whole(ANSWER)
    upstream.whole(ANSWER)
    shown, hidden = inspect(), inspect(ui__mode="metadata")
    made = shown.ours.sync_client.responses.create(model="tiny", input="a private question")
    path = f"/admin/api/responses/{made.id}"
    with caplog.at_level(logging.INFO, "responses_mw.audit"):
        assert "private" not in shown.admin.get(path).text
        assert not audited(caplog)
        assert "private" in shown.admin.get(f"{path}?content=true").text
        assert audited(caplog) == ["content shown as JSON"]
        caplog.clear()
        assert "private" not in hidden.admin.get(f"{path}?content=true").text
        assert "private" not in hidden.admin.get(f"/ui/responses/{made.id}").text
        assert hidden.admin.get(f"/ui/responses/{made.id}/text?list=input&item=0").status_code == 403
        assert not audited(caplog)
    assert shown.admin.get(f"/admin/api/responses/{RunIds().response}").status_code == 404
    unknown = shown.admin.get(f"/ui/responses/{RunIds().response}")
    assert unknown.status_code == 404
    assert "Nothing is known" in unknown.text


async def test_jobs_and_processes_are_listed(inspect: Inspect, upstream: ScriptedUpstream) -> None:
    inspected = inspect()
    [process] = until(lambda: inspected.admin.get("/admin/api/replicas").json()["data"])
    assert process["endpoints"][0]["ejected"] is False
    upstream.stream(text("hello"), finish(), usage())
    made = inspected.ours.sync_client.responses.create(model="tiny", input="hello", background=True)
    [summary] = inspected.wait_for(1)
    assert (summary["id"], summary["kind"], summary["replica"]) == (made.id, "background", process["name"])
    until(lambda: inspected.admin.get("/admin/api/jobs").json()["jobs"] == [])


async def test_mode_off_serves_nothing(inspect: Inspect) -> None:
    admin = inspect(ui__mode="off").admin
    for path in ("/ui", "/ui/responses", "/admin/api/responses"):
        assert admin.get(path).status_code == 404


async def test_the_overview_masks_secrets_among_the_settings(inspect: Inspect) -> None:
    key = f"team:sha256:{'0' * 64}"
    html = inspect(auth__api_keys=[key], upstream__api_key="sk-a-very-private-key").admin.get("/ui").text
    assert "auth.secret_keys" in html
    assert "auth.api_keys" in html
    assert "upstream.api_key" in html
    for secret in ("sk-a-very", "0" * 64, SECRET):
        assert secret not in html


# -- who may read --------------------------------------------------------------------------------------------------------------


async def test_a_token_is_required_by_header_or_login(inspect: Inspect) -> None:
    admin = inspect(ui__token=TOKEN).admin
    for path in ("/ui/responses", "/ui", "/ui/background", "/ui/static/live.js"):
        refused = admin.get(path)
        query = "" if path == "/ui" else f"?next={quote(path, safe='')}"
        assert (refused.status_code, refused.headers["location"]) == (303, f"/ui/login{query}")
    for path in ("/admin/api/responses", "/admin/api/unknown", "/admin/api/jobs"):
        assert admin.get(path).status_code == 401
    assert admin.get("/admin/api/responses", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert admin.get("/admin/api/responses", headers={"authorization": "Bearer wrong"}).status_code == 401
    own = {"origin": str(admin.base_url), "sec-fetch-site": "same-origin"}
    assert admin.post("/ui/login", data={"token": "wrong"}, headers=own).status_code == 401
    login = admin.post("/ui/login", data={"token": TOKEN}, headers=own)
    assert (login.status_code, login.headers["location"]) == (303, "/ui")
    cookie = login.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert admin.get("/ui/responses").status_code == 200
    assert admin.post("/ui/logout", headers=own).status_code == 303
    assert admin.get("/ui/responses").status_code == 303


async def test_a_logout_ends_the_session_on_all_replicas(inspect: Inspect) -> None:
    first, other = inspect(ui__token=TOKEN).admin, inspect(ui__token=TOKEN).admin

    def log_in() -> dict[str, str]:
        own = {"origin": str(first.base_url), "sec-fetch-site": "same-origin"}
        login = first.post("/ui/login", data={"token": TOKEN}, headers=own)
        first.cookies.clear()
        return {"cookie": login.headers["set-cookie"].partition(";")[0]}

    stolen, another = log_in(), log_in()
    assert other.get("/ui/responses", headers=stolen).status_code == 200
    own = {"origin": str(first.base_url), "sec-fetch-site": "same-origin"}
    assert first.post("/ui/logout", headers={**own, **stolen}).headers["location"] == "/ui/login"
    for replica in (first, other):
        assert replica.get("/ui/responses", headers=stolen).status_code == 303
        assert replica.get("/admin/api/responses", headers=stolen).status_code == 401
        assert replica.get("/ui/responses", headers=another).status_code == 200


async def test_a_login_leads_to_the_page_that_was_asked_for(inspect: Inspect) -> None:
    admin = inspect(ui__token=TOKEN).admin
    own = {"origin": str(admin.base_url), "sec-fetch-site": "same-origin"}
    asked = "/ui/responses?failed=true&model=a%26b"
    form = admin.get(admin.get(asked).headers["location"])
    assert 'name="next" value="/ui/responses?failed=true&amp;model=a%26b"' in form.text
    for wanted, shown in ((asked, asked), *((url, "/ui") for url in ("", "//evil.example", "https://evil.example", "/uix"))):
        login = admin.post("/ui/login", data={"token": TOKEN, "next": wanted}, headers=own)
        assert login.headers["location"] == shown


def test_a_session_expires_and_cannot_be_forged(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(TOKEN)
    session = guard.new_session()
    assert guard.session(session)
    until_then, nonce, signature = session.split(".")
    assert not guard.session(f"{int(until_then) + 1}.{nonce}.{signature}")
    assert not Guard("another token of the inspector").session(session)
    for forged in ("", ".", "..", "9999999999..", f"x.{nonce}.{signature}", "é.é.é"):
        assert not guard.session(forged)
    monkeypatch.setattr("responses_mw.inspector.security.SESSION_SECONDS", -1)
    assert not guard.session(guard.new_session())


async def test_without_a_token_the_inspector_is_closed_except_on_loopback(
    inspect: Inspect, caplog: pytest.LogCaptureFixture
) -> None:
    admin = inspect(server__admin_host="0.0.0.0").admin
    for path in ("/ui", "/ui/login", "/admin/api/responses"):
        assert admin.get(path).status_code == 403
    assert "ui.token is not set" in caplog.text


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
    ],
)
async def test_pages_of_other_origins_are_refused(inspect: Inspect, headers: dict[str, str]) -> None:
    admin = inspect(ui__actions=True).admin
    assert admin.get("/ui/responses", headers=headers).status_code == 403
    assert admin.get("/admin/api/responses", headers=headers).status_code == 403
    assert admin.post(f"/ui/responses/{RunIds().response}/delete", headers=headers).status_code == 403
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert admin.get("/ui/responses", headers=link).status_code == 200
    assert admin.post(f"/ui/responses/{RunIds().response}/delete", headers=link).status_code == 403
    assert admin.post(f"/ui/responses/{RunIds().response}/delete", headers={"cookie": f"{COOKIE}=x"}).status_code == 403


async def test_a_rebound_host_name_is_refused(inspect: Inspect) -> None:
    admin = inspect().admin
    for path in ("/ui", "/admin/api/responses"):
        assert admin.get(path, headers={"host": "evil.example"}).status_code == 421


async def test_every_answer_has_the_security_headers(inspect: Inspect) -> None:
    admin = inspect().admin
    for path in ("/ui", "/ui/unknown", "/ui/static/style.css", "/admin/api/responses", "/admin/api/unknown"):
        headers = admin.get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"], path
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")


async def test_actions_need_the_setting_ui_actions(
    inspect: Inspect, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    upstream.whole(ANSWER)
    reader, actor = inspect(), inspect(ui__actions=True)
    made = reader.ours.sync_client.responses.create(model="tiny", input="hello")
    path = f"/ui/responses/{made.id}/delete"
    assert reader.admin.post(path).status_code == 403
    assert reader.ours.sync_client.responses.retrieve(made.id).id == made.id
    with caplog.at_level(logging.INFO, "responses_mw.audit"):
        assert actor.admin.post(path).status_code == 303
    assert audited(caplog) == ["delete by the inspector"]
    with pytest.raises(openai.NotFoundError):
        reader.ours.sync_client.responses.retrieve(made.id)
