"""Pages of other origins cannot change anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from starlette.datastructures import Headers

from responses_mw.asgi.web_pages import Origins
from responses_mw.errors import Forbidden
from tests.support.scripted import HELLO

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

    StartAt = Callable[..., Ours]

MINE, OTHER, HERE = "https://mine.example", "https://other.example", "http://here.example:8000"

WELCOME: dict[str, list[tuple[str, str]]] = {
    "no browser": [],
    "a page of ours": [("origin", HERE)],
    "a page of ours over TLS": [("origin", "https://here.example:8000")],
    "a page of ours in capitals": [("origin", "http://HERE.example:8000")],
    "a page of ours behind a proxy": [("origin", "https://public.example"), ("sec-fetch-site", "same-origin")],
    "a listed origin": [("origin", MINE), ("sec-fetch-site", "cross-site")],
    "the address bar": [("sec-fetch-site", "none")],
}
REFUSED: dict[str, list[tuple[str, str]]] = {
    "another origin": [("origin", OTHER)],
    "a sandboxed frame": [("origin", "null")],
    "another port": [("origin", "http://here.example:8001")],
    "a name that begins alike": [("origin", "http://here.example:8000.evil.example")],
    "a user of that name": [("origin", "http://here.example:8000@evil.example")],
    "no origin, but another site": [("sec-fetch-site", "cross-site")],
    "no origin, but a subdomain": [("sec-fetch-site", "same-site")],
    "two, of which one is listed": [("origin", MINE), ("origin", OTHER)],
    "what is no origin": [("origin", "http://[")],
    "nothing": [("origin", "")],
}


def headers(told: list[tuple[str, str]], host: str | None = "here.example:8000") -> Headers:
    own = [("host", host)] if host is not None else []
    return Headers(raw=[(name.encode(), value.encode()) for name, value in [*own, *told]])


@pytest.mark.parametrize("told", WELCOME.values(), ids=WELCOME.keys())
def test_allowed_origins_pass(told: list[tuple[str, str]]) -> None:
    Origins([MINE]).check(headers(told))


@pytest.mark.parametrize("host", ["here.example:8000", "", None])
@pytest.mark.parametrize("told", REFUSED.values(), ids=REFUSED.keys())
def test_other_origins_are_refused_unless_all_are_allowed(told: list[tuple[str, str]], host: str | None) -> None:
    with pytest.raises(Forbidden):
        Origins([MINE]).check(headers(told, host))
    Origins(["*"]).check(headers(told, host))


def test_the_origin_null_may_be_listed() -> None:
    Origins(["null"]).check(headers([("origin", "null")]))


CHANGES = [
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/compact"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/responses/resp_x/cancel"),
    ("DELETE", "/v1/responses/resp_x"),
    ("POST", "/v1/conversations"),
    ("POST", "/v1/conversations/conv_x"),
    ("DELETE", "/v1/conversations/conv_x"),
    ("POST", "/v1/conversations/conv_x/items"),
    ("DELETE", "/v1/conversations/conv_x/items/msg_x"),
    ("PATCH", "/v1/responses/of_the_future"),
]


@pytest.mark.both_mounts
async def test_a_page_of_another_origin_changes_nothing(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__dialect="vllm")
    simple = {"origin": OTHER, "content-type": "text/plain"}  # what a browser sends without a preflight
    for method, path in CHANGES:
        answer = await ours.http.request(method, path, content=b'{"model": "tiny", "input": "Hi"}', headers=simple)
        assert answer.status_code == 403, (method, path)
        assert answer.json()["error"]["code"] == "origin_not_allowed"
    assert upstream.requests == upstream.visits == []


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "PROPFIND"])
async def test_a_page_of_another_origin_changes_nothing_at_the_upstream(
    start_at: StartAt, upstream: ScriptedUpstream, method: str
) -> None:
    ours = start_at("proxy", upstream__dialect="vllm", server__cors_origins=[MINE])
    for site in ({"origin": OTHER}, {"sec-fetch-site": "cross-site"}):
        refused = await ours.http.request(method, "/v1/load_lora_adapter", content=b"{}", headers=site)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "origin_not_allowed"
    assert upstream.visits == []
    for site in ({}, {"origin": MINE}, {"origin": ours.url}):
        await ours.http.request(method, "/v1/load_lora_adapter", content=b"{}", headers=site)
    await ours.http.get("/v1/load_lora_adapter", headers={"origin": OTHER})
    assert [visit.method for visit in upstream.visits] == [method] * 3 + ["GET"]


async def test_a_page_of_a_listed_origin_can_create_responses(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(server__cors_origins=[MINE])
    upstream.stream(*HELLO)
    body: dict[str, Any] = {"model": "tiny", "input": "Hi"}
    assert (await ours.http.post("/v1/responses", json=body, headers={"origin": MINE})).status_code == 200
    refused = await ours.http.post("/v1/responses", json=body, headers={"origin": OTHER})
    assert refused.status_code == 403


async def test_get_requests_are_accepted_from_any_origin(ours: Ours) -> None:
    """Browsers do not let the page read the answer."""
    assert (await ours.http.get("/v1/responses/resp_x", headers={"origin": OTHER})).status_code == 404
