"""Passed-through requests with API keys are limited and counted, and their bytes are unchanged."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import random
import zlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from benchmarks.processes import free_port
from responses_mw import create_app
from tests.support.configured import make_settings
from tests.support.scripted import HELLO, Answer, Signal, completion, error, json_answer, usage
from tests.support.servers import lifespan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve

pytestmark = pytest.mark.usefixtures("nobody_else")

KEY = "sk-of-alice-0123456789"
ALICE = hashlib.sha256(b"key\0alice").hexdigest()[:32]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COUNTS = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}


TOKENS = {"responses": 1, "input_tokens": 7, "cached_tokens": 3, "output_tokens": 5}
HEADERS = {"authorization": f"Bearer {KEY}"}


def settings(url: str, redis_url: str) -> dict[str, Any]:
    keys = f"alice:sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"
    return {"upstream__url": url, "redis__url": redis_url, "auth__api_keys": [keys]}


@asynccontextmanager
async def serving(serve: Serve, upstream: ScriptedUpstream, redis_url: str, **more: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(make_settings(**settings(serve(upstream), redis_url), **more))
    transport = httpx.ASGITransport(app)
    async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://x", headers=HEADERS, timeout=60) as http:
        yield http


async def used(serve: Serve, upstream: ScriptedUpstream, redis_url: str) -> dict[str, Any]:
    """Return the usage of the key as another replica reports it."""
    port = free_port()
    async with (
        serving(serve, upstream, redis_url, server__admin_port=port),
        httpx.AsyncClient(trust_env=False) as admin,
    ):
        found: dict[str, Any] = (await admin.get(f"http://127.0.0.1:{port}/usage")).json()["owners"][ALICE]
    return found


def facts(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    line: dict[str, Any] = vars([one for one in caplog.records if one.name == "responses_mw.access"][-1])["facts"]
    return line


@pytest.mark.parametrize("streams", [True, False])
async def test_the_tokens_of_a_chat_are_counted_for_its_key(
    serve: Serve, upstream: ScriptedUpstream, redis_url: str, caplog: pytest.LogCaptureFixture, streams: bool
) -> None:
    caplog.set_level(logging.INFO, "responses_mw.access")
    said = {"role": "assistant", "content": 'a "usage": {"prompt_tokens": 900} in a text, ' + "x" * 40_000}
    if streams:
        upstream.stream(*HELLO, {**usage(), "usage": COUNTS})
    else:
        upstream.whole(completion(said, counts=COUNTS))
    async with serving(serve, upstream, redis_url) as http:
        answer = await http.post("/v1/chat/completions", json={**CHAT, "stream": streams})
        assert answer.status_code == 200
        if not streams:
            assert answer.json()["choices"][0]["message"] == said
    line = facts(caplog)
    assert (line["key"], line["model"], line["tokens_in"], line["tokens_out"]) == ("alice", "tiny", 7, 5)
    assert line["owner"] == ALICE[:8]
    counts = {**TOKENS, "requests_without_usage": 0}
    assert await used(serve, upstream, redis_url) == {"key": "alice", **counts, "models": {"tiny": counts}}


async def test_a_stream_without_usage_is_counted_as_a_request_without_usage(
    serve: Serve, upstream: ScriptedUpstream, redis_url: str
) -> None:
    upstream.stream(*[chunk for chunk in HELLO if not chunk.get("usage")])
    async with serving(serve, upstream, redis_url) as http:
        await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert upstream.requests[-1].json == {**CHAT, "stream": True}
    counts = {**dict.fromkeys(TOKENS, 0), "responses": 1, "requests_without_usage": 1}
    assert await used(serve, upstream, redis_url) == {"key": "alice", **counts, "models": {"tiny": counts}}


CODINGS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("coding", CODINGS)
async def test_the_tokens_of_a_compressed_answer_are_counted_and_its_bytes_kept(
    serve: Serve, upstream: ScriptedUpstream, redis_url: str, coding: str
) -> None:
    noise = random.Random(1).randbytes(200_000).hex()
    plain = json.dumps(completion({"role": "assistant", "content": noise}, counts=COUNTS)).encode()
    body = CODINGS[coding](plain)
    headers = {"content-type": "application/json", "content-encoding": coding}
    upstream.queue(Answer([body[at : at + 1000] for at in range(0, len(body), 1000)], headers=headers))
    async with serving(serve, upstream, redis_url) as http, http.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
        assert answer.headers["content-encoding"] == coding
        assert b"".join([piece async for piece in answer.aiter_raw()]) == body
    assert (await used(serve, upstream, redis_url)).items() >= TOKENS.items()


@pytest.mark.parametrize("kind", ["bomb", "damaged", "unknown"])
async def test_an_answer_that_cannot_be_decompressed_is_counted_without_its_tokens(
    serve: Serve, upstream: ScriptedUpstream, redis_url: str, kind: str
) -> None:
    plain = json.dumps(completion({"role": "assistant", "content": "x" * 50_000_000 * (kind == "bomb")}, counts=COUNTS))
    body = gzip.compress(plain.encode())
    body = body[:40] + b"damaged" + body[40:] if kind == "damaged" else body
    headers = {"content-type": "application/json", "content-encoding": "br" if kind == "unknown" else "gzip"}
    upstream.queue(Answer([body], headers=headers))
    async with serving(serve, upstream, redis_url) as http, http.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
        assert b"".join([piece async for piece in answer.aiter_raw()]) == body
    expected = {**dict.fromkeys(TOKENS, 0), "responses": 1, "requests_without_usage": 1}
    assert (await used(serve, upstream, redis_url)).items() >= expected.items()


async def test_chat_streams_count_towards_the_limit_of_streams(
    serve: Serve, upstream: ScriptedUpstream, redis_url: str
) -> None:
    app = create_app(make_settings(**settings(serve(upstream), redis_url), limits__streams=1))
    asked = {**CHAT, "stream": True}
    async with httpx.AsyncClient(base_url=serve(app), headers=HEADERS, timeout=60, trust_env=False) as http:
        first = upstream.stream(HELLO[0], rest := Signal(), *HELLO[1:])
        async with http.stream("POST", "/v1/chat/completions", json=asked) as open_one:
            second = upstream.stream(HELLO[0], never := Signal(), *HELLO[1:])
            refused = await http.post("/v1/chat/completions", json=asked)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert refused.headers["x-ratelimit-limit-streams"] == "1"
            await second.left.wait()
            responses = await http.post("/v1/responses", json={"model": "tiny", "input": "hi", "stream": True})
            assert responses.status_code == 429
            upstream.whole(completion({"role": "assistant", "content": "hello"}))
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
            rest.set()
            assert b"[DONE]" in await open_one.aread()
        assert not first.left.is_set()
        upstream.stream(*HELLO)
        assert (await http.post("/v1/chat/completions", json=asked)).status_code == 200
    never.set()


async def test_chats_count_towards_the_limit_of_requests(serve: Serve, upstream: ScriptedUpstream, redis_url: str) -> None:
    async with serving(serve, upstream, redis_url, limits__requests_per_minute=1) as http:
        upstream.whole(completion({"role": "assistant", "content": "hello"}))
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        refused = await http.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (await http.post("/v1/responses", json={"model": "tiny", "input": "hi"})).status_code == 429
        assert (await http.get("/v1/models")).status_code == 200


async def test_a_refused_chat_is_not_counted(
    serve: Serve, upstream: ScriptedUpstream, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "responses_mw.access")
    async with serving(serve, upstream, redis_url) as http:
        upstream.whole(error("no such model", 404), 404)
        answer = await http.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "no such model")
    assert facts(caplog).items() >= {"key": "alice", "cause": "client"}.items()
    assert "tokens_in" not in facts(caplog)


NO_ROUTE = {"detail": "Not Found"}
NO_MODEL = error("The model `x` does not exist.", 404)
NO_TOOLS = error('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')


@pytest.mark.parametrize(
    ("path", "status", "body", "cause"),
    [
        ("/v1/chat/completions", 404, NO_ROUTE, "upstream"),
        ("/v1/chat/completions", 404, NO_MODEL, "client"),
        ("/v1/chat/completions", 400, NO_TOOLS, "upstream"),
        ("/v1/chat/completions", 400, error("The temperature is too high."), "client"),
        ("/v1/chat/completions", 401, error("Unauthorized", 401), "server"),
        ("/v1/chat/completions", 403, error("Forbidden", 403), "server"),
        ("/v1/chat/completions", 403, error("Not for you.", 403, code="model_not_found"), "client"),
        ("/v1/chat/completions", 500, error("broken", 500), "upstream"),
        ("/v1/rerank", 404, NO_ROUTE, "client"),
        ("/v1/rerank", 401, error("Unauthorized", 401), "server"),
    ],
)
async def test_the_cause_of_a_refused_chat_is_that_of_a_refused_response(
    serve: Serve,
    upstream: ScriptedUpstream,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
    path: str,
    status: int,
    body: dict[str, Any],
    cause: str,
) -> None:
    caplog.set_level(logging.INFO, "responses_mw.access")
    upstream.pages["/v1/rerank"] = upstream.queue(json_answer(body, status))
    async with serving(serve, upstream, redis_url, upstream__api_key="the operator's", auth__proxy_paths=["/v1/"]) as http:
        answer = await http.post(path, json=CHAT)
    assert (answer.status_code, answer.json()) == (status, body)
    assert facts(caplog).items() >= {"cause": cause, "upstream_status": status}.items()
