"""Verification of credentials by the upstream, and how long an acceptance is cached."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.errors import Unauthorized, UpstreamError, UpstreamTimeout
from responses_mw.upstream import Caller, Standing, Upstream
from responses_mw.upstream import caller as caller_module
from responses_mw.upstream import client as client_module
from responses_mw.upstream.pool import Pool
from responses_mw.upstream.transports.asgi import ASGITransport
from tests.auth.servers import Knowing, Listing
from tests.support.configured import make_settings
from tests.support.scripted import Answer, Asked, ScriptedUpstream, Signal, completion, error, json_answer

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio


def before(app: Any, **settings: Any) -> Upstream:
    return Upstream(ASGITransport(app), Pool.of("http://localhost"), make_settings(**settings).upstream)


def caller(key: str | None = "good", **headers: str) -> Caller:
    authorization = {"authorization": f"Bearer {key}"} if key is not None else {}
    return Caller(headers={**authorization, **headers})


@pytest.mark.parametrize("listing", ["guarded", "public", "absent", "forbidden"])
async def test_valid_credentials_are_accepted_and_others_refused(listing: Listing) -> None:
    upstream = before(Knowing(listing))
    await upstream.verify(caller())
    for key in ("wrong", None):
        with pytest.raises(Unauthorized):
            await upstream.verify(caller(key))


@pytest.mark.parametrize("listing", ["guarded", "absent", "forbidden"])
async def test_an_error_about_the_body_is_not_taken_for_an_acceptance(listing: Listing) -> None:
    server = Knowing(listing)
    server.checks_body_first = True
    upstream = before(server)
    await upstream.verify(caller())
    with pytest.raises(Unauthorized):
        await upstream.verify(caller("wrong"))


async def test_verification_by_the_list_of_models_makes_no_chat_request() -> None:
    server = Knowing()
    await before(server).verify(caller())
    assert server.requests == []


def failing(path: str, status: int) -> Callable[..., Any]:
    """Return an upstream that answers at `path` with `status`."""
    server = Knowing("public")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if not scope["path"].endswith(path):
            await server(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    return app


@pytest.mark.parametrize("status", [429, 500, 502, 503, 302])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions"])
async def test_an_inconclusive_status_of_the_upstream_is_an_error_and_not_an_acceptance(path: str, status: int) -> None:
    upstream = before(failing(path, status), upstream__status_grace=0)
    with pytest.raises(UpstreamError) as raised:
        await upstream.verify(caller())
    assert raised.value.status in (status, 502)


@pytest.mark.parametrize("status", [401, 404, 429])
async def test_a_refused_check_does_not_quote_the_model_of_another_caller(status: int) -> None:
    class Quoting(ScriptedUpstream):
        def answer(self, asked: Asked) -> Answer:
            if asked.path.endswith("/v1/models"):
                return json_answer(error("There is no list.", 404), 404)
            if asked.headers["authorization"] == "Bearer good":
                return json_answer(completion({"content": "Hello"}))
            return json_answer(error(f"You may not use {asked.json['model']}.", status), status)

    upstream = before(Quoting(), upstream__status_grace=0)
    answer = await upstream.chat({"model": "secret-model", "messages": []}, caller())
    await answer.aclose()
    with pytest.raises((Unauthorized, UpstreamError)) as raised:
        await upstream.verify(caller("wrong"))
    assert "secret-model" not in str(raised.value.message)
    assert str(status) in raised.value.message


async def test_an_upstream_without_chat_completions_accepts_no_credential() -> None:
    with pytest.raises(UpstreamError) as raised:
        await before(failing("/v1/chat/completions", 404)).verify(caller())
    assert raised.value.status == 502


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions"])
async def test_verification_with_a_hanging_upstream_times_out(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Knowing("public")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == path:
            await Signal().wait(None)
        await server(scope, receive, send)

    monkeypatch.setattr(client_module, "CHECK_TIMEOUT", 0.1)
    with pytest.raises(UpstreamTimeout):
        await before(app).verify(caller())


async def test_dialect_model_and_info_requests_to_a_hanging_upstream_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Signal().wait(None)

    monkeypatch.setattr(client_module, "CHECK_TIMEOUT", 0.1)
    upstream = before(app)
    for ask in (upstream.dialect(caller()), upstream.model(None, caller()), upstream.get("/info", caller())):
        with pytest.raises(UpstreamTimeout):
            async with asyncio.timeout(30):
                await ask


async def test_all_forwarded_headers_identify_a_cached_acceptance() -> None:
    """If the upstream identifies callers by another forwarded header, the acceptance of one must not let in another."""
    accepted = "good"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        good = dict(scope["headers"]).get(b"x-api-key") == accepted.encode()
        await send(
            {"type": "http.response.start", "status": 400 if scope["method"] == "POST" else 200} | {"headers": []}
            if good
            else {"type": "http.response.start", "status": 401, "headers": []}
        )
        await send({"type": "http.response.body", "body": b'{"data": []}'})

    upstream = before(app)
    await upstream.verify(Caller(headers={"x-api-key": "good"}))
    for headers in ({"x-api-key": "bad"}, {}):
        with pytest.raises(Unauthorized):
            await upstream.verify(Caller(headers=headers))


async def test_an_acceptance_is_not_cached_if_the_host_application_identifies_the_caller() -> None:
    server = Knowing()
    upstream = before(server)
    scope = {"type": "http", "user": object(), "headers": []}
    for _ in range(2):
        await upstream.verify(Caller(headers={"authorization": "Bearer good"}, scope=scope))
    assert [visit.path for visit in server.visits].count("/v1/models") == 2


async def test_an_acceptance_ignores_trace_headers_and_ends_with_a_refusal() -> None:
    server = Knowing()
    upstream = before(server)
    await upstream.verify(caller())
    asked = len(server.visits)
    await upstream.verify(caller(traceparent="00-1-2-01", **{"x-session-id": "s"}))
    assert len(server.visits) == asked
    server.keys = set()
    with pytest.raises(UpstreamError):
        await upstream.chat({"model": "tiny", "messages": []}, caller())
    with pytest.raises(Unauthorized):
        await upstream.verify(caller())


async def test_invented_credentials_do_not_evict_one_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_module, "MAX_ACCEPTED", 3)
    server = Knowing()
    server.keys |= {str(number) for number in range(5)}
    upstream = before(server)
    await upstream.verify(caller())
    for number in range(5):
        await upstream.verify(caller(str(number)))
        await upstream.verify(caller())
    visits = [visit.headers["authorization"] for visit in server.visits if visit.path == "/v1/models"]
    assert visits.count("Bearer good") == 1
    await upstream.verify(caller("0"))
    assert len([visit for visit in server.visits if visit.path == "/v1/models"]) == 7


async def test_a_caller_with_a_configured_api_key_is_not_verified_by_the_upstream() -> None:
    server = Knowing()
    known = Caller(standing=Standing(is_known=True, is_accepted=True))
    await before(server).verify(known.again("tiny"))
    assert server.visits == []
