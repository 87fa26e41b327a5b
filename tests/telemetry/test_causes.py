"""A client's mistake is logged at level info with its cause, and fires no alert. Other failures do."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from responses_mw import create_app
from responses_mw.errors import APIError, cause_of, cause_of_code
from responses_mw.ids import RunIds
from responses_mw.state.errors import Damaged, Missing, OverQuota, StateUnavailable
from responses_mw.telemetry.metrics import UPSTREAM_UP
from responses_mw.upstream.errors import as_response_error, from_frame, from_status
from tests.support.alerts import Samples, assert_fires, assert_silent, scrape
from tests.support.configured import make_settings
from tests.support.scripted import HELLO, error, json_answer, text
from tests.support.servers import lifespan

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve

QUESTION = {"model": "tiny", "input": "hi"}
FOREIGN = {"type": "mcp", "server_label": "mine", "server_url": "http://127.0.0.1:1/mcp"}


def answered(status: int, message: str) -> Callable[[ScriptedUpstream], object]:
    return lambda upstream: upstream.whole(error(message, status), status)


def in_stream(**members: Any) -> Callable[[ScriptedUpstream], object]:
    return lambda upstream: upstream.stream(text("Hel"), {"error": {"message": "no", **members}}, done=False)


def nothing(_: ScriptedUpstream) -> None:
    pass


KEY = {"authorization": "Bearer mine"}
MISTAKES: dict[str, tuple[Callable[[ScriptedUpstream], object], dict[str, Any], dict[str, str]]] = {
    "unknown model": (answered(404, "The model `x` does not exist."), QUESTION, {}),
    "too long prompt": (answered(400, "This model's maximum context length is 5 tokens."), QUESTION, {}),
    "wrong key at the upstream": (answered(401, "Unauthorized"), QUESTION, KEY),
    "content filter": (answered(400, "The prompt triggered the content filter."), QUESTION, {}),
    "limit of the caller's own key": (answered(429, "Rate limit reached"), QUESTION, KEY),
    "quota of the caller's own key": (answered(402, "Payment required"), QUESTION, KEY),
    "streamed unknown model": (answered(404, "The model `x` does not exist."), {**QUESTION, "stream": True}, {}),
    "invalid within the stream": (in_stream(code=400), {**QUESTION, "stream": True}, {}),
    "invalid value": (nothing, {**QUESTION, "temperature": "hot"}, {}),
    "unknown previous response": (nothing, {**QUESTION, "previous_response_id": RunIds().response}, {}),
    "own MCP server": (nothing, {**QUESTION, "tools": [FOREIGN]}, {}),
    "unknown MCP server": (nothing, {**QUESTION, "tools": [{"type": "mcp", "server_label": "none"}]}, {}),
}


async def observed(
    serve: Serve,
    upstream: ScriptedUpstream,
    redis_url: str,
    work: Callable[[httpx.AsyncClient], Awaitable[object]],
    **settings: Any,
) -> tuple[Samples, Samples]:
    """Return the metrics before and after `work`."""
    app = create_app(
        make_settings(upstream__url=serve(upstream), redis__url=redis_url, upstream__overload_timeout=0, **settings)
    )
    async with lifespan(app), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", timeout=60) as http:
        UPSTREAM_UP.set(1, {"upstream": "default"})
        before = scrape()
        await work(http)
        return before, scrape()


def facts(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(one)["facts"] for one in caplog.records if one.name == "responses_mw.access"]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings and errors, except those about the settings at startup."""
    about_startup = ("responses_mw.state.store", "responses_mw.crypto")
    return [one.getMessage() for one in caplog.records if one.levelno > logging.INFO and one.name not in about_startup]


@pytest.mark.parametrize("name", MISTAKES)
async def test_an_error_caused_by_a_client_is_not_logged_as_a_warning(
    name: str, serve: Serve, upstream: ScriptedUpstream, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    script, body, headers = MISTAKES[name]

    async def work(http: httpx.AsyncClient) -> None:
        for _ in range(10):
            script(upstream)
            await http.post("/v1/responses", json=body, headers=headers)

    with caplog.at_level(logging.INFO, "responses_mw"):
        before, after = await observed(serve, upstream, redis_url, work, tools__allow_private_urls=True)
    assert warnings(caplog) == []
    assert [one["cause"] for one in facts(caplog)] == ["client"] * 10
    assert_silent(before, after)


async def test_other_client_errors_over_http_are_not_logged_as_warnings(
    serve: Serve, upstream: ScriptedUpstream, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        for _ in range(10):
            await http.post("/v1/responses", content=b"{not json")
            await http.get(f"/v1/responses/{RunIds().response}")
            await http.put("/v1/responses")
            await http.get("/v1/responses/x/y/z")
            upstream.queue(json_answer(error("no such model", 404), 404))
            await http.post("/v1/chat/completions", json={"model": "x"})

    with caplog.at_level(logging.INFO, "responses_mw"):
        before, after = await observed(serve, upstream, redis_url, work)
    assert warnings(caplog) == []
    assert [one["cause"] for one in facts(caplog)] == ["client"] * 50
    assert_silent(before, after)


async def test_requests_over_a_limit_are_not_logged_as_warnings(
    serve: Serve, upstream: ScriptedUpstream, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        for _ in range(10):
            upstream.whole({"choices": []}, 400)
            await http.post("/v1/responses", json=QUESTION)

    with caplog.at_level(logging.INFO, "responses_mw"):
        before, after = await observed(serve, upstream, redis_url, work, limits__requests_per_minute=2)
    assert [one["error_code"] for one in facts(caplog)].count("rate_limit_exceeded") >= 8
    assert warnings(caplog) == []
    assert_silent(before, after)


AUTO = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
NAMED = 'tool_choice="required" requires --tool-call-parser to be set'
TEMPLATE = "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template if the"
FAULTS: dict[str, tuple[Callable[[ScriptedUpstream], object], dict[str, Any], str, str]] = {
    "upstream 500": (answered(500, "out of memory"), {}, "upstream", "ResponsesUpstreamFailing"),
    "no such path": (answered(404, "Not Found"), {}, "upstream", "ResponsesUpstreamFailing"),
    "overload": (answered(429, "busy"), {}, "upstream", "ResponsesUpstreamFailing"),
    "cut stream": (
        lambda upstream: upstream.stream(*HELLO[:2], done=False),
        {"stream": True},
        "upstream",
        "ResponsesUpstreamFailing",
    ),
    "no tool parser": (answered(400, AUTO), {}, "upstream", "ResponsesUpstreamFailing"),
    "no tool parser in a stream": (answered(400, NAMED), {"stream": True}, "upstream", "ResponsesUpstreamFailing"),
    "no chat template": (answered(400, f"{TEMPLATE} tokenizer does not define one."), {}, "upstream", "ResponsesFailing"),
    "no jinja": (answered(500, "tools param requires --jinja flag"), {}, "upstream", "ResponsesFailing"),
    "wrong key of the operator": (answered(401, "Unauthorized"), {}, "server", "ResponsesFailing"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_server_fault_among_many_client_errors_is_a_warning_and_fires_alerts(
    name: str, serve: Serve, upstream: ScriptedUpstream, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    script, body, cause, alert = FAULTS[name]
    settings = {"upstream__api_key": "wrong"} if cause == "server" else {}

    async def work(http: httpx.AsyncClient) -> None:
        for _ in range(50):
            await http.post("/v1/responses", json={**QUESTION, "temperature": "hot"})
            answered(400, "This model's maximum context length is 5 tokens.")(upstream)
            await http.post("/v1/responses", json=QUESTION)
        caplog.clear()
        script(upstream)
        await http.post("/v1/responses", json={**QUESTION, **body})

    before, after = await observed(serve, upstream, redis_url, work, **settings)
    [warning] = [one for one in caplog.records if one.name == "responses_mw.runs"]
    told = vars(warning)["facts"]
    assert (warning.levelno, told["cause"]) == (logging.WARNING, cause)
    assert told["owner"]
    assert told["remedy"]
    assert_fires(alert, before, after)
    assert_fires("ResponsesFailing", before, after)


@pytest.mark.parametrize(
    ("status", "options", "cause"),
    [
        (400, {}, "client"),
        (401, {}, "client"),
        (401, {"own_key": True}, "server"),
        (402, {"own_key": True, "callers_key": True}, "upstream"),
        (402, {"callers_key": True}, "client"),
        (403, {}, "client"),
        (403, {"own_key": True}, "server"),
        (405, {}, "upstream"),
        (408, {}, "upstream"),
        (413, {}, "client"),
        (422, {}, "client"),
        (429, {}, "upstream"),
        (429, {"callers_key": True}, "client"),
        (429, {"own_key": True, "callers_key": True}, "upstream"),
        (302, {}, "upstream"),
        (500, {}, "upstream"),
        (501, {}, "client"),
        (503, {}, "upstream"),
    ],
)
def test_the_status_of_the_upstream_determines_the_cause(status: int, options: dict[str, bool], cause: str) -> None:
    assert from_status(status, b"", httpx.Headers(), **options).cause == cause


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        (AUTO, "--enable-auto-tool-choice"),
        (NAMED, "--tool-call-parser"),
        ("tool_choice=function={'name': 'f'} requires --tool-call-parser to be set", "--tool-call-parser"),
        (f"{TEMPLATE} tokenizer does not define one.", "--chat-template"),
        (f"{TEMPLATE} tokenizer does not define one. None", "--chat-template"),
        ("tools param requires --jinja flag", "--jinja"),
    ],
)
def test_an_option_that_the_upstream_lacks_is_reported(message: str, remedy: str) -> None:
    error = from_status(400, json.dumps({"error": {"message": message}}).encode(), httpx.Headers())
    assert (error.status, error.cause) == (400, "upstream")
    assert remedy in error.remedy


@pytest.mark.parametrize("message", [AUTO, NAMED, TEMPLATE, "tools param requires --jinja flag"])
def test_a_client_cannot_pretend_that_the_upstream_lacks_an_option(message: str) -> None:
    quoted = json.dumps({"error": {"message": f"The model `{message}` does not support tools."}}).encode()
    error = from_status(400, quoted, httpx.Headers())
    assert (error.cause, error.remedy) == ("client", "")


def test_an_error_in_a_stream_has_a_cause() -> None:
    assert from_frame({"error": {"message": "no", "code": 400}}).cause == "client"
    assert from_frame({"error": {"message": "no", "type": "invalid_request_error"}}).cause == "client"
    assert from_frame({"error": {"message": "no", "code": 500}}).cause == "upstream"
    assert from_frame({"error": "CUDA error"}).cause == "upstream"


def test_each_error_has_a_cause() -> None:
    causes = {kind: kind.cause for kind in (Missing, OverQuota, StateUnavailable, Damaged)}
    assert list(causes.values()) == ["client", "client", "server", "server"]
    assert cause_of(ValueError()) == "server"
    assert cause_of(APIError("bug")) == "server"
    shown = as_response_error(from_status(400, b'{"message": "maximum context length"}', httpx.Headers()))
    assert cause_of_code(shown["code"]) == "client"
    assert cause_of_code("server_error") == "upstream"
