"""Requests of each kind, for tests that apply to all of them: creates of responses, and other requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.support import scripted_responses
from tests.support.scripted import HELLO, BrokenOff, Signal, call, completion, error, finish, text
from tests.support.scripted_responses import ScriptedResponses

if TYPE_CHECKING:
    import httpx

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

BODY = {"model": "tiny", "input": "Hi"}
HI = completion({"content": "Hi"})
SECRET = "a secret that all the replicas of the deployment have"
Create = Callable[["Start", "ScriptedUpstream", dict[str, str]], Awaitable["httpx.Response"]]


async def post(ours: Ours, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return await ours.http.post("/v1/responses", json={**BODY, **body}, headers=headers)


async def completed(start: Start, upstream: ScriptedUpstream, headers: dict[str, str], *, stream: bool) -> httpx.Response:
    if stream:
        upstream.stream(*HELLO)
    else:
        upstream.whole(HI)
    return await post(start(upstream__status_grace=60), headers, stream=stream)


async def refused(start: Start, upstream: ScriptedUpstream, headers: dict[str, str], *, stream: bool) -> httpx.Response:
    upstream.whole(error("no"), 400)
    return await post(start(upstream__status_grace=60), headers, stream=stream)


async def broken_off(start: Start, upstream: ScriptedUpstream, headers: dict[str, str]) -> httpx.Response:
    upstream.stream(text("Hel"), BrokenOff(), done=False)
    return await post(start(), headers)


async def invalid(start: Start, _: ScriptedUpstream, headers: dict[str, str], *, stream: bool) -> httpx.Response:
    return await post(start(), headers, temperature="hot", stream=stream)


async def no_json(start: Start, _: ScriptedUpstream, headers: dict[str, str]) -> httpx.Response:
    return await start().http.post("/v1/responses", content=b"{", headers=headers)


async def without_key(start: Start, _: ScriptedUpstream, headers: dict[str, str]) -> httpx.Response:
    return await post(start(auth__api_keys=["alice:sha256:" + "0" * 64], upstream__api_key="key"), headers)


async def from_foreign_page(start: Start, _: ScriptedUpstream, headers: dict[str, str]) -> httpx.Response:
    return await post(start(), {**headers, "origin": "https://evil.example"})


async def for_foreign_host(start: Start, _: ScriptedUpstream, headers: dict[str, str]) -> httpx.Response:
    return await post(start(server__allowed_hosts=["ours.example"]), {**headers, "host": "evil.example"})


async def over_limit(start: Start, upstream: ScriptedUpstream, headers: dict[str, str]) -> httpx.Response:
    ours = start(limits__requests_per_minute=1)
    upstream.whole(HI)
    await post(ours)
    return await post(ours, headers)


async def repeated(start: Start, upstream: ScriptedUpstream, headers: dict[str, str], *, stream: bool) -> httpx.Response:
    ours, key = start(), {"idempotency-key": "1"}
    upstream.stream(*HELLO)
    await post(ours, key, stream=stream)
    return await post(ours, {**headers, **key}, stream=stream)


async def with_new_key(start: Start, upstream: ScriptedUpstream, headers: dict[str, str], *, stream: bool) -> httpx.Response:
    upstream.stream(*HELLO)
    return await post(start(upstream__status_grace=60), {**headers, "idempotency-key": "1"}, stream=stream)


async def not_cached(start: Start, upstream: ScriptedUpstream, headers: dict[str, str], *, stream: bool) -> httpx.Response:
    upstream.stream(*HELLO)
    response = await post(start(cache__mode="exact", upstream__status_grace=60), headers, stream=stream)
    assert response.headers["x-responses-cache"].startswith("miss")
    return response


async def cached(start: Start, upstream: ScriptedUpstream, headers: dict[str, str], *, stream: bool) -> httpx.Response:
    ours = start(cache__mode="exact")
    upstream.whole(HI)
    await post(ours)
    response = await post(ours, headers, stream=stream)
    assert response.headers["x-responses-cache"].startswith("exact")
    return response


async def background(start: Start, upstream: ScriptedUpstream, headers: dict[str, str], *, stream: bool) -> httpx.Response:
    upstream.stream(*HELLO)
    return await post(start(auth__secret_keys=[SECRET]), headers, background=True, stream=stream)


async def of_responses_api(start: Start, _: ScriptedUpstream, headers: dict[str, str], *, stream: bool) -> httpx.Response:
    theirs = ScriptedResponses()
    if stream:
        theirs.stream(*scripted_responses.answer(), done=False)
    else:
        theirs.whole(scripted_responses.response(scripted_responses.item()))
    return await post(start(upstream=theirs, upstream__api="responses", upstream__status_grace=60), headers, stream=stream)


async def two_turns(
    start: Start, upstream: ScriptedUpstream, headers: dict[str, str], *, stream: bool, second: Signal | None = None
) -> httpx.Response:
    """The model searches the web, which fails, and then answers. The second turn waits for the signal `second`, if given."""
    upstream.stream(call('{"query": "a"}', name="web_search", call_id="c"), finish("tool_calls"))
    upstream.stream(*HELLO, before=second)
    ours = start(search__provider="searxng", search__url="http://127.0.0.1:1", upstream__status_grace=60)
    return await post(ours, headers, tools=[{"type": "web_search"}], stream=stream)


_BOTH = (completed, two_turns, refused, invalid, with_new_key, repeated, not_cached, cached, background, of_responses_api)
CREATES: dict[str, Create] = {
    **{
        f"{each.__name__}, {'stream' if stream else 'json'}": partial(each, stream=stream)
        for each in _BOTH
        for stream in (False, True)
    },
    **{each.__name__: each for each in (broken_off, no_json, without_key, from_foreign_page, for_foreign_host, over_limit)},
}
"""Functions that send one create with the given headers and return the response, by a description of the response."""
_ANSWERED = ("completed", "two_turns", "with_new_key", "not_cached", "broken_off", "of_responses_api")
HAVE_FIRST_CHUNK = {kind for kind in CREATES if kind.startswith(_ANSWERED)}
"""The creates whose headers are sent after the first chunk of the upstream's answer. The others do not wait for a chunk.

Of the others, only `refused` waits for the upstream: a turn was sent before its headers.
"""


# -- other requests ------------------------------------------------------------------------------------------------------

_UNKNOWN_RESPONSE, _UNKNOWN_CONVERSATION = f"/v1/responses/resp_{'0' * 50}", f"/v1/conversations/conv_{'0' * 25}"
_UNKNOWN_FILE = f"/v1/files/file-{'0' * 25}"
_UNKNOWN_STORE = f"/v1/vector_stores/vs_{'0' * 25}"
_MESSAGE = {"items": [{"role": "user", "content": "Hi"}]}
OTHERS: dict[tuple[str, str], tuple[int, dict[str, Any] | None]] = {
    ("POST", "/v1/responses/compact"): (200, BODY),
    ("POST", "/v1/responses/input_tokens"): (200, BODY),
    ("GET", _UNKNOWN_RESPONSE): (404, None),
    ("DELETE", _UNKNOWN_RESPONSE): (404, None),
    ("POST", f"{_UNKNOWN_RESPONSE}/cancel"): (404, None),
    ("GET", f"{_UNKNOWN_RESPONSE}/input_items"): (404, None),
    ("POST", "/v1/conversations"): (200, _MESSAGE),
    ("GET", _UNKNOWN_CONVERSATION): (404, None),
    ("POST", _UNKNOWN_CONVERSATION): (404, {"metadata": {}}),
    ("DELETE", _UNKNOWN_CONVERSATION): (404, None),
    ("POST", f"{_UNKNOWN_CONVERSATION}/items"): (404, _MESSAGE),
    ("GET", f"{_UNKNOWN_CONVERSATION}/items"): (404, None),
    ("GET", f"{_UNKNOWN_CONVERSATION}/items/msg_1"): (404, None),
    ("DELETE", f"{_UNKNOWN_CONVERSATION}/items/msg_1"): (404, None),
    ("POST", "/v1/files"): (415, {}),
    ("GET", "/v1/files"): (200, None),
    ("GET", _UNKNOWN_FILE): (404, None),
    ("DELETE", _UNKNOWN_FILE): (404, None),
    ("GET", f"{_UNKNOWN_FILE}/content"): (404, None),
    ("POST", "/v1/uploads"): (400, {}),
    ("POST", "/v1/uploads/upload_1/parts"): (400, {}),
    ("POST", "/v1/vector_stores"): (200, {}),
    ("GET", "/v1/vector_stores"): (200, None),
    ("GET", _UNKNOWN_STORE): (404, None),
    ("POST", _UNKNOWN_STORE): (404, {}),
    ("DELETE", _UNKNOWN_STORE): (404, None),
    ("POST", f"{_UNKNOWN_STORE}/files"): (404, {"file_id": "file-1"}),
    ("POST", f"{_UNKNOWN_STORE}/search"): (404, {"query": "Hi"}),
    ("GET", f"{_UNKNOWN_STORE}/files"): (404, None),
    ("GET", f"{_UNKNOWN_STORE}/files/file-1"): (404, None),
    ("POST", f"{_UNKNOWN_STORE}/files/file-1"): (404, {"attributes": {}}),
    ("DELETE", f"{_UNKNOWN_STORE}/files/file-1"): (404, None),
    ("GET", f"{_UNKNOWN_STORE}/files/file-1/content"): (404, None),
    ("POST", f"{_UNKNOWN_STORE}/file_batches"): (404, {"file_ids": ["file-1"]}),
    ("GET", f"{_UNKNOWN_STORE}/file_batches/vsfb_1"): (404, None),
    ("POST", f"{_UNKNOWN_STORE}/file_batches/vsfb_1/cancel"): (404, {}),
    ("GET", f"{_UNKNOWN_STORE}/file_batches/vsfb_1/files"): (404, None),
    ("GET", "/v1/responses"): (405, None),
    ("GET", "/v1/responses/a/b"): (404, None),
}
"""The expected status and the body of a request to each other endpoint, and of requests that no endpoint accepts."""


async def request_other(
    start: Start, upstream: ScriptedUpstream, headers: dict[str, str], other: tuple[str, str]
) -> httpx.Response:
    """Send one of `OTHERS` with the given headers, and return the response."""
    method, path = other
    upstream.whole(HI)
    return await start().http.request(method, path, json=OTHERS[other][1], headers=headers)
