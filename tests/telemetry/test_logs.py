"""Log records and the access line."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from responses_mw.asgi.http_responses import ErrorResponse, EventStreamResponse
from responses_mw.asgi.middleware import Application, Dispatcher
from responses_mw.asgi.telemetry import TelemetryMiddleware
from responses_mw.errors import Cause, StartupError, UpstreamError
from responses_mw.protocol.types import Event
from responses_mw.settings.groups import ServerSettings
from responses_mw.telemetry.context import ActiveRequest, RequestContext, annotate, begin_run
from responses_mw.telemetry.setup import HumanFormatter, JSONFormatter
from responses_mw.telemetry.tracing import tool_call_span
from tests.support.metrics import sample_value
from tests.support.scripted import HELLO, Signal, finish, text
from tests.support.servers import proxy_to

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.types import Receive, Scope, Send

    from tests.support.scripted import ScriptedUpstream
    from tests.telemetry.conftest import Start

SECRET, PROMPT = "sk-a-secret-key", "a secret question"


@pytest.fixture
def environment() -> dict[str, str]:
    """No variables: nothing is exported."""
    return {}


def record(message: str = "it %s", *arguments: Any, error: BaseException | None = None) -> logging.LogRecord:
    exc_info = (type(error), error, error.__traceback__) if error is not None else None
    return logging.LogRecord("a.logger", logging.WARNING, __file__, 1, message, arguments, exc_info)


def raised() -> BaseException:
    """An exception group, raised from another exception."""
    nothing: dict[str, str] = {}
    try:
        try:
            nothing[PROMPT]
        except KeyError as error:
            raise ExceptionGroup(PROMPT, [ValueError(PROMPT)]) from error
    except ExceptionGroup as group:
        return group
    raise AssertionError


def test_a_record_is_one_line_of_json() -> None:
    line = JSONFormatter().format(record("it %s\nfailed", "ö", error=raised()))
    assert "\n" not in line
    decoded = json.loads(line)
    assert decoded["message"] == "it ö\nfailed"
    assert (decoded["level"], decoded["logger"]) == ("warning", "a.logger")
    assert decoded["time"].endswith("+00:00")


@pytest.mark.parametrize("formatter", [JSONFormatter(), HumanFormatter()])
def test_an_exception_is_logged_by_place_and_class_without_its_message(formatter: logging.Formatter) -> None:
    text = formatter.format(record("x", error=raised()))
    assert PROMPT not in text
    assert "builtins.KeyError" in text
    assert "builtins.ValueError" in text
    assert "in raised" in text


def test_a_debug_log_contains_the_message_of_an_exception() -> None:
    assert PROMPT in JSONFormatter(with_messages=True).format(record("x", error=raised()))


@pytest.mark.parametrize(("stores", "shown"), [(True, True), (False, False)])
def test_a_debug_log_omits_exception_messages_of_requests_that_are_not_stored(stores: bool, shown: bool) -> None:
    with ActiveRequest(RequestContext(stores=stores)):
        text = JSONFormatter(with_messages=True).format(record("x", error=raised()))
    assert (PROMPT in text) is shown


# Characters that can begin a line, move the cursor or change the direction of text.
CONTROLS = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, 0x202E, 0x2066, 0xD800]))


@pytest.mark.parametrize("formatter", [JSONFormatter(), HumanFormatter()])
def test_no_text_can_start_a_log_line_or_control_a_terminal(formatter: logging.Formatter) -> None:
    text = formatter.format(record(f"{CONTROLS} %s", f"a{CONTROLS}2026-01-01 00:00:00,000 INFO forged"))
    assert not set(text) & set(CONTROLS)
    text.encode()
    if isinstance(formatter, JSONFormatter):
        assert json.loads(text)["message"].startswith(CONTROLS)


@pytest.mark.parametrize("formatter", [JSONFormatter(with_messages=True), HumanFormatter(with_messages=True)])
def test_no_text_of_an_exception_looks_like_a_record(formatter: logging.Formatter) -> None:
    error = ValueError("a\r\x1b[2K\u2028\n2026-01-01 00:00:00,000 INFO forged")
    first, *rest = formatter.format(record("x", error=error)).split("\n")
    assert "x" in first
    assert all(line.startswith("    ") for line in rest)
    assert not set("".join(rest)) & set(CONTROLS)
    assert any("forged" in line for line in [first, *rest])


def test_the_human_format_prints_a_traceback_line_by_line() -> None:
    lines = HumanFormatter().format(record("x", error=raised())).split("\n")
    assert any(line.strip().startswith("File ") for line in lines)
    assert lines[-1].strip() == "builtins.ValueError"


async def test_a_path_with_a_line_break_is_logged_on_one_line(
    serve: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(HumanFormatter())
    monkeypatch.setattr(logging.getLogger("responses_mw.asgi.proxy"), "handlers", [handler])
    async with httpx.AsyncClient(verify=False, trust_env=False) as client:
        url = serve(proxy_to(httpx.AsyncHTTPTransport(), "http://127.0.0.1:9"))
        assert (await client.get(f"{url}/v1/%0a%1b[2Kforged")).status_code == 502
    [line] = capfd.readouterr().err.splitlines()
    assert "\\n\\x1b[2Kforged" in line


# -- the middleware --------------------------------------------------------------------------------------------------------------


def streams_open() -> float | None:
    return sample_value("responses_mw_streams_open")


def active_requests() -> float | None:
    return sample_value("http_server_active_requests", {"http_request_method": "GET", "url_scheme": "http"})


def answering(*parts: bytes, kind: bytes = b"application/json", status: int = 200, owner: str = "0123456789abcdef") -> Any:
    """An application that annotates its request and answers with `parts`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        annotate(route="/v1/things/{thing}", owner=owner)
        annotate(response={"id": "resp_1", "store": True})
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if kind == b"text/event-stream":
            assert streams_open() == 1
        assert active_requests() == 1
        if b"leave" not in parts:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


async def asked(app: Any, path: str = "/v1/things/secret-id?key=secret") -> None:
    transport = httpx.ASGITransport(TelemetryMiddleware(app), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        await client.get(path, headers={"authorization": f"Bearer {SECRET}"})


async def test_a_request_logs_one_line_without_path_query_or_credential(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "responses_mw.access")
    await asked(answering(b"{}"))
    [line] = caplog.records
    assert re.fullmatch(
        r"GET /v1/things/\{thing\} 200 \d+\.\d{3}s request=req_\w{32} response=resp_1 owner=01234567 client=127\.0\.0\.1 "
        r"user_agent=[\w./-]+",
        line.getMessage(),
    )
    assert "secret" not in JSONFormatter().format(line)
    facts = json.loads(JSONFormatter().format(line))
    assert (facts["method"], facts["route"], facts["status"]) == ("GET", "/v1/things/{thing}", 200)
    assert (facts["response"], facts["owner"]) == ("resp_1", "01234567")


async def test_the_access_line_of_an_anonymous_request_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "responses_mw.access")
    await asked(answering(b"{}", owner="anonymous"))
    [line] = caplog.records
    assert " owner=anonymous " in line.getMessage()


async def test_the_time_of_a_request_includes_opening_the_application(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "responses_mw.access")

    class Opening(AbstractAsyncContextManager[Application]):
        async def __aenter__(self) -> Application:
            await asyncio.sleep(0.2)
            raise StartupError("a setting is wrong")

        async def __aexit__(self, *_: object) -> None: ...

    transport = httpx.ASGITransport(Dispatcher(answering(b"{}"), ServerSettings(), lambda _: Opening()))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert (await client.get("/v1/responses/resp_1")).status_code == 503
    [line] = [record for record in caplog.records if record.name == "responses_mw.access"]
    assert json.loads(JSONFormatter().format(line))["seconds"] >= 0.2


async def test_a_valid_request_id_of_the_caller_is_kept_and_otherwise_a_new_one_is_generated() -> None:
    transport = httpx.ASGITransport(TelemetryMiddleware(answering(b"{}")))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        given = [
            (await client.get("/", headers={"x-request-id": name})).headers["x-request-id"] for name in ("mine-1", "a b\t")
        ]
        assert given[0] == "mine-1"
        assert given[1].startswith("req_")
        assert (await client.get("/")).headers["x-request-id"] not in given


async def test_headers_of_proxied_requests_pass_unchanged() -> None:
    transport = httpx.ASGITransport(TelemetryMiddleware(answering(b"{}"), "*", traced=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert "x-request-id" not in (await client.get("/")).headers


async def test_streams_are_counted_while_they_are_open() -> None:
    await asked(answering(b"data: x\n\n", kind=b"text/event-stream"))
    assert streams_open() == 0
    assert active_requests() == 0


async def test_a_client_that_leaves_is_logged_with_left_true(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "responses_mw.access")

    async def left(scope: Scope, receive: Receive, send: Send) -> None:
        annotate(route="/r")

    for app in (left, answering(b"leave")):
        scope = {"type": "http", "method": "GET", "headers": [], "path": "/"}
        await TelemetryMiddleware(app)(scope, _never, _forget)
    assert [json.loads(JSONFormatter().format(line))["status"] for line in caplog.records] == [499, 200]
    assert all("left=true" in line.getMessage() for line in caplog.records)


async def test_a_model_name_in_the_access_line_is_truncated_and_quoted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "responses_mw.access")
    model = "m owner=forged " + "x" * 1000

    async def running(scope: Scope, receive: Receive, send: Send) -> None:
        begin_run({"id": "resp_1", "model": model, "store": True}, streams=False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    await asked(running)
    [line] = caplog.records
    assert f'model="{model[:128]}"' in line.getMessage()
    assert json.loads(JSONFormatter().format(line))["model"] == model[:128]


@pytest.mark.parametrize(("stores", "written"), [(True, True), (False, False)])
@pytest.mark.parametrize("cause", ["upstream", "client"])
async def test_the_upstreams_text_is_logged_unless_the_response_is_not_stored(
    caplog: pytest.LogCaptureFixture, cause: Cause, stores: bool, written: bool
) -> None:
    caplog.set_level("DEBUG", "responses_mw.runs")
    error = UpstreamError(f"{PROMPT}\n" + "x" * 1000, cause=cause)
    error.upstream_status = 500

    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        begin_run({"id": "resp_1", "model": "m", "store": stores}, streams=False)
        await ErrorResponse(error)(scope, receive, send)

    await asked(failing)
    *texts, report = caplog.records
    assert report.levelname == ("INFO" if cause == "client" else "WARNING")
    assert report.getMessage().startswith(
        "response resp_1 failed outcome=failed error_code=server_error error_type=500 upstream_status=500"
    )
    assert (f"{PROMPT}\\n" in report.getMessage()) is (written and cause == "upstream")
    assert len(report.getMessage()) < 900
    assert bool(texts) is (written and cause == "client")
    assert all(text.levelname == "DEBUG" and f"{PROMPT}\\n" in text.getMessage() for text in texts)
    assert all(len(text.getMessage()) < 600 for text in texts)


def test_a_cancelled_tool_call_is_not_counted_as_an_error() -> None:
    request = RequestContext()
    span = tool_call_span("f", "{}", call_id="c", label="", kind="mcp", server="s")
    with ActiveRequest(request), pytest.raises(asyncio.CancelledError), span:
        raise asyncio.CancelledError
    assert (request.tool_calls, request.tool_errors) == (1, 0)


async def test_an_application_that_raises_is_logged_as_a_500(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "responses_mw.access")

    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError(PROMPT)

    await asked(failing)
    warning, line = caplog.records
    assert (warning.levelname, line.levelname) == ("WARNING", "INFO")
    assert " 500 " in line.getMessage()
    assert "outcome=failed" in line.getMessage()
    assert "error_type=ValueError" in warning.getMessage()
    assert PROMPT not in caplog.text


async def test_a_stream_that_ends_with_an_error_is_not_logged_as_left_by_the_client(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "responses_mw.access")

    async def batches() -> AsyncGenerator[list[Event], None]:
        yield [Event("response.created", {"response": {}})]
        raise ValueError(PROMPT)

    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStreamResponse(batches(), ServerSettings())(scope, receive, send)

    await asked(failing)
    warning, line = caplog.records
    assert " 200 " in line.getMessage()
    assert "outcome=failed" in line.getMessage()
    assert "left" not in line.getMessage()
    assert "error_type=ValueError" in warning.getMessage()


@pytest.mark.parametrize("is_complete", [False, True])
async def test_a_connection_error_before_the_end_of_a_response_is_logged_as_left_by_the_client(
    caplog: pytest.LogCaptureFixture, is_complete: bool
) -> None:
    caplog.set_level("INFO", "responses_mw.access")

    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": not is_complete})
        raise ConnectionResetError

    await asked(failing)
    assert ("left=true" in caplog.records[-1].getMessage()) is not is_complete


async def _never() -> Any:
    raise AssertionError(sys._getframe().f_code.co_name)


async def _forget(_: Any) -> None:
    pass


# -- a server process ------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(90)
@pytest.mark.parametrize("form", ["json", "human"])
async def test_a_servers_log_has_a_line_per_request_and_no_content(upstream: ScriptedUpstream, start: Start, form: str) -> None:
    front = await start("serve", server__log_format=form).is_ready()
    upstream.stream(*HELLO)
    created = await front.ours.client.with_options(api_key=SECRET).responses.create(model="tiny", input=PROMPT)
    await front.ours.http.get("/v1/unknown?q=confidential")
    await front.ours.http.post("/v1/responses?q=confidential", json={"model": PROMPT, "input": PROMPT, "tools": 7})
    await front.logged("GET * 404")  # the line may be written after the answer
    log = await front.logged(" 400 ")
    for private in (PROMPT, SECRET, "confidential"):
        assert private not in log
    assert log.count("POST /v1/responses 200") == log.count(created.id) == 1
    assert log.count("GET * 404") == 1
    if form == "json":
        lines = [json.loads(line) for line in log.splitlines()]
        assert [line["response"] for line in lines if line.get("status") == 200] == [created.id]


@pytest.mark.timeout(90)
async def test_a_refusal_before_the_route_is_logged_and_measured_with_its_route(start: Start) -> None:
    front = await start("serve", auth__api_keys="alice:sha256:" + "0" * 64, upstream__api_key="key").is_ready()
    for method, path in (
        ("POST", "/v1/responses/"),
        ("POST", "/v1/responses/compact%0A"),  # Starlette's router ignores a line feed at the end
        ("DELETE", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/a/b"),
    ):
        assert (await front.ours.http.request(method, path)).status_code == 401
    log = await front.logged("GET - 401")
    lines = [json.loads(line) for line in log.splitlines() if "responses_mw.access" in line]
    assert [(line["method"], line["route"]) for line in lines] == [
        ("POST", "/v1/responses"),
        ("POST", "/v1/responses/compact"),
        ("DELETE", "/v1/responses/{response_id}"),
        ("GET", "-"),
    ]
    metrics = (await front.admin.http.get("/metrics")).text
    assert 'http_route="/v1/responses/{response_id}"' in metrics


@pytest.mark.timeout(90)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_time_until_the_first_chunk_is_logged(upstream: ScriptedUpstream, start: Start, stream: bool) -> None:
    front = await start("serve").is_ready()
    go, held = Signal(), 0.05
    # The stream is also held after its first chunk, which must not count.
    answer = upstream.stream(text("Hel"), go, text("lo"), finish()) if stream else upstream.stream(go, *HELLO)
    answer.before = before = Signal()
    asking = asyncio.create_task(front.ours.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "stream": stream}))
    for signal in (before, go):
        await answer.asked.wait()
        await asyncio.sleep(held)  # a lower bound, however busy the machine is
        signal.set()
    assert (await asking).status_code == 200
    line = json.loads((await front.logged("POST /v1/responses 200")).splitlines()[-1])
    assert (held if stream else 2 * held) <= line["first_token"] <= line["seconds"]
