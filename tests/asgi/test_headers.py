"""Headers and facts of the access line that all creates have in common."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.asgi.routes import ROUTES, match
from tests.support.creates import BODY, CREATES, HAVE_FIRST_CHUNK, OTHERS, request_other, two_turns
from tests.support.scripted import HELLO, Signal

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Start


STATUSES = {
    "refused": 400,
    "invalid": 400,
    "no_json": 400,
    "without_key": 401,
    "from_foreign_page": 403,
    "for_foreign_host": 421,
    "broken_off": 502,
    "over_limit": 429,
}


@pytest.mark.parametrize("kind", CREATES)
async def test_every_create_has_the_callers_request_id(start: Start, upstream: ScriptedUpstream, kind: str) -> None:
    response = await CREATES[kind](start, upstream, {"x-request-id": "mine"})
    assert response.status_code == STATUSES.get(kind.partition(",")[0], 200)
    assert response.headers.get_list("x-request-id") == ["mine"]


@pytest.mark.parametrize("other", OTHERS, ids=" ".join)
async def test_every_other_request_has_the_callers_request_id(
    start: Start, upstream: ScriptedUpstream, other: tuple[str, str]
) -> None:
    response = await request_other(start, upstream, {"x-request-id": "mine"}, other)
    assert response.status_code == OTHERS[other][0]
    assert response.headers.get_list("x-request-id") == ["mine"]


def test_the_other_requests_cover_every_endpoint_except_the_create() -> None:
    reached = {(method, match(path)[0]) for method, path in OTHERS}
    endpoints = {(method, route) for route, methods in ROUTES.items() for method in methods}
    assert endpoints - reached == {("POST", "/v1/responses")}


async def test_a_stream_has_its_headers_before_the_upstream_answers(start: Start, upstream: ScriptedUpstream) -> None:
    go = Signal()
    upstream.stream(*HELLO, before=go)
    body = {**BODY, "stream": True}
    async with start(upstream__status_grace=0).http.stream("POST", "/v1/responses", json=body) as response:
        assert (response.status_code, "x-request-id" in response.headers) == (200, True)
        go.set()
        assert b"response.completed" in await response.aread()


@pytest.mark.parametrize("kind", CREATES)
async def test_the_access_line_has_the_time_to_the_first_chunk_if_there_was_one(
    start: Start, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level("INFO", "responses_mw.access")
    await CREATES[kind](start, upstream, {"x-request-id": "mine"})
    assert ("first_token" in await facts_of("mine", caplog)) == (kind in HAVE_FIRST_CHUNK)


async def test_the_time_to_the_first_chunk_is_that_of_the_first_turn(
    start: Start, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "responses_mw.access")
    second = Signal()
    asking = asyncio.create_task(two_turns(start, upstream, {"x-request-id": "mine"}, stream=False, second=second))
    await upstream.received(2)
    await asyncio.sleep(0.2)
    second.set()
    await asking
    facts = await facts_of("mine", caplog)
    assert facts["seconds"] - facts["first_token"] >= 0.2


async def facts_of(request_id: str, caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """The facts in the access line of a request."""
    async with asyncio.timeout(20):
        while True:
            for record in caplog.records:
                facts: dict[str, Any] = getattr(record, "facts", {})
                if record.name == "responses_mw.access" and facts["request"] == request_id:
                    return facts
            await asyncio.sleep(0.01)
