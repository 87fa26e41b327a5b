"""Request framing: the upstream receives exactly the requests that the listener accepted."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from responses_mw import create_app
from responses_mw.server.protocols import MAX_HEAD, MAX_PIPELINED, HTTPProtocol
from responses_mw.upstream.transports.asgi import ASGITransport
from responses_mw.upstream.transports.http11 import NetworkTransport
from tests.support.configured import make_settings
from tests.support.recording import RecordingUpstream
from tests.support.servers import lifespan, proxy_to

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from responses_mw.asgi.proxy import ReverseProxy
    from tests.support.servers import Serve

SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
EXAMPLES = int(os.environ.get("RESPONSES_MW_FUZZ", "0"))
"""How many requests to invent for each listener; 0: as many as the suite has time for."""

numbers = itertools.count(10**8)


@pytest.fixture
def recording(portal: BlockingPortal) -> Iterator[RecordingUpstream]:
    upstream = RecordingUpstream()
    portal.call(upstream.start)
    yield upstream
    portal.call(upstream.stop)


Listening = Callable[[str], int]


@pytest.fixture
def listening(serve: Serve, recording: RecordingUpstream, redis_url: str, portal: BlockingPortal) -> Iterator[Listening]:
    """Start a kind of listener and application in front of the recording upstream; return its port."""

    transports: list[httpx.AsyncBaseTransport] = []

    async def proxy(transport: Callable[[], httpx.AsyncBaseTransport]) -> ReverseProxy:
        transports.append(transport())
        return proxy_to(transports[-1], recording.url)

    def start(kind: str) -> int:
        if kind == "serve":
            app: Any = create_app(make_settings(upstream__url=recording.url, redis__url=redis_url, upstream__dialect="openai"))
            url = serve(app, http=HTTPProtocol, ws="auto")
        elif kind == "httptools":  # uvicorn's listener and httpx's transport
            url = serve(portal.call(proxy, httpx.AsyncHTTPTransport), http="httptools")
        else:
            url = serve(portal.call(proxy, NetworkTransport), http="h11")
        recording.forget()
        return int(url.rpartition(":")[2])

    yield start
    for transport in transports:
        portal.call(transport.aclose)


async def talk(port: int, pieces: list[bytes], patience: float) -> bytes:
    """Send the pieces one after another; return what came back until an answer or for `patience` seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = bytearray()

    async def read() -> None:
        with suppress(ConnectionError):
            while not is_answer(bytes(received)) and (data := await reader.read(65536)):
                received.extend(data)

    reading = asyncio.create_task(read())  # start reading now: a reset discards unread data
    with suppress(ConnectionError, TimeoutError):
        for piece in pieces:
            if not writer.transport.is_closing():
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.002)
        await asyncio.wait_for(reading, patience)
    writer.transport.abort()
    await asyncio.gather(reading, return_exceptions=True)
    return bytes(received)


def is_answer(received: bytes) -> bool:
    """Whether the head of a final response has been received."""
    while received.startswith(b"HTTP/1.1 1"):
        received = received.partition(b"\r\n\r\n")[2]
    return b"\r\n\r\n" in received


# -- known cases ----------------------------------------------------------------------------------------------------------

KINDS = pytest.mark.parametrize("kind", ["serve", "httptools", "h11"])
UPGRADES = [
    b"Connection: upgrade\r\nUpgrade: x\r\n",
    b"Connection: keep-alive, Upgrade\r\nUpgrade: h2c\r\n",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\n",
    b"Proxy-Connection: upgrade\r\nUpgrade: x\r\n",
    b"CONNECTION:\tupgrade\r\nConnection: x\r\nUPGRADE:x\r\n",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n",
]


@KINDS
@pytest.mark.parametrize("late", [False, True], ids=["in one segment", "in a later segment"])
@pytest.mark.parametrize(
    "framed", [b"Content-Length: %d\r\n\r\n%b", b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"]
)
def test_an_upgrade_with_a_body_is_a_400_and_its_body_is_not_parsed_as_a_request(
    listening: Listening, recording: RecordingUpstream, portal: BlockingPortal, kind: str, late: bool, framed: bytes
) -> None:
    port = listening(kind)
    head, _, body = (framed % (len(SMUGGLED), SMUGGLED)).partition(b"\r\n\r\n")
    for method, upgrade in itertools.product((b"POST", b"GET"), UPGRADES):
        recording.forget()
        whole = b"%b /v1/early HTTP/1.1\r\nHost: h\r\n%b%b\r\n\r\n" % (method, upgrade, head)
        answer = portal.call(talk, port, [whole, body] if late else [whole + body], 20.0)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"invalid_" in answer
        assert b"\r\nconnection: close\r\n" in answer.lower()
        after = portal.call(talk, port, [b"POST /v1/next HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nnext"], 20.0)
        assert after.startswith(b"HTTP/1.1 200 ")
        assert [(request.target, request.body) for request in recording.requests] == [(b"/v1/next", b"next")]
    assert recording.faults == []


@pytest.mark.parametrize("kind", ["serve", "httptools"])
def test_an_upgrade_of_a_get_without_a_body_is_ignored(
    listening: Listening, recording: RecordingUpstream, portal: BlockingPortal, kind: str
) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    answer = portal.call(talk, listening(kind), [head], 20.0)
    assert answer.startswith(b"HTTP/1.1 200 ")
    [request] = recording.requests
    assert not {b"upgrade", b"content-length", b"transfer-encoding"} & {name for name, _ in request.fields}
    if kind == "serve":
        assert b"connection: close" in answer


@pytest.mark.parametrize("kind", ["serve", "h11"])
@pytest.mark.parametrize("target", [b"h:80", b"/v1/x"])
def test_a_connect_request_is_refused(
    listening: Listening, recording: RecordingUpstream, portal: BlockingPortal, kind: str, target: bytes
) -> None:
    head = b"CONNECT %b HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (target, len(SMUGGLED))
    answer = portal.call(talk, listening(kind), [head, SMUGGLED], 20.0)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 405 "))
    assert recording.requests == []


@pytest.mark.parametrize("kind", ["serve", "h11"])
@pytest.mark.parametrize("late", [False, True], ids=["in one segment", "in a later segment"])
def test_a_trailer_is_not_forwarded_as_a_header(
    listening: Listening, recording: RecordingUpstream, portal: BlockingPortal, kind: str, late: bool
) -> None:
    head = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"2\r\nhi\r\n0\r\nX-Trailer: 1\r\nAuthorization: Bearer another\r\n\r\n"
    answer = portal.call(talk, listening(kind), [head, body] if late else [head + body], 20.0)
    assert answer.startswith(b"HTTP/1.1 200 ")
    [request] = recording.requests
    assert request.body == b"hi"
    assert not {b"x-trailer", b"authorization"} & {name for name, _ in request.fields}


@pytest.mark.parametrize(
    ("begin", "endless"),
    [
        (b"GET /", b"x"),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: ", b"x"),
        (b"GET / HTTP/1.1\r\nHost: h\r\n", b"X: y\r\n"),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x"),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", b"X: y\r\n"),
    ],
    ids=["target", "value", "headers", "chunk extension", "trailers"],
)
def test_endless_request_heads_chunk_extensions_and_trailers_are_refused(
    listening: Listening, portal: BlockingPortal, begin: bytes, endless: bytes
) -> None:
    part = endless * (32 * 1024 // len(endless))

    async def taken(port: int) -> int:
        """Return how many bytes the server accepts before it closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begin)
        size = 0
        with suppress(ConnectionError):
            while size < 1000 * MAX_HEAD and not reader.at_eof():
                writer.write(part)
                await writer.drain()
                size += len(part)
        writer.transport.abort()
        return size

    assert portal.call(taken, listening("serve")) < 500 * MAX_HEAD  # most of it is in the buffers of the sockets


def test_a_long_head_and_a_long_body_are_accepted(
    listening: Listening, recording: RecordingUpstream, portal: BlockingPortal
) -> None:
    body = b"x" * (4 * MAX_HEAD)
    head = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nX: %b\r\nContent-Length: %d\r\n\r\n" % (b"y" * (MAX_HEAD // 2), len(body))
    answer = portal.call(talk, listening("serve"), [head, body[:MAX_HEAD], body[MAX_HEAD:]], 20.0)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert [request.body for request in recording.requests] == [body]


def test_the_number_of_pipelined_requests_is_limited(listening: Listening, portal: BlockingPortal) -> None:
    async def whole(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/x HTTP/1.1\r\nHost: h\r\n\r\n" * 1000)
        async with asyncio.timeout(60):
            received = await reader.read()
        writer.close()
        return received

    assert portal.call(whole, listening("serve")).count(b"HTTP/1.1 200 ") == 1 + MAX_PIPELINED


def test_a_refused_pipelined_request_does_not_cut_off_the_earlier_response(
    listening: Listening, portal: BlockingPortal
) -> None:
    first = b"GET /v1/first HTTP/1.1\r\nHost: h\r\n\r\n"
    second = b"POST /v1/second HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: x\r\nContent-Length: 1\r\n\r\n1"

    async def whole(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first + second)
        async with asyncio.timeout(60):
            received = await reader.read()
        writer.close()
        return received

    received = portal.call(whole, listening("serve"))
    assert received.startswith(b"HTTP/1.1 200 ")
    assert received.count(b"HTTP/1.1 ") == 1


async def test_proxied_requests_and_model_calls_use_separate_connections_closed_at_shutdown(redis_url: str) -> None:
    recording = RecordingUpstream()
    await recording.start()
    app = create_app(make_settings(upstream__url=recording.url, redis__url=redis_url, upstream__dialect="openai"))
    async with lifespan(app), httpx.AsyncClient(transport=ASGITransport(app), base_url="http://ours") as client:
        at_start = recording.connections
        for _ in range(2):
            assert (await client.get("/v1/others")).status_code == 200
        assert recording.connections == at_start + 1
        await client.post("/v1/responses", json={"model": "tiny", "input": "hi"})
        assert [request.target for request in recording.requests] == [b"/v1/others", b"/v1/others", b"/v1/chat/completions"]
        assert recording.connections == at_start + 2
    async with asyncio.timeout(60):
        while recording.open:
            await asyncio.sleep(0.01)
    await recording.stop()


# -- generated cases ------------------------------------------------------------------------------------------------------

DECOYS = [
    *UPGRADES,
    b"Connection: content-length\r\n",
    b"Connection: transfer-encoding, host\r\n",
    b"Connection: close\r\n",
    b"Connection: keep-alive\r\n",
    b"Content-Length: %(n)d\r\n",
    b"Content-Length: 0\r\n",
    b"Content-Length: 7\r\n",
    b"Content-Length: %(n)d, %(n)d\r\n",
    b"Content-Length: +%(n)d\r\n",
    b"Content-Length: 0x1\r\n",
    b"Content-Length:\r\n",
    b"Content-Length : 0\r\n",
    b"content_length: 0\r\n",
    b"Content_Length: 999\r\n",
    b"Content-Length: 0\n",
    b"Transfer-Encoding: chunked\r\n",
    b"transfer-encoding: Chunked\r\n",
    b"Transfer-Encoding: identity\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Transfer-Encoding: chunked, identity\r\n",
    b"Transfer-Encoding: xchunked\r\n",
    b"Transfer-Encoding: chunked;x=y\r\n",
    b"Transfer-Encoding: \x0bchunked\r\n",
    b"Transfer-Encoding : chunked\r\n",
    b"Transfer-Encoding:\r\n chunked\r\n",
    b"Transfer_Encoding: chunked\r\n",
    b"X-Folded: a\r\n Content-Length: 0\r\n",
    b"X-Folded: a\r\n\tTransfer-Encoding: chunked\r\n",
    b"X-Return: a\rContent-Length: 0\r\n",
    b"X-Null: a\x00b\r\n",
    b"X-High: \xe9\xff\r\n",
    b"TE: trailers\r\n",
    b"Trailer: content-length\r\n",
    b"Expect: 100-continue\r\n",
    b"Expect: nothing\r\n",
    b"Host: other\r\n",
    b": empty\r\n",
]
METHODS = [b"GET", b"POST", b"PUT", b"PATCH", b"DELETE", b"HEAD", b"OPTIONS", b"TRACE", b"CONNECT", b"QUERY", b"POST", b"POST"]
TARGETS = [
    b"/v1/m/%d",
    b"/v1/early/%d",
    b"/v1/m/%d?q=%%0d%%0aContent-Length:%%200",
    b"http://elsewhere/v1/m/%d",
    b"/v1/%%0d%%0a/m/%d",
    b"//v1/m/%d",
]
PARTS = [b"", b"x", SMUGGLED, b"0\r\n\r\n" + SMUGGLED, b"\r\n\r\n" + SMUGGLED, b"5\r\nhello\r\n", b"\x00" * 70_000]


def chunks(parts: list[bytes], extension: bytes, trailer: bytes) -> bytes:
    sent = b"".join(b"%X%b\r\n%b\r\n" % (len(part), extension, part) for part in parts if part)
    return sent + b"0\r\n" + trailer + b"\r\n"


@dataclass(frozen=True)
class Request:
    """A request: the bytes that a client sends, and what they contain."""

    number: int
    pieces: list[bytes]
    body: bytes
    is_whole: bool
    is_plain: bool
    """It is whole, and has nothing that would justify a refusal."""


@st.composite
def requests(draw: st.DrawFn) -> Request:
    number = next(numbers)
    method = draw(st.sampled_from(METHODS))
    target = draw(st.sampled_from(TARGETS)) % number
    version = draw(st.sampled_from([b"1.1", b"1.1", b"1.1", b"1.0"]))
    parts = draw(st.lists(st.sampled_from(PARTS), max_size=3))
    body = b"".join(parts)
    framing = draw(st.sampled_from([b"", b"Content-Length: %d\r\n" % len(body), b"Transfer-Encoding: chunked\r\n"]))
    extension = draw(st.sampled_from([b"", b"", b";x=y", b';x="\r"']))
    trailer = draw(st.sampled_from([b"", b"", b"X-Trailer: 1\r\n", b"Content-Length: 0\r\n", b"Host: other\r\n"]))
    sent = chunks(parts, extension, trailer) if b"chunked" in framing else body
    if not framing:
        sent = body = b""
    decoys = [decoy.replace(b"%(n)d", b"%d" % len(sent)) for decoy in draw(st.lists(st.sampled_from(DECOYS), max_size=3))]
    fields = draw(st.permutations([b"Host: h\r\n", framing, *decoys]))
    head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version, b"".join(fields))
    missing = min(draw(st.sampled_from([0, 0, 0, 1, 30])), len(sent))
    whole = head + sent[: len(sent) - missing]
    cuts = draw(st.sampled_from([set[int](), {len(head)}])) | draw(st.sets(st.integers(1, len(whole)), max_size=2))
    pieces = [whole[start:end] for start, end in itertools.pairwise(sorted({0, *cuts, len(whole)}))]
    is_odd = decoys or missing or b"\r" in extension or b"Content" in trailer or not target.startswith(b"/")
    is_plain = not is_odd and version == b"1.1" and method not in (b"TRACE", b"CONNECT")
    return Request(number, pieces, body, not missing, is_plain)


def check_exchange(portal: BlockingPortal, port: int, recording: RecordingUpstream, request: Request) -> None:
    """Send the request, then another caller's, which must arrive unchanged whatever happened to the first."""
    recording.forget()
    answer = portal.call(talk, port, request.pieces, 20.0 if request.is_plain else 0.1)
    number = next(numbers)
    body = b"%d is another caller's" % number
    control = b"POST /v1/m/%d HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (number, len(body), body)
    assert portal.call(talk, port, [control], 20.0).startswith(b"HTTP/1.1 200 ")
    assert recording.faults == []
    own = [seen for seen in recording.requests if seen.target.partition(b"?")[0].endswith(b"/%d" % request.number)]
    others = [seen for seen in recording.requests if seen not in own]
    assert [(seen.target, seen.body, seen.whole) for seen in others] == [(b"/v1/m/%d" % number, body, True)]
    assert len(own) <= 1
    for seen in own:
        names = {name.replace(b"_", b"-") for name, _ in seen.fields if b"_" in name}
        assert not names & {b"content-length", b"transfer-encoding"}
        assert not {b"upgrade", b"expect", b"te", b"trailer"} & {name for name, _ in seen.fields}
        assert not seen.whole or (request.is_whole and seen.body == request.body)
    if request.is_plain:
        assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 401 ")), answer
        assert [seen.whole or b"early" in seen.target for seen in own] == [True]


@pytest.mark.parametrize(("kind", "examples"), [("serve", 60), ("httptools", 25), ("h11", 25)])
def test_any_request_reaches_the_upstream_as_the_same_request_or_is_refused(
    listening: Listening, recording: RecordingUpstream, portal: BlockingPortal, kind: str, examples: int
) -> None:
    port = listening(kind)

    @settings(max_examples=EXAMPLES or examples, suppress_health_check=list(HealthCheck))
    @given(request=requests())
    def law(request: Request) -> None:
        check_exchange(portal, port, recording, request)

    law()
