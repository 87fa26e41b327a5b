"""Requests to the upstream: headers, retries, connection failures and detection of the dialect."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from benchmarks.processes import free_port
from responses_mw.upstream import client as client_module
from responses_mw.upstream import stream as stream_module
from responses_mw.upstream.transports import connections
from tests.support.oracle import stream, whole
from tests.support.scripted import HELLO, TINY, completion, error, json_answer, text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start

BODY = {"input": "Hi", "model": "tiny"}
ANSWER = completion({"content": "Hello"})


async def ask(ours: Ours, **headers: str) -> None:
    response = await ours.http.post(
        "/v1/responses", json=BODY, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    assert response.status_code == 200, response.text


# -- headers and credentials --------------------------------------------------------------------------------------------------


@pytest.mark.both_mounts
async def test_the_credential_and_listed_headers_of_the_caller_are_forwarded(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(ANSWER)
    await ask(ours, authorization="Bearer mine", cookie="a=b", x_other="no", x_session_id="s1", traceparent="00-1-2-01")
    sent = upstream.requests[0].headers
    assert sent["authorization"] == "Bearer mine"
    assert sent["x-session-id"] == "s1"
    assert sent["traceparent"] == "00-1-2-01"
    assert sent["content-type"] == "application/json"
    assert not sent.keys() & {"cookie", "x-other"}


@pytest.mark.both_mounts
async def test_without_a_credential_of_the_caller_none_is_sent(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(ANSWER)
    await ask(ours)
    assert "authorization" not in upstream.requests[0].headers


@pytest.mark.both_mounts
async def test_a_credential_may_contain_non_ascii_bytes(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(ANSWER)
    response = await ours.http.post("/v1/responses", json=BODY, headers={b"authorization": "Bearer clé".encode()})
    assert response.status_code == 200, response.text
    assert upstream.requests[0].headers["authorization"].encode("latin-1").decode() == "Bearer clé"


@pytest.mark.both_mounts
async def test_the_configured_api_key_replaces_the_credential_of_the_caller(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__api_key="ours")
    upstream.whole(ANSWER)
    await ask(ours, authorization="Bearer mine")
    assert upstream.requests[0].headers["authorization"] == "Bearer ours"


async def test_a_rejected_configured_api_key_is_a_502_that_does_not_reveal_it(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__api_key="secret-of-ours")
    for status in (401, 403):
        upstream.whole(error("bad key secret-of-ours", status), status)
        response = await ours.http.post("/v1/responses", json=BODY)
        assert response.status_code == 502
        assert "secret-of-ours" not in response.text


@pytest.mark.both_mounts
async def test_the_model_defaults_to_the_only_model_listed_for_the_caller(ours: Ours, upstream: ScriptedUpstream) -> None:
    for model in ("alices", "bobs"):
        upstream.models = [{**TINY, "id": model}]
        upstream.whole(ANSWER)
        response = await ours.http.post("/v1/responses", json={"input": "Hi"}, headers={"authorization": f"Bearer {model}"})
        assert response.status_code == 200, response.text
        assert upstream.requests[-1].json["model"] == model


@pytest.mark.both_mounts
async def test_each_upstream_request_has_a_new_request_id(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(ANSWER)
    upstream.whole(ANSWER)
    await ask(ours, x_request_id="mine")
    await ask(ours, x_request_id="mine")
    one, two = (request.headers["x-request-id"] for request in upstream.requests)
    assert len({one, two, "mine"}) == 3
    assert re.fullmatch(r"[0-9a-z]{16,64}", one)


@pytest.mark.both_mounts
async def test_the_forward_headers_setting_replaces_the_default_list(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__forward_headers=["x-mine"])
    upstream.whole(ANSWER)
    await ask(ours, x_mine="1", traceparent="00-1-2-01")
    assert upstream.requests[0].headers["x-mine"] == "1"
    assert "traceparent" not in upstream.requests[0].headers


@pytest.mark.both_mounts
async def test_a_cookie_of_the_upstream_is_not_kept(
    start_at: Callable[..., Ours], mount: str, serve: Serve, upstream: ScriptedUpstream
) -> None:
    by_name = {"upstream": serve(upstream).replace("127.0.0.1", "localhost")} if mount == "proxy" else {}
    ours = start_at(mount, **by_name)
    for _ in range(2):
        upstream.whole(ANSWER, headers={"set-cookie": "session=1; Path=/"})
        await ask(ours)
    assert "cookie" not in upstream.requests[1].headers


async def test_connections_to_the_upstream_are_reused(
    start_at: Callable[..., Ours], serve: Serve, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "_END_TIMEOUT", 60)
    monkeypatch.setattr(connections, "_KEEPALIVE_EXPIRY", 60)  # generous, for busy machines
    ours = start_at("proxy", upstream=serve(upstream, timeout_keep_alive=60))
    for _ in range(3):
        upstream.stream(*HELLO)
        await stream(ours)
    assert len({request.client for request in upstream.requests}) == 1


# -- retries ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [502, 503])
@pytest.mark.parametrize("streamed", [False, True], ids=["json", "stream"])
@pytest.mark.both_mounts
async def test_502_and_503_are_retried_within_the_grace_period(
    start: Start, upstream: ScriptedUpstream, status: int, streamed: bool
) -> None:
    ours = start(upstream__status_grace=60)
    upstream.whole(b"busy", status)
    upstream.whole(b"busy", status)
    upstream.stream(*HELLO) if streamed else upstream.whole(ANSWER)
    answer = await (stream(ours) if streamed else whole(ours))
    assert answer
    assert len(upstream.requests) == 3
    assert len({request.headers["x-request-id"] for request in upstream.requests}) == 3


@pytest.mark.both_mounts
async def test_the_last_503_is_passed_on_with_its_retry_after(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__status_grace=0)
    upstream.whole({"error": "The model is currently scaling"}, 503, headers={"retry-after": "3"})
    response = await ours.http.post("/v1/responses", json=BODY)
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert response.json()["error"]["message"] == "The model is currently scaling"
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("status", [400, 404, 429, 500, 504])
async def test_other_error_statuses_are_not_retried(start: Start, upstream: ScriptedUpstream, status: int) -> None:
    ours = start(upstream__status_grace=2)
    upstream.whole(error("no", status), status)
    await ours.http.post("/v1/responses", json=BODY)
    assert len(upstream.requests) == 1


@pytest.mark.both_mounts
async def test_an_error_within_the_stream_is_answered_without_a_retry(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__status_grace=60)
    upstream.stream(text("Hel"), error("busy", 503), done=False)
    assert (await stream(ours)).terminal == "response.failed"
    assert len(upstream.requests) == 1
    upstream.stream(error("busy", 503))
    assert (await ours.http.post("/v1/responses", json={**BODY, "stream": True})).status_code == 502
    assert len(upstream.requests) == 2


# -- connection failures (over the network only) -------------------------------------------------------------------------------


async def test_an_unreachable_upstream_is_a_502(start_at: Callable[..., Ours]) -> None:
    ours = start_at("proxy", upstream=f"http://127.0.0.1:{free_port()}", upstream__status_grace=1)
    response = await ours.http.post("/v1/responses", json=BODY)
    assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_unreachable")


async def test_an_unreachable_upstream_is_a_502_and_not_a_timeout_with_a_long_grace_period(
    start_at: Callable[..., Ours], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CHECK_TIMEOUT", 0.5)
    ours = start_at("proxy", upstream=f"http://127.0.0.1:{free_port()}", upstream__status_grace=60)
    for body in (BODY, {**BODY, "stream": True}):
        response = await ours.http.post("/v1/responses", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_unreachable")


async def test_a_request_waits_for_an_upstream_that_starts_within_the_grace_period(
    start_at: Callable[..., Ours], upstream: ScriptedUpstream
) -> None:
    port = free_port()
    ours = start_at("proxy", upstream=f"http://127.0.0.1:{port}", upstream__status_grace=60, upstream__dialect="vllm")
    request = asyncio.create_task(stream(ours))
    await asyncio.sleep(0.1)
    async with raw_server(port, _answer_stream):
        assert (await request).terminal == "response.completed"


async def test_the_dialect_is_detected_if_the_upstream_starts_later(
    start_at: Callable[..., Ours], upstream: ScriptedUpstream, serve: Serve
) -> None:
    port = free_port()
    ours = start_at("proxy", upstream=f"http://127.0.0.1:{port}")
    assert (await ours.http.post("/v1/responses", json=BODY)).status_code == 502
    serve(upstream, port=port)
    upstream.whole(ANSWER)
    await whole(ours, reasoning={"effort": "low"})
    assert upstream.requests[0].json["chat_template_kwargs"] == {"enable_thinking": True}  # as vLLM expects it


async def test_a_connection_reset_within_the_answer_fails_the_response(start_at: Callable[..., Ours]) -> None:
    async with raw_server(0, _reset_within) as port:
        ours = start_at("proxy", upstream=f"http://127.0.0.1:{port}", upstream__dialect="vllm")
        streamed = await stream(ours)
        assert (streamed.terminal, streamed.deltas) == ("response.failed", ["Hel"])
        response = await ours.http.post("/v1/responses", json=BODY)
        assert response.status_code == 502


async def test_a_connection_reset_before_the_answer_is_a_502(start_at: Callable[..., Ours]) -> None:
    async with raw_server(0, _reset_before) as port:
        ours = start_at("proxy", upstream=f"http://127.0.0.1:{port}", upstream__dialect="vllm", upstream__status_grace=60)
        response = await ours.http.post("/v1/responses", json={**BODY, "stream": True})
        assert response.status_code == 502


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/completions"])
async def test_a_request_that_kills_a_server_is_not_retried(start_at: Callable[..., Ours], path: str) -> None:
    requests = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        body = orjson.dumps(ANSWER)
        for answer in (b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body), b""):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
            requests += 1
            if not answer:
                await asyncio.sleep(0.2)
            writer.write(answer)
        writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        ours = start_at("proxy", upstream=f"http://127.0.0.1:{port}", upstream__dialect="vllm", upstream__status_grace=60)
        assert (await ours.http.post(path, json=BODY)).status_code == 200
        assert (await ours.http.post(path, json=BODY)).status_code == 502
    assert requests == 2


async def test_a_connection_attempt_that_takes_too_long_is_a_504(
    start_at: Callable[..., Ours], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.upstream.sending.CONNECT_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, _filled(listener):
        ours = start_at(
            "proxy",
            upstream=f"http://127.0.0.1:{listener.getsockname()[1]}",
            upstream__dialect="vllm",
        )
        response = await ours.http.post("/v1/responses", json=BODY)
        assert response.status_code == 504


class _filled:  # noqa: N801 (a context manager, used as a function)
    """Fill the backlog of a listener that accepts no connections, so that the next connection hangs."""

    def __init__(self, listener: socket.socket) -> None:
        self._sockets = []
        for _ in range(4):
            waiting = socket.socket()
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
            self._sockets.append(waiting)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for waiting in self._sockets:
            waiting.close()


@asynccontextmanager
async def raw_server(port: int, conversation: Conversation) -> AsyncIterator[int]:
    """A raw TCP server whose connections each serve one request."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await conversation(reader, writer)
        writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", port) as server:
        yield server.sockets[0].getsockname()[1]


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


async def _answer_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b'data: {"choices": [{"index": 0, "delta": {"content": "Hello"}}]}\n\ndata: [DONE]\n\n')
    await writer.drain()


async def _reset_within(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b'data: {"choices": [{"index": 0, "delta": {"content": "Hel"}}]}\n\n')
    await writer.drain()
    await asyncio.sleep(0.05)
    await _reset_before(reader, writer)


async def _reset_before(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


# -- detection of the dialect -------------------------------------------------------------------------------------------------

TGI_INFO = {"model_id": "m", "max_total_tokens": 5}


@pytest.mark.parametrize(
    ("models", "pages", "dialect"),
    [
        pytest.param([TINY], {}, "vllm", id="vllm"),
        pytest.param([{**TINY, "owned_by": "sglang"}], {}, "sglang", id="sglang"),
        pytest.param([{**TINY, "owned_by": "llamacpp"}], {}, "llamacpp", id="llamacpp"),
        pytest.param([{**TINY, "owned_by": "library"}], {}, "ollama", id="ollama"),
        pytest.param([{**TINY, "owned_by": "me"}], {"/api/version": {"version": "0.12"}}, "ollama", id="ollama, own model"),
        pytest.param([{**TINY, "owned_by": "org/model"}], {"/info": TGI_INFO}, "tgi", id="tgi"),
        pytest.param([{**TINY, "owned_by": "openai"}], {"/health/liveliness": "I'm alive!"}, "litellm", id="litellm"),
        pytest.param([{**TINY, "id": "org/model", "owned_by": "org"}], {}, "transformers", id="transformers"),
        pytest.param([{**TINY, "owned_by": "system"}], {}, "openai", id="openai"),
        pytest.param([{**TINY, "owned_by": "someone"}], {}, "openai", id="unknown"),
    ],
)
async def test_the_dialect_is_detected(
    start: Start,
    upstream: ScriptedUpstream,
    caplog: pytest.LogCaptureFixture,
    models: list[Any],
    pages: dict[str, Any],
    dialect: str,
) -> None:
    upstream.models, upstream.pages = models, pages
    caplog.set_level("INFO", "responses_mw")
    ours = start()
    upstream.whole(ANSWER)
    await whole(ours)
    assert f"detected the dialect of the upstream: {dialect}" in caplog.text
    visits = len(upstream.visits)
    upstream.whole(ANSWER)
    await whole(ours)
    assert len(upstream.visits) == visits  # detected only once


@pytest.mark.both_mounts
async def test_a_configured_dialect_is_not_detected(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__dialect="tgi")
    upstream.whole(ANSWER)
    await whole(ours)
    assert upstream.visits == []
    response = await ours.http.post("/v1/responses", json={**BODY, "reasoning": {"effort": "low"}})
    assert response.status_code == 400  # not supported by TGI


@pytest.mark.parametrize("page", [{"detail": "none of your business"}, b"<html>Welcome</html>"], ids=["no list", "web page"])
@pytest.mark.both_mounts
async def test_an_upstream_without_a_list_of_models_is_called_in_the_openai_dialect(
    start: Start, upstream: ScriptedUpstream, page: Any
) -> None:
    upstream.pages["/v1/models"] = page
    ours = start()
    upstream.whole(ANSWER)
    await whole(ours, max_output_tokens=5)
    assert upstream.requests[0].json["max_completion_tokens"] == 5
    visits = len(upstream.visits)
    upstream.whole(ANSWER)
    await whole(ours)
    assert len(upstream.visits) == visits + 1  # not detected yet, but tried only once per turn


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.both_mounts
async def test_a_configured_api_key_need_not_be_allowed_to_list_models(
    start: Start, upstream: ScriptedUpstream, status: int
) -> None:
    upstream.pages["/v1/models"] = json_answer(error("This key may not list models.", status), status)
    ours = start(upstream__api_key="for-chat-only")
    upstream.whole(ANSWER)
    response = await ours.http.post("/v1/responses", json=BODY)
    assert response.status_code == 200, response.text


@pytest.mark.both_mounts
async def test_the_credential_of_the_caller_is_sent_when_listing_models(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start()
    upstream.whole(ANSWER)
    response = await ours.http.post("/v1/responses", json={"input": "Hi"}, headers={"authorization": "Bearer mine"})
    assert response.status_code == 200
    assert any(visit.headers.get("authorization") == "Bearer mine" for visit in upstream.visits)
