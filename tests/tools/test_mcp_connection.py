"""A run's connection to an MCP server: listing tools, calling them, and errors."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from mcp.server.mcpserver import MCPServer
from mcp_types import ElicitRequest, ElicitRequestFormParams, InputRequiredResult

from responses_mw.errors import BadRequest, Unauthorized, UpstreamError
from responses_mw.tools.mcp_connection import MCPConnection
from responses_mw.tools.mcp_session import MCPTarget
from tests.support.mcp_servers import PIXEL, TOKEN, Bearer, Breaking, Older, Watched, Wedging, answering, weather

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from tests.support.servers import Serve

Connect = Callable[..., MCPConnection]
LABEL = "weather"


def streamable(**options: Any) -> ASGIApp:
    return weather().streamable_http_app(**options)


APPS: dict[str, tuple[Callable[[], ASGIApp], str]] = {
    "streamable": (streamable, "/mcp"),
    "streamable as JSON": (lambda: streamable(json_response=True, stateless_http=True), "/mcp"),
    "streamable with sessions": (lambda: Older(streamable()), "/mcp"),
    "SSE": (lambda: weather().sse_app(), "/sse"),
}


def connection(url: str, *, headers: dict[str, str] | None = None, private: bool = True, timeout: float = 10) -> MCPConnection:
    return MCPConnection(MCPTarget(LABEL, url, headers or {}, allow_private=private, is_configured=True, timeout=timeout))


@pytest.fixture
def output_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the maximum size of a tool's output."""

    def limit(size: int) -> None:
        monkeypatch.setattr("responses_mw.tools.mcp_connection.MAX_OUTPUT_BYTES", size)
        monkeypatch.setattr("responses_mw.tools.mcp_session._MAX_ANSWER_BYTES", 8 * size + 64 * 1024)

    return limit


@pytest.fixture(params=APPS)
def server(request: pytest.FixtureRequest, serve: Serve) -> Callable[..., str]:
    """Serve the weather server over each transport, wrapped by `wrap`, and return its URL."""
    make, path = APPS[request.param]

    def start(wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app) -> str:
        return serve(wrap(make())) + path

    return start


# -- successful calls -----------------------------------------------------------------------------------------------------------


async def test_tools_are_listed_in_the_form_of_the_mcp_list_tools_item(server: Callable[..., str]) -> None:
    async with aclosing(connection(server())) as weather:
        tools = {tool["name"]: tool for tool in await weather.list_tools()}
    listed = tools["get_weather"]
    assert listed["description"] == "The weather of a city."
    assert listed["input_schema"]["properties"]["city"]["type"] == "string"
    assert listed["annotations"] == {"readOnlyHint": True}
    assert "annotations" not in tools["sleep"]


async def test_a_tool_is_called(server: Callable[..., str]) -> None:
    async with aclosing(connection(server())) as weather:
        result = await weather.call("get_weather", {"city": "Paris"})
    assert result.content == "Sunny in Paris."
    assert result.members == {"output": "Sunny in Paris."}
    assert not result.failed


async def test_concurrent_calls_share_a_session(server: Callable[..., str]) -> None:
    watched: list[Watched] = []

    def watch(app: ASGIApp) -> ASGIApp:
        watched.append(Watched(app))
        return watched[0]

    async with aclosing(connection(server(watch), timeout=30)) as weather, asyncio.TaskGroup() as calls:
        slow = calls.create_task(weather.call("sleep", {"seconds": 60}))
        quick = [calls.create_task(weather.call("get_weather", {"city": str(n)})) for n in range(5)]
        await asyncio.wait(quick)
        assert not slow.done()
        slow.cancel()
    assert [call.result().content for call in quick] == [f"Sunny in {n}." for n in range(5)]
    assert watched[0].rpc.count("tools/call") == 6
    assert watched[0].rpc.count("notifications/initialized") <= 1


async def test_different_tasks_can_use_and_close_a_connection(server: Callable[..., str]) -> None:
    weather = connection(server())
    await asyncio.create_task(weather.list_tools())
    result = await asyncio.create_task(weather.call("get_weather", {"city": "Rome"}))
    await asyncio.create_task(weather.aclose())
    assert result.content == "Sunny in Rome."


async def test_headers_and_trace_context_are_sent(serve: Serve) -> None:
    given = {"authorization": f"Bearer {TOKEN}", "x-key": "k", "traceparent": "00-1-2-01"}
    async with aclosing(connection(serve(Bearer(streamable())) + "/mcp", headers=given)) as weather:
        result = await weather.call("headers", {})
    assert isinstance(result.content, str)
    received = json.loads(result.content)
    assert given.items() <= received.items()
    assert received["accept-encoding"] == "identity"


async def test_closing_a_connection_deletes_the_session_on_the_server(serve: Serve) -> None:
    watched = Watched(Older(streamable()))
    async with aclosing(connection(serve(watched) + "/mcp")) as weather:
        await weather.list_tools()
    assert watched.methods[-1] == "DELETE"


async def test_an_unused_connection_sends_no_request(serve: Serve) -> None:
    watched = Watched(streamable())
    async with aclosing(connection(serve(watched) + "/mcp")):
        pass
    assert watched.methods == []


# -- results of tools -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def plain(serve: Serve) -> str:
    return serve(streamable()) + "/mcp"


async def test_images_are_content_parts_for_the_model_and_described_in_the_item(plain: str) -> None:
    async with aclosing(connection(plain)) as weather:
        result = await weather.call("picture", {})
    assert result.content == [
        {"type": "input_text", "text": "A pixel:"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"},
    ]
    assert result.members == {"output": "A pixel:\n[image/png, 32 bytes]"}


async def test_resources_links_and_audio_are_described_as_text(plain: str) -> None:
    async with aclosing(connection(plain)) as weather:
        result = await weather.call("assorted", {})
    assert result.content == (
        "[resource file:///note.txt]\na note\n"
        "[resource file:///a.zip of type application/zip, 3 bytes: it is not text]\n"
        "[resource b: file:///b.txt] another\n"
        "[audio of type audio/wav, 3 bytes: it cannot be played to you]\n"
        "[an image of type image/png that cannot be shown]"
    )


async def test_structured_content_is_used_when_there_is_no_text(plain: str) -> None:
    async with aclosing(connection(plain)) as weather:
        result = await weather.call("structured", {})
    assert result.content == '{"degrees":21}'


async def test_long_output_is_truncated_with_a_note(plain: str, output_bytes: Callable[[int], None]) -> None:
    output_bytes(1001)
    async with aclosing(connection(plain)) as weather:
        result = await weather.call("long", {"size": 1000})
    assert result.content == "é" * 500 + "\n... (2000 bytes in all)"


async def test_an_image_that_is_too_large_is_omitted(plain: str, output_bytes: Callable[[int], None]) -> None:
    output_bytes(20)
    async with aclosing(connection(plain)) as weather:
        result = await weather.call("picture", {})
    assert result.content == "A pixel:\n[image/png, 32 bytes] omitted: it is too large"


@pytest.mark.parametrize("pictures", [False, True])
async def test_many_small_content_parts_do_not_exceed_the_limit_with_their_notes(
    plain: str, output_bytes: Callable[[int], None], pictures: bool
) -> None:
    output_bytes(60)
    async with aclosing(connection(plain)) as weather:
        result = await weather.call("pieces", {"count": 500, "pictures": pictures})
    omitted = {False: 470, True: 498}[pictures]
    assert isinstance(result.content, str)
    assert result.content == result.members["output"]
    assert len(result.content) < 200
    assert result.content.endswith(f"\n... ({omitted} further parts omitted)")


async def test_a_result_that_is_too_large_is_a_failed_call_and_the_next_call_works(
    plain: str, output_bytes: Callable[[int], None]
) -> None:
    output_bytes(1024)
    async with aclosing(connection(plain)) as weather:
        result = await weather.call("long", {"size": 1_000_000})
        assert result.failed
        assert (await weather.call("get_weather", {"city": "Oslo"})).content == "Sunny in Oslo."


# -- errors of a call -----------------------------------------------------------------------------------------------------------


async def test_an_error_of_a_tool_is_a_failed_result(server: Callable[..., str]) -> None:
    async with aclosing(connection(server())) as weather:
        result = await weather.call("fail", {"why": "no clouds"})
    assert result.failed
    assert "no clouds" in result.content
    assert result.members["error"]["type"] == "mcp_tool_execution_error"
    assert "no clouds" in result.members["error"]["content"][0]["text"]


async def test_an_unknown_tool_is_a_failed_result(server: Callable[..., str]) -> None:
    async with aclosing(connection(server())) as weather:
        result = await weather.call("nothing", {})
    assert result.failed
    assert result.members["error"]["type"] in ("mcp_protocol_error", "mcp_tool_execution_error")


async def test_a_tool_that_requests_input_is_a_failed_result(serve: Serve) -> None:
    asking = MCPServer("asking", log_level="CRITICAL")

    @asking.tool()
    def book() -> InputRequiredResult:
        form = ElicitRequestFormParams(message="When?", requested_schema={"type": "object", "properties": {}})
        return InputRequiredResult(input_requests={"when": ElicitRequest(params=form)})

    async with aclosing(connection(serve(asking.streamable_http_app()) + "/mcp")) as server:
        result = await server.call("book", {})
    assert result.failed
    assert result.members["error"]["message"] == "MCP server 'weather': the tool asks for input, which is not supported."


@pytest.mark.parametrize("server", ["streamable", "SSE"], indirect=True)
async def test_a_call_that_times_out_is_a_failed_result_and_the_next_call_works(server: Callable[..., str]) -> None:
    url = server()
    async with aclosing(connection(url, timeout=2)) as weather:
        assert not (await weather.call("get_weather", {"city": "Bonn"})).failed
        result = await weather.call("sleep", {"seconds": 30})
        assert result.failed
        assert result.members["error"] == {
            "type": "http_error", "code": 504, "message": "MCP server 'weather': it did not answer within 2 s."
        }  # fmt: skip
        assert (await weather.call("get_weather", {"city": "Oslo"})).content == "Sunny in Oslo."


@pytest.mark.parametrize("content_type", [b"application/json", b"text/event-stream"])
async def test_a_connection_that_breaks_during_a_call_fails_only_that_call(serve: Serve, content_type: bytes) -> None:
    async with aclosing(connection(serve(Breaking(streamable(), content_type)) + "/mcp")) as weather:
        async with asyncio.timeout(60):
            result = await weather.call("get_weather", {"city": "Paris"})
        assert result.failed
        assert LABEL in result.members["error"]["message"]
        assert len(await weather.list_tools()) > 1


async def test_an_unreachable_server_is_a_failed_result(free_url: str) -> None:
    async with aclosing(connection(free_url)) as weather:
        result = await weather.call("get_weather", {"city": "Paris"})
    assert result.members["error"] == {
        "type": "http_error", "code": 502, "message": "MCP server 'weather': it cannot be reached: the connection was refused."
    }  # fmt: skip


async def test_a_session_lost_by_the_server_is_replaced_after_one_failed_call(serve: Serve) -> None:
    """After a restart of the server, the first call fails, because it may have run. The next call opens a new session."""
    now = Replaceable([Older(streamable()), Older(streamable())])
    async with aclosing(connection(serve(now) + "/mcp")) as weather:
        assert not (await weather.call("get_weather", {"city": "Rome"})).failed
        now.replaced = True
        assert (await weather.call("get_weather", {"city": "Rome"})).failed
        assert not (await weather.call("get_weather", {"city": "Rome"})).failed


class Replaceable:
    """Two servers, each with its own lifespan. Requests go to the first until `replaced` is set."""

    def __init__(self, apps: Sequence[ASGIApp]) -> None:
        self.replaced = False
        self._apps = apps

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self._apps[self.replaced](scope, receive, send)
            return
        from tests.support.servers import lifespan

        await receive()
        async with lifespan(self._apps[0]), lifespan(self._apps[1]):
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


# -- errors while connecting and listing tools ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403])
async def test_rejected_credentials_of_the_caller_are_a_401(server: Callable[..., str], status: int) -> None:
    url = server(lambda app: Bearer(app, status))
    async with aclosing(connection(url, headers={"authorization": "Bearer wrong"})) as weather:
        with pytest.raises(Unauthorized, match="MCP server 'weather': it refused the credentials") as raised:
            await weather.list_tools()
    assert raised.value.param == "tools"
    assert "wrong" not in raised.value.message


async def test_rejected_credentials_of_the_operator_are_a_424(serve: Serve) -> None:
    target = MCPTarget(LABEL, serve(Bearer(streamable())) + "/mcp", allow_private=True, credentials_of_caller=False)
    async with aclosing(MCPConnection(target)) as weather:
        with pytest.raises(UpstreamError) as raised:
            await weather.list_tools()
    assert raised.value.status == 424


@pytest.mark.parametrize(
    ("app", "told"),
    [
        (answering(500), "HTTP status 500"),
        (answering(404), "HTTP status 404"),
        (answering(200, b"<html>", [(b"content-type", b"text/html")]), "it refused the session"),
        (answering(200, b"{}"), "it refused the session"),
        (answering(200, b"x", [(b"content-type", b"application/json"), (b"content-encoding", b"gzip")]), "compressed"),
    ],
)
async def test_a_url_without_an_mcp_server_is_a_424_naming_the_label(serve: Serve, app: ASGIApp, told: str) -> None:
    async with aclosing(connection(serve(app) + "/mcp?key=secret")) as weather:
        with pytest.raises(UpstreamError, match=told) as raised:
            await weather.list_tools()
    error = raised.value
    assert (error.status, error.code, error.param) == (424, "external_connector_error", "tools")
    assert LABEL in error.message
    assert "secret" not in error.message


async def test_listing_the_tools_of_an_unreachable_server_is_a_424_and_logged(
    free_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "responses_mw.tools")
    async with aclosing(connection(free_url)) as weather:
        with pytest.raises(UpstreamError, match="cannot be reached"):
            await weather.list_tools()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("responses_mw.tools")] == [
        "a request to the MCP server 'weather' failed (HTTP 502)"
    ]


async def test_a_server_that_does_not_respond_in_time_is_a_424(serve: Serve) -> None:
    async def silent(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            while (await receive())["type"] != "http.disconnect":
                pass
        else:
            await answering(200)(scope, receive, send)

    async with aclosing(connection(serve(silent), timeout=0.3)) as weather:
        with pytest.raises(UpstreamError, match=r"did not answer within 0\.3 s"):
            await weather.list_tools()


async def test_too_many_tools_are_a_424(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("responses_mw.tools.mcp_connection.MAX_MCP_TOOLS", 3)
    async with aclosing(connection(plain)) as weather:
        with pytest.raises(UpstreamError, match="more than 3 tools"):
            await weather.list_tools()


@pytest.mark.parametrize("server", ["streamable with sessions", "SSE"], indirect=True)
async def test_too_many_pings_from_a_server_close_the_session(
    server: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.tools.mcp_session.MAX_SERVER_REQUESTS", 5)
    monkeypatch.setattr("responses_mw.tools.mcp_session.time", SimpleNamespace(monotonic=lambda: 0.0))  # no time passes
    pings = b"".join(b'event: message\ndata: {"jsonrpc":"2.0","id":"p%d","method":"ping"}\n\n' % n for n in range(3))
    answer = b'event: message\r\ndata: {"jsonrpc":"2.0","id":'
    async with aclosing(connection(server(lambda app: Preceded(app, answer, pings)))) as weather:
        with pytest.raises(UpstreamError, match="closed the connection"):
            await weather.list_tools()


@pytest.mark.parametrize("server", ["streamable with sessions", "SSE"], indirect=True)
async def test_a_ping_every_second_does_not_close_the_session(
    server: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr("responses_mw.tools.mcp_session.MAX_SERVER_REQUESTS", 0)
    monkeypatch.setattr("responses_mw.tools.mcp_session.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    ping = b'event: message\ndata: {"jsonrpc":"2.0","id":"p","method":"ping"}\n\n'
    answer = b'event: message\r\ndata: {"jsonrpc":"2.0","id":'
    async with aclosing(connection(server(lambda app: Preceded(app, answer, ping)))) as weather:
        assert await weather.list_tools()


async def test_a_private_address_is_a_400_and_nothing_is_sent(serve: Serve) -> None:
    watched = Watched(streamable())
    url = serve(watched).replace("127.0.0.1", "localhost")
    async with aclosing(connection(url + "/mcp", private=False)) as weather:
        with pytest.raises(BadRequest, match="MCP server 'weather': its URL does not lead to a public address"):
            await weather.list_tools()
    assert watched.methods == []


async def test_a_redirect_to_another_origin_is_not_followed(serve: Serve) -> None:
    watched = Watched(streamable())
    inner = serve(watched) + "/mcp?key=secret"
    redirecting = serve(answering(307, headers=[(b"location", inner.encode())]))
    async with aclosing(connection(redirecting + "?key=secret")) as weather:
        with pytest.raises(UpstreamError, match="it redirects") as raised:
            await weather.list_tools()
    assert watched.methods == []
    assert "secret" not in raised.value.message


async def test_credentials_repeated_in_a_server_error_are_redacted(serve: Serve) -> None:
    fault = {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": f"bad token {TOKEN}, sent to /mcp?key=123456"}}
    app = answering(400, json.dumps(fault).encode(), [(b"content-type", b"application/json")])
    async with aclosing(connection(serve(app) + "/mcp?key=123456", headers={"authorization": f"Bearer {TOKEN}"})) as weather:
        with pytest.raises(UpstreamError, match="bad token <redacted>, sent to <redacted>"):
            await weather.list_tools()


# -- closing, cancellation and logs ---------------------------------------------------------------------------------------------


async def test_closing_a_connection_cancels_its_pending_requests(server: Callable[..., str]) -> None:
    watched: list[Watched] = []

    def watch(app: ASGIApp) -> ASGIApp:
        watched.append(Watched(app))
        return watched[0]

    url = server(watch)
    carrier = "GET" if url.endswith("/sse") else "tools/call"
    weather = connection(url)
    await weather.call("get_weather", {"city": "Rome"})
    call = asyncio.create_task(weather.call("sleep", {"seconds": 30}))
    async with asyncio.timeout(60):
        while watched[0].rpc.count("tools/call") < 2:
            await asyncio.sleep(0.01)
        await weather.aclose()
        result = await call
        assert result.failed
        while carrier not in watched[0].left:
            await asyncio.sleep(0.01)


async def test_a_cancelled_call_leaves_the_connection_usable(server: Callable[..., str]) -> None:
    async with aclosing(connection(server())) as weather:
        await weather.call("get_weather", {"city": "Rome"})
        call = asyncio.create_task(weather.call("sleep", {"seconds": 30}))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not (await weather.call("get_weather", {"city": "Rome"})).failed


async def test_calls_to_a_server_that_hangs_are_cancelled_promptly(serve: Serve) -> None:
    """The SDK alone takes five seconds per call: it notifies the server of one cancellation after the other."""
    hanging = Wedging(Older(streamable()))
    weather = connection(serve(hanging) + "/mcp", timeout=30)
    await weather.call("get_weather", {"city": "Rome"})
    hanging.wedged = True
    calls = [asyncio.create_task(weather.call("get_weather", {"city": "Rome"})) for _ in range(4)]
    while hanging.waiting < 4:
        await asyncio.sleep(0.01)
    for call in calls:
        call.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait(calls)
        await weather.aclose()
        while hanging.waiting:
            await asyncio.sleep(0.01)


async def test_cancelling_while_the_connection_opens_disconnects_from_the_server(serve: Serve) -> None:
    async def silent(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            reached.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()
        else:
            await answering(200)(scope, receive, send)

    reached, left = threading.Event(), threading.Event()
    async with aclosing(connection(serve(silent))) as weather:
        call = asyncio.create_task(weather.list_tools())
        assert await asyncio.to_thread(reached.wait, 5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(left.wait, 5)


async def test_a_call_on_a_closed_connection_fails(plain: str) -> None:
    weather = connection(plain)
    await weather.aclose()
    assert (await weather.call("get_weather", {"city": "Rome"})).failed


async def test_arguments_results_and_credentials_are_not_logged(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    given = {"authorization": f"Bearer {TOKEN}"}
    for app in (streamable(), Older(streamable()), Breaking(streamable(), b"application/json")):
        async with aclosing(connection(serve(Bearer(app)) + "/mcp?key=secret", headers=given)) as weather:
            await weather.list_tools()
            await weather.call("get_weather", {"city": "Atlantis"})
            await weather.call("fail", {"why": "Atlantis"})
    ours = [record.getMessage() for record in caplog.records if record.threadName == "MainThread"]
    assert not [line for line in ours if "Atlantis" in line or "secret" in line or TOKEN in line]


# -- integers of more than 64 bits, and too many values --------------------------------------------------------------------------

HUGE = b"123456789012345678901234567890"


class Preceded:
    """Send `first` before each event that starts with `event`."""

    def __init__(self, app: ASGIApp, event: bytes, first: bytes) -> None:
        self._app, self._event, self._first = app, event, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message.get("body", b"").startswith(self._event):
                message = {**message, "body": self._first + message["body"]}
            await send(message)

        await self._app(scope, receive, sent)


class Altered:
    """Replace `said` with `instead` in the responses of an application."""

    def __init__(self, app: ASGIApp, said: bytes, instead: bytes) -> None:
        self._app, self._said, self._instead = app, said, instead

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun: list[Message] = []

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                begun.append(message)
            elif message["type"] != "http.response.body":
                await send(message)
            else:
                body = message.get("body", b"").replace(self._said, self._instead)
                headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
                await send({**begun[0], "headers": headers})
                await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, sent)


@pytest.fixture
def altered(serve: Serve) -> Callable[[bytes, bytes], str]:
    app = streamable(json_response=True, stateless_http=True)
    return lambda said, instead: serve(Altered(app, said, instead)) + "/mcp"


async def test_a_schema_with_a_number_that_cannot_be_serialized_is_malformed(altered: Callable[[bytes, bytes], str]) -> None:
    async with aclosing(connection(altered(b'"type":"object"', b'"type":"object","maxProperties":' + HUGE))) as weather:
        with pytest.raises(UpstreamError, match="malformed"):
            await weather.list_tools()


async def test_an_answer_with_too_many_values_is_not_decoded(altered: Callable[[bytes, bytes], str]) -> None:
    values = b'"type":"object","x":[%b1]' % (b"{}," * 20_000)
    async with aclosing(connection(altered(b'"type":"object"', values))) as weather:
        with pytest.raises(UpstreamError, match="malformed, is too large"):
            await weather.list_tools()


async def test_a_result_with_a_number_that_cannot_be_serialized_is_a_failed_call(
    altered: Callable[[bytes, bytes], str],
) -> None:
    rest = b'"isError":false,"resultType":"complete","structuredContent":{"result":'
    said = b'"content":[{"text":"Sunny in Paris.","type":"text"}],' + rest + b'"Sunny in Paris."}'
    structured = b'"content":[],' + rest + HUGE + b"}"
    async with aclosing(connection(altered(said, structured))) as weather:
        result = await weather.call("get_weather", {"city": "Paris"})
    assert result.failed
    assert "malformed" in str(result.content)
