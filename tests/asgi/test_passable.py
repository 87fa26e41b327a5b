"""Proxied requests, and requests refused for their path, method or framing."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from responses_mw.asgi.passable_paths import PassablePaths, check_path
from responses_mw.errors import APIError, BadRequest
from responses_mw.upstream.transports.http11 import NetworkTransport
from tests.support.configured import make_settings
from tests.support.recording import RecordingUpstream
from tests.support.servers import proxy_to

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Message, Scope

    from responses_mw.asgi.proxy import ReverseProxy
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Start

KEYS = {"auth__api_keys": [f"alice:sha256:{sha256(b'k').hexdigest()}"], "upstream__api_key": "the operator's"}
BEARER = {"authorization": "Bearer k"}


@pytest.fixture
async def recording() -> AsyncIterator[RecordingUpstream]:
    upstream = RecordingUpstream()
    await upstream.start()
    yield upstream
    await upstream.stop()


@pytest.fixture(params=[httpx.AsyncHTTPTransport, NetworkTransport], ids=["httpx", "network"])
async def transport(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncBaseTransport]:
    async with request.param() as transport:
        yield transport


async def call(proxy: ReverseProxy, scope: Scope, *messages: Message) -> tuple[int, bytes]:
    """Send a request whose body is `messages`, and then stalls; return status and body of the answer."""
    inbox, sent = list(messages), []

    async def receive() -> Message:
        if not inbox:
            await asyncio.Event().wait()
        return inbox.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    await proxy(
        {"type": "http", "method": "POST", "scheme": "http", "query_string": b"", "headers": [], **scope}, receive, send
    )
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def body(*pieces: bytes, ends: bool = True) -> list[Message]:
    last = len(pieces) - 1
    return [{"type": "http.request", "body": piece, "more_body": n < last or not ends} for n, piece in enumerate(pieces)]


# -- framing -------------------------------------------------------------------------------------------------------------

LENGTH = (b"content-length", b"5")


@pytest.mark.parametrize("pieces", [[b""], [b"hell"], [b"hello!"], [b"he", b"ll"], [b"hel", b"lo", b"!"], [b"hello", b"!"]])
async def test_a_body_of_another_length_than_announced_is_a_400_and_corrupts_no_request(
    transport: httpx.AsyncBaseTransport, recording: RecordingUpstream, pieces: list[bytes]
) -> None:
    """Some servers lose a body, or a part of it."""
    proxy = proxy_to(transport, recording.url)
    status, answer = await call(proxy, {"path": "/v1/x", "headers": [LENGTH]}, *body(*pieces))
    assert (status, b"invalid_framing" in answer) == (400, True)
    status, _ = await call(proxy, {"path": "/v1/next"}, *body(b"next"))
    assert status == 200
    whole = [(request.target, request.body) for request in recording.requests if request.whole]
    if b"".join(pieces).startswith(b"hello") and len(pieces) > 1:  # the announced bytes were sent before the rest arrived
        assert whole.pop(0) == (b"/v1/x", b"hello")
    assert whole == [(b"/v1/next", b"next")]
    assert recording.faults == []


@pytest.mark.parametrize(
    "headers",
    [
        [LENGTH, LENGTH],
        [LENGTH, (b"content-length", b"6")],
        [LENGTH, (b"transfer-encoding", b"chunked")],
        [(b"transfer-encoding", b"gzip, chunked")],
        [(b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")],
        [(b"content-length", b"+5")],
    ],
)
async def test_ambiguous_framing_is_refused(
    transport: httpx.AsyncBaseTransport, recording: RecordingUpstream, headers: list[tuple[bytes, bytes]]
) -> None:
    status, answer = await call(proxy_to(transport, recording.url), {"path": "/v1/x", "headers": headers}, *body(b"hello"))
    assert (status, b"invalid_framing" in answer) == (400, True)
    assert recording.connections == 0


@pytest.mark.parametrize(
    "odd", [(b"content_length", b"1"), (b"transfer_encoding", b"chunked"), (b"connection", b"content-length")]
)
@pytest.mark.parametrize("pieces", [[b"hello"], [b"hel", b"lo"]], ids=["whole", "streamed"])
async def test_the_content_length_sent_upstream_is_the_proxys_own(
    transport: httpx.AsyncBaseTransport, recording: RecordingUpstream, odd: tuple[bytes, bytes], pieces: list[bytes]
) -> None:
    status, _ = await call(proxy_to(transport, recording.url), {"path": "/v1/x", "headers": [LENGTH, odd]}, *body(*pieces))
    assert status == 200
    [request] = recording.requests
    assert (request.body, request.values(b"content-length")) == (b"hello", [b"5"])
    assert odd[0] not in {name for name, _ in request.fields if b"_" in name}


@pytest.mark.parametrize("header", [(b"x y", b"1"), (b"x:", b"1"), (b"x", b"1\r\ny: 2")])
async def test_a_header_that_cannot_be_sent_is_a_400(
    transport: httpx.AsyncBaseTransport, recording: RecordingUpstream, header: tuple[bytes, bytes]
) -> None:
    status, _ = await call(proxy_to(transport, recording.url), {"path": "/v1/x", "headers": [header]}, *body(b"hello"))
    assert status == 400
    assert recording.requests == []


# -- stalled uploads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [[], [b"he"]], ids=["before the first byte", "after some bytes"])
async def test_a_stalled_upload_is_a_408(
    transport: httpx.AsyncBaseTransport, recording: RecordingUpstream, pieces: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.asgi.requests.BODY_TIMEOUT", 0.1)
    proxy = proxy_to(transport, recording.url)
    async with asyncio.timeout(60):
        status, answer = await call(proxy, {"path": "/v1/x", "headers": [LENGTH]}, *body(*pieces, ends=False))
        assert (status, b"request_timeout" in answer) == (408, True)
        while recording.open:
            await asyncio.sleep(0.01)
    assert not any(request.whole for request in recording.requests)


async def test_a_create_whose_body_stalls_is_a_408(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("responses_mw.asgi.requests.BODY_TIMEOUT", 0.1)
    ours = start()
    reader, writer = await asyncio.open_connection(ours.http.base_url.host, ours.http.base_url.port)
    writer.write(b'POST /v1/responses HTTP/1.1\r\nHost: h\r\nContent-Length: 99\r\n\r\n{"input": ')
    async with asyncio.timeout(60):
        answer = await reader.read()  # the server closes the connection after it
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer
    writer.close()


# -- methods -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["TRACE", "CONNECT"])
async def test_trace_and_connect_are_refused(
    transport: httpx.AsyncBaseTransport, recording: RecordingUpstream, method: str
) -> None:
    status, answer = await call(proxy_to(transport, recording.url), {"path": "/v1/x", "method": method}, *body(b""))
    assert (status, b"method_not_allowed" in answer) == (405, True)
    assert recording.connections == 0


# -- paths ---------------------------------------------------------------------------------------------------------------

DOTTED = [
    "/v1/../admin",
    "/v1/./x",
    "/v1/..",
    "/v1/%2e%2e/admin",
    "/v1/.%2E/admin",
    "/v1/%252e%252e/admin",
    "/v1/..%2fadmin",
    "/v1/..\\admin",
    "/v1\\..\\admin",
    "/v1/..%5cadmin",
    "/v1/..;x=y/admin",
    "/v1/..%3bx/admin",
    "/v1/x%00",
    "/v1/x%0d%0aHost:%20x",
    "/v1/%25252e",
    "v1/x",
    "",
]


@pytest.mark.parametrize("path", DOTTED)
def test_an_unsafe_path_is_refused(path: str) -> None:
    with pytest.raises(BadRequest):
        check_path(path.encode())


@pytest.mark.parametrize(
    "path", ["/", "/v1/models/a%2Fb", "/v1/...", "/v1/a..b/x.", "/v1//x", "/v1/50%25", "/v1/%e2%82%ac", "/v1/.x"]
)
def test_safe_paths_are_accepted(path: str) -> None:
    check_path(path.encode())


@pytest.mark.parametrize("base", ["", "/base"])
async def test_dot_segments_are_refused_if_the_upstream_has_a_base_path(
    transport: httpx.AsyncBaseTransport, recording: RecordingUpstream, base: str
) -> None:
    scope = {"path": "/../x", "raw_path": b"/../x"}
    status, _ = await call(proxy_to(transport, recording.url + base), scope, *body(b""))
    assert status == (400 if base else 200)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models", 200),
        ("POST", "/v1/embeddings", 200),
        ("OPTIONS", "/v1/models", 200),
        ("DELETE", "/v1/batches/x", 405),
        ("PUT", "/v1/files/x", 405),
        ("PURGE", "/v1/x", 405),
        ("TRACE", "/v1/x", 405),
        ("GET", "/health", 200),
        ("HEAD", "/health", 200),
        ("POST", "/health", 405),
        ("GET", "/health/x", 404),
        ("GET", "/version", 200),
        ("GET", "/metrics", 404),
        ("POST", "/sleep", 404),
        ("GET", "/v1", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/%761/models", 404),
        ("GET", "/V1/models", 404),
        ("GET", "/v1/%2e%2e/metrics", 400),
    ],
)
async def test_with_api_keys_only_listed_paths_and_methods_are_proxied(
    start_at: Any, recording: RecordingUpstream, method: str, path: str, status: int
) -> None:
    ours = start_at("proxy", upstream=recording.url, upstream__dialect="openai", **KEYS)
    url = httpx.URL(ours.url).copy_with(raw_path=path.encode())
    request = httpx.Request(method, url, headers=BEARER, extensions={"target": path.encode()})
    answer = await ours.http.send(request)
    assert answer.status_code == status
    sent = [(seen.method, seen.target, seen.values(b"authorization")) for seen in recording.requests]
    check = (b"GET", b"/v1/models", [b"Bearer the operator's"])  # of the operator's key, before the replica is ready
    if status == 200:
        assert (method.encode(), path.encode(), [b"Bearer the operator's"]) in sent
    else:
        assert all(one == check for one in sent)
        assert method == "HEAD" or answer.json()["error"]["type"] == "invalid_request_error"


async def test_without_a_key_an_unlisted_path_is_a_401(start_at: Any, recording: RecordingUpstream) -> None:
    ours = start_at("proxy", upstream=recording.url, upstream__dialect="openai", **KEYS)
    assert (await ours.http.get("/metrics")).status_code == 401


async def test_the_list_of_proxied_paths_can_be_configured(start_at: Any, upstream: ScriptedUpstream) -> None:
    ours = start_at("proxy", auth__proxy_paths=["GET /v1/models", "DELETE /v1/files/"], **KEYS)
    assert (await ours.http.get("/v1/models", headers=BEARER)).status_code == 200
    assert (await ours.http.delete("/v1/files/x", headers=BEARER)).status_code == 404  # from the upstream
    assert (await ours.http.post("/v1/chat/completions", headers=BEARER, json={})).status_code == 404
    assert upstream.requests == []


def test_a_refused_method_lists_the_allowed_methods() -> None:
    paths = PassablePaths(["GET /v1/files/", "DELETE /v1/files/", "/v1/x"])
    with pytest.raises(APIError) as refused:
        paths.check("POST", b"/v1/files/a")
    assert (refused.value.status, refused.value.headers) == (405, {"allow": "DELETE, GET, HEAD"})


@pytest.mark.parametrize("line", ["v1/", "GET", "get /v1/", "GET  /v1/", "/v 1/", ""])
def test_an_invalid_line_of_proxy_paths_is_refused_at_startup(line: str) -> None:
    with pytest.raises(ValueError, match="proxy_paths"):
        make_settings(auth__proxy_paths=[line])
