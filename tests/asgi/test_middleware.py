"""The middleware in its host: paths, CORS, WebSockets, lifespan and proxied requests."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from responses_mw import ResponsesMiddleware, Settings, create_app
from responses_mw.upstream.opening import open_upstreams
from responses_mw.upstream.transports.asgi import ASGITransport
from tests.support.configured import make_settings
from tests.support.oracle import check, stream, whole
from tests.support.scripted import HELLO, Signal, completion, error, frame, text
from tests.support.servers import lifespan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from anyio.from_thread import BlockingPortal
    from starlette.middleware.base import RequestResponseEndpoint
    from starlette.requests import Request
    from starlette.responses import Response as StarletteResponse
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start

    Mounted = Callable[[ASGIApp], ResponsesMiddleware]

pytestmark = pytest.mark.both_mounts

BODY = {"input": "Hi", "model": "tiny"}
ANSWER = completion({"content": "Hello"})


async def post(url: str, **settings: Any) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        return await client.post(url, json=BODY, **settings)


@pytest.fixture
def mounted(redis_url: str, portal: BlockingPortal) -> Iterator[Mounted]:
    """Wrap an application in the middleware, for hosts without a lifespan; close it after the test."""
    with ExitStack() as stack:

        def mount(app: ASGIApp) -> ResponsesMiddleware:
            middleware = ResponsesMiddleware(app, make_settings(redis__url=redis_url))
            stack.callback(portal.call, middleware._close)
            return middleware

        yield mount


# -- paths --------------------------------------------------------------------------------------------------------------------


def mounted_at(root: str) -> Callable[[ASGIApp], ASGIApp]:
    """Return what a host does that mounts an application at `root`, and keeps this prefix in the path."""

    def wrap(app: ASGIApp) -> ASGIApp:
        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "root_path": root} if scope["type"] == "http" else scope, receive, send)

        return call

    return wrap


async def test_responses_are_served_only_below_the_base_path(start: Start, upstream: ScriptedUpstream) -> None:
    upstream.pages["/openai/v1/models"] = {"object": "list", "data": upstream.models}
    ours = start(server__base_path="/openai")
    upstream.whole(ANSWER)
    assert (await ours.http.post("/openai/v1/responses", json=BODY)).status_code == 200
    assert (await ours.http.post("/v1/responses", json=BODY)).status_code == 404
    assert (await ours.http.post("/openai", json=BODY)).json() == {"detail": "Not Found"}


@pytest.mark.parametrize("root", ["", "/llm"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/resp_1", "/v1/conversations", "/v1/./responses"])
async def test_our_paths_outside_of_the_base_path_do_not_reach_the_upstream(
    start_at: Callable[..., Ours], upstream: ScriptedUpstream, root: str, path: str
) -> None:
    """The upstream may have a Responses API too."""
    ours = start_at("proxy", wrap=mounted_at(root), server__base_path="/openai")
    url = httpx.URL(ours.url).copy_with(raw_path=b"/x")
    request = httpx.Request("POST", url, extensions={"target": f"{root}{path}".encode()}, json=BODY)
    answer = await ours.http.send(request)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
    assert [visit.path for visit in upstream.visits if "models" not in visit.path] == []


async def test_upstream_paths_are_proxied_with_and_without_the_base_path(start_at: Callable[..., Ours]) -> None:
    ours = start_at("proxy", server__base_path="/openai")
    for path in ("/openai/v1/models", "/v1/models"):
        assert (await ours.http.get(path)).json()["data"][0]["id"] == "tiny"
    assert (await ours.http.get("/openaix/v1/models")).status_code == 404


async def test_the_servers_root_path_is_not_sent_upstream(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(uvicorn={"root_path": "/api"})
    upstream.whole(ANSWER)
    await whole(ours)
    assert upstream.requests[0].path == "/v1/chat/completions"
    assert (await ours.http.get("/v1/models")).json()["data"][0]["id"] == "tiny"


async def test_paths_with_and_without_the_root_path_are_served(start: Start, upstream: ScriptedUpstream) -> None:
    """A proxy in front may keep the prefix in the path, as with vLLM's --root-path."""

    ours = start(wrap=mounted_at("/api"))
    upstream.whole(ANSWER)
    assert (await ours.http.post("/api/v1/responses", json=BODY)).status_code == 200
    upstream.whole(ANSWER)
    assert (await ours.http.post("/v1/responses", json=BODY)).status_code == 200


@pytest.mark.parametrize(
    ("root", "base_path"), [("/llm", "/openai"), ("/llm/openai", "/openai"), ("/llm/openai", "/llm/openai")]
)
async def test_the_base_path_may_be_that_of_a_mount(
    start_at: Callable[..., Ours], upstream: ScriptedUpstream, root: str, base_path: str
) -> None:
    ours = start_at("proxy", wrap=mounted_at(root), server__base_path=base_path)
    upstream.whole(ANSWER)
    answer = await ours.http.post("/llm/openai/v1/responses", json=BODY)
    assert answer.json()["object"] == "response"
    assert [request.path for request in upstream.requests] == ["/v1/chat/completions"]


async def test_the_middleware_can_be_mounted_below_a_path(upstream: ScriptedUpstream, serve: Serve, mounted: Mounted) -> None:
    inner = mounted(Starlette(routes=[Route("/other", lambda _: PlainTextResponse("other")), Mount("/", upstream)]))
    url = serve(
        Starlette(routes=[Mount("/llm", inner), Route("/v1/responses", lambda _: PlainTextResponse("host"), methods=["POST"])])
    )
    upstream.whole(ANSWER)
    response = await post(f"{url}/llm/v1/responses")
    assert response.json()["output_text"] == "Hello"
    assert (await post(f"{url}/v1/responses")).text == "host"
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        assert (await client.get(f"{url}/llm/other")).text == "other"


async def test_the_hosts_application_sees_only_its_own_path_parameters(
    upstream: ScriptedUpstream, serve: Serve, mounted: Mounted
) -> None:
    seen: list[dict[str, str]] = []

    async def recording(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            seen.append(scope["path_params"])
        await upstream(scope, receive, send)

    url = serve(Starlette(routes=[Mount("/{tenant}", mounted(recording))]))
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:  # each checks the credential
        for path in ("responses/resp_1", "responses/resp_1/input_items", "conversations/conv_1/items/msg_1"):
            assert (await client.get(f"{url}/llm/v1/{path}")).status_code == 404
    assert seen
    assert all(params == {"tenant": "llm"} for params in seen)


async def test_a_starlette_host_keeps_its_other_routes(upstream: ScriptedUpstream, serve: Serve, redis_url: str) -> None:
    host = Starlette(
        routes=[
            Route("/v1/responses", lambda _: PlainTextResponse("the host's own"), methods=["GET", "POST"]),
            Route("/hello", lambda _: PlainTextResponse("hello")),
            Mount("/", upstream),
        ]
    )
    host.add_middleware(ResponsesMiddleware, settings=make_settings(redis__url=redis_url))
    url = serve(host)
    upstream.whole(ANSWER)
    assert (await post(f"{url}/v1/responses")).json()["output_text"] == "Hello"
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        assert (await client.get(f"{url}/hello")).text == "hello"


async def test_trusted_host_middleware_of_the_host_accepts_upstream_calls(
    upstream: ScriptedUpstream, serve: Serve, redis_url: str
) -> None:
    host = TrustedHostMiddleware(upstream, allowed_hosts=["127.0.0.1"])
    url = serve(ResponsesMiddleware(host, make_settings(redis__url=redis_url)))
    upstream.whole(ANSWER)
    assert (await post(f"{url}/v1/responses")).json()["output_text"] == "Hello"


@pytest.mark.parametrize("place", ["before", "behind"])
async def test_the_middleware_works_with_other_middleware_of_a_fastapi_host(
    upstream: ScriptedUpstream, serve: Serve, redis_url: str, place: str
) -> None:
    async def seen(request: Request, call_next: RequestResponseEndpoint) -> StarletteResponse:
        response = await call_next(request)
        response.headers["x-seen"] = "yes"
        return response

    def add_others() -> None:
        host.add_middleware(GZipMiddleware, minimum_size=1)
        host.add_middleware(BaseHTTPMiddleware, dispatch=seen)
        host.add_middleware(CORSMiddleware, allow_origins=["*"])

    host = FastAPI()
    if place == "behind":
        add_others()
    host.add_middleware(
        ResponsesMiddleware, settings=make_settings(redis__url=redis_url, server__cors_origins=[ORIGIN["origin"]])
    )
    if place == "before":
        add_others()
    host.mount("/", upstream)
    async with httpx.AsyncClient(base_url=serve(host), trust_env=False, verify=False) as client:
        upstream.stream(*HELLO)
        streamed = await client.post("/v1/responses", json={**BODY, "stream": True}, headers=ORIGIN)
        assert "content-encoding" not in streamed.headers
        check(streamed.content)
        upstream.whole(completion({"content": "Hello" * 100}))
        answer = await client.post("/v1/responses", json=BODY, headers=ORIGIN)
        assert answer.json()["output_text"] == "Hello" * 100
        assert ("x-seen" in answer.headers) == (place == "before")
        assert answer.headers["access-control-allow-origin"] == ("*" if place == "before" else ORIGIN["origin"])
        left = upstream.stream(*HELLO[:2], Signal())
        async with client.stream("POST", "/v1/responses", json={**BODY, "stream": True}) as response:
            await anext(response.aiter_raw())
        await left.left.wait(60)
        assert (await client.get("/v1/models")).headers["x-seen"] == "yes"


# -- CORS ---------------------------------------------------------------------------------------------------------------------

ORIGIN = {"origin": "https://chat.example"}


async def test_a_listed_origin_gets_cors_headers_in_every_answer(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(server__cors_origins=["https://chat.example"])
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    preflight = await ours.http.options("/v1/responses", headers={**ORIGIN, **asked})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    upstream.whole(ANSWER)
    upstream.whole(error("no"), 400)
    upstream.stream(*HELLO)
    for body in (BODY, BODY, {**BODY, "stream": True}, {"input": 5}):
        response = await ours.http.post("/v1/responses", json=body, headers=ORIGIN)
        assert response.headers["access-control-allow-origin"] == "https://chat.example"
    missing = await ours.http.get("/v1/responses/a/b/c", headers=ORIGIN)
    assert (missing.status_code, missing.headers["access-control-allow-origin"]) == (404, "https://chat.example")


async def test_the_preflight_of_an_unlisted_origin_is_refused(start: Start) -> None:
    ours = start(server__cors_origins=["https://other.example"])
    preflight = await ours.http.options("/v1/responses", headers={**ORIGIN, "access-control-request-method": "POST"})
    assert preflight.status_code == 400
    assert "access-control-allow-origin" not in preflight.headers


async def test_there_are_no_cors_headers_by_default(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(ANSWER)
    response = await ours.http.post("/v1/responses", json=BODY, headers=ORIGIN)
    assert not any(name.startswith("access-control") for name in response.headers)


# -- WebSockets ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["none", "websockets-sansio"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/"])
async def test_an_upgrade_is_a_426_if_websockets_are_unavailable(start: Start, library: str, path: str) -> None:
    """The server has no WebSocket library, or a setting disables them."""
    ours = start(uvicorn={"ws": library}, server__max_websockets=int(library == "none"))
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect(f"{ours.url}{path}", headers={"openai-beta": "responses_websockets=2026-02-06"})
    assert caught.value.status == 426


async def test_an_upgrade_of_another_path_is_passed_to_the_host(start_at: Callable[..., Ours]) -> None:
    ours = start_at("mounted", uvicorn={"ws": "websockets-sansio"})
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{ours.url}/v1/realtime") as socket:
        await socket.send_str("echo")
        assert await socket.receive_str() == "echo"


# -- lifespan -----------------------------------------------------------------------------------------------------------------


async def test_the_lifespan_of_the_host_runs(upstream: ScriptedUpstream, redis_url: str) -> None:
    async with lifespan(ResponsesMiddleware(upstream, make_settings(redis__url=redis_url))):
        assert upstream.started
        assert not upstream.stopped
    assert upstream.stopped


async def test_a_custom_transport_is_used_even_if_aenter_returns_none(upstream: ScriptedUpstream) -> None:
    class Given(ASGITransport):
        async def __aenter__(self) -> None:  # type: ignore[override]
            await super().__aenter__()

    given = Given(upstream)
    async with open_upstreams(upstream, make_settings(), given) as [opened]:
        assert opened.transport is given


@pytest.mark.parametrize("lifespan", ["off", "auto"])
async def test_the_middleware_works_in_a_host_without_a_lifespan(
    upstream: ScriptedUpstream, serve: Serve, mounted: Mounted, lifespan: str
) -> None:
    async def host(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        await upstream(scope, receive, send)

    url = serve(mounted(host), lifespan=lifespan)
    upstream.whole(ANSWER)
    assert (await post(f"{url}/v1/responses")).json()["output_text"] == "Hello"


async def test_without_a_lifespan_an_invalid_setting_is_logged_and_each_request_is_a_503(
    upstream: ScriptedUpstream, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    url = serve(ResponsesMiddleware(upstream, make_settings(redis__url="redis+wrong://user:password@host")), lifespan="off")
    for _ in range(2):
        response = await post(f"{url}/v1/responses")
        assert (response.status_code, response.json()["error"]["message"]) == (
            503,
            "This server cannot start. Its log says why.",
        )
        assert "x-request-id" in response.headers
    assert caplog.text.count("cannot start: redis.url is not valid: unknown kind of Redis URL: redis+wrong://") == 2
    upstream.pages["/v1/models"] = {"data": []}
    async with httpx.AsyncClient(base_url=url, verify=False, trust_env=False) as client:
        assert (await client.get("/v1/models")).status_code == 200


async def test_nested_middlewares_log_their_own_routes(
    upstream: ScriptedUpstream, serve: Serve, mounted: Mounted, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "responses_mw.access")
    inner = create_app(make_settings(upstream__url=serve(upstream), upstream__dialect="openai", redis__url=redis_url))
    url = serve(mounted(inner))
    upstream.whole(ANSWER)
    assert (await post(f"{url}/v1/responses")).status_code == 200
    async with asyncio.timeout(20):
        while len(lines := [line for line in caplog.messages if line.startswith("POST ")]) < 2:
            await asyncio.sleep(0.01)
    assert sorted(line.split()[1] for line in lines) == ["*", "/v1/responses"]


async def test_concurrent_first_requests_are_served_without_a_lifespan(
    upstream: ScriptedUpstream, serve: Serve, mounted: Mounted
) -> None:
    url = serve(mounted(upstream), lifespan="off")
    for _ in range(5):
        upstream.whole(ANSWER)
    responses = await asyncio.gather(*(post(f"{url}/v1/responses") for _ in range(5)))
    assert [response.status_code for response in responses] == [200] * 5


@pytest.mark.parametrize("when", ["startup", "shutdown"])
async def test_a_failure_of_the_hosts_lifespan_is_reported_to_the_server(redis_url: str, when: str) -> None:
    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        if when == "startup":
            raise RuntimeError("no GPU")
        yield
        raise RuntimeError("no GPU")

    app = Starlette(lifespan=lifespan)
    app.add_middleware(ResponsesMiddleware, settings=make_settings(redis__url=redis_url))
    received = iter(["lifespan.startup", "lifespan.shutdown"])
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": next(received)}

    async def send(message: Any) -> None:
        sent.append(message)

    with pytest.raises(RuntimeError, match="no GPU"):
        await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
    assert sent[-1]["type"] == f"lifespan.{when}.failed"
    assert "no GPU" in sent[-1]["message"]


def test_without_a_lifespan_the_transport_is_closed_with_the_event_loop(upstream: ScriptedUpstream, redis_url: str) -> None:
    class Transport(ASGITransport):
        closed = False

        async def aclose(self) -> None:
            await super().aclose()
            self.closed = True

    async def ask(transport: Transport) -> None:
        ours = ResponsesMiddleware(upstream, make_settings(redis__url=redis_url), transport)
        upstream.whole(ANSWER)
        async with httpx.AsyncClient(transport=ASGITransport(ours), base_url="http://ours") as client:
            assert (await client.post("/v1/responses", json=BODY)).status_code == 200
        assert not transport.closed

    transport = Transport(upstream)
    asyncio.run(ask(transport))
    assert transport.closed


def test_without_a_lifespan_the_middleware_works_in_each_new_event_loop(upstream: ScriptedUpstream, redis_url: str) -> None:
    """A test client that is not used as a context manager has an event loop for each request."""
    ours = ResponsesMiddleware(upstream, make_settings(redis__url=redis_url))

    async def ask() -> None:
        upstream.whole(ANSWER)
        async with httpx.AsyncClient(transport=ASGITransport(ours), base_url="http://ours") as client:
            assert (await client.post("/v1/responses", json=BODY)).json()["store"] is True

    for _ in range(3):
        asyncio.run(ask())


async def test_a_host_that_raises_at_startup_does_not_start_and_the_transport_is_closed(redis_url: str, serve: Serve) -> None:
    class Transport(ASGITransport):
        closed = False

        async def aclose(self) -> None:
            self.closed = True

    async def host(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        raise RuntimeError("no GPU")

    transport = Transport(host)
    with pytest.raises(RuntimeError, match="did not start"):
        serve(ResponsesMiddleware(host, make_settings(redis__url=redis_url), transport))
    assert transport.closed


async def test_the_middleware_can_be_restarted(upstream: ScriptedUpstream, serve: Serve, redis_url: str) -> None:
    """A test suite of the host starts and stops the same application many times."""
    app = ResponsesMiddleware(upstream, make_settings(redis__url=redis_url))
    for _ in range(2):
        upstream.whole(ANSWER)
        async with lifespan(app), httpx.AsyncClient(transport=ASGITransport(app), base_url="http://app") as client:
            assert (await client.post("/v1/responses", json=BODY)).json()["output_text"] == "Hello"


def test_the_standalone_application_needs_an_upstream() -> None:
    with pytest.raises(ValueError, match="--upstream"):
        create_app(Settings())


# -- proxied requests ---------------------------------------------------------------------------------------------------------

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


async def test_chat_completions_are_proxied(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(ANSWER)
    chat = await ours.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
    assert chat.choices[0].message.content == "Hello"
    assert upstream.requests[0].json == CHAT
    assert upstream.requests[0].headers["authorization"] == "Bearer key"


async def test_a_chat_stream_is_proxied_as_it_arrives(ours: Ours, upstream: ScriptedUpstream) -> None:
    more = Signal()
    upstream.stream(text("Hel"), more, text("lo"))
    raw = b""
    async with ours.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        async for data in response.aiter_raw():
            raw += data
            more.set()
    assert raw == frame(text("Hel")) + frame(text("lo")) + b"data: [DONE]\n\n"


async def test_a_chat_error_is_proxied_unchanged(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(error("no", 422), 422, headers={"x-mine": "1"})
    response = await ours.http.post("/v1/chat/completions", json=CHAT)
    assert (response.status_code, response.json(), response.headers["x-mine"]) == (422, error("no", 422), "1")


async def test_models_are_listed_by_the_official_client(ours: Ours, upstream: ScriptedUpstream) -> None:
    assert [model.id async for model in await ours.client.models.list()] == ["tiny"]


async def test_responses_and_chat_completions_run_concurrently(ours: Ours, upstream: ScriptedUpstream) -> None:
    more = Signal()
    waiting = upstream.stream(text("Hel"), more, text("lo"))
    chat = asyncio.create_task(ours.http.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    await waiting.asked.wait()
    upstream.stream(*HELLO)
    assert (await stream(ours)).deltas == ["Hel", "lo"]
    more.set()
    assert (await chat).text.endswith("data: [DONE]\n\n")
