"""No secret of the settings or of a caller is repeated, whoever sends it back."""

from __future__ import annotations

import base64
import json
import logging
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, TextContent
from pydantic import SecretStr

from responses_mw.errors import UpstreamError
from responses_mw.redaction import MARK, Redactor, activate, credentials_in, protect, redacted, redacted_values
from responses_mw.settings.groups import RedisSettings
from responses_mw.telemetry.setup import HumanFormatter, JSONFormatter
from responses_mw.tools import cut
from tests.support.configured import make_settings
from tests.support.scripted import HELLO, call, error, finish, json_answer, play, read_body, text
from tests.support.scripted_responses import ScriptedResponses, answer, item, response
from tests.support.search_servers import SEARXNG, SearchServer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Receive, Scope, Send

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve, Start

SECRETS = {
    "upstream.api_key": "sk-operator/1+a=b",
    "auth.secret_keys": "k" * 20 + "-the-encryption-key-of-all-replicas",
    "cache.embedding_api_key": "emb-0123456789",
    "tools.sandbox_token": "sandbox token with spaces",
    "search.api_key": "tvly-0123456789",
    "mcp authorization": "mcp-authorization-token",
    "mcp header": "mcp-header-value",
    "caller": "sk-caller-0123456789",
    "caller's mcp authorization": "callers-mcp-authorization",
    "caller's mcp header": "callers-mcp-header",
}


def forms(secret: str) -> list[str]:
    """Return the secret as servers repeat it."""
    basic = [base64.b64encode(f"{user}:{secret}".encode()).decode() for user in ("", "a", "ab", "abc")]
    return [secret, quote(secret, safe=""), json.dumps(secret)[1:-1], *basic]


def repeated(names: Iterable[str]) -> str:
    return " | ".join(form for name in names for form in forms(SECRETS[name]))


EVERYTHING = repeated(SECRETS)
WITHOUT_TOOLS = repeated(name for name in SECRETS if not name.startswith("caller's mcp"))


def leaked(shown: str) -> set[str]:
    """Return the names of the secrets that `shown` contains in any form."""
    return {name for name, secret in SECRETS.items() if any(form in shown for form in forms(secret))}


def repeating() -> MCPServer[None]:
    server = MCPServer("repeating", log_level="CRITICAL")

    @server.tool(structured_output=False, description=EVERYTHING)
    def repeat() -> str:
        return EVERYTHING

    @server.tool(structured_output=False)
    def fail() -> str:
        raise ToolError(EVERYTHING)

    @server.tool(structured_output=False)
    def python(code: str) -> CallToolResult:
        """The sandbox's tool."""
        if code == "fail":
            raise ToolError(EVERYTHING)
        outcome = {"container_id": EVERYTHING, "ended": EVERYTHING}
        return CallToolResult(content=[TextContent(type="text", text=EVERYTHING)], structured_content=outcome)

    return server


async def embeddings(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await read_body(receive)
        await play(json_answer({"error": WITHOUT_TOOLS}, 500), receive, send)


def settings_of(serve: Serve) -> dict[str, Any]:
    mcp = serve(repeating().streamable_http_app(stateless_http=True)) + "/mcp"
    server = {"require_approval": "never", "authorization": SECRETS["mcp authorization"]}
    return {
        "upstream__api_key": SECRETS["upstream.api_key"],
        "upstream__overload_timeout": 0,
        "auth__secret_keys": [SECRETS["auth.secret_keys"]],
        "cache__embedding_api_key": SECRETS["cache.embedding_api_key"],
        "cache__embedding_model": "m",
        "cache__embedding_url": serve(embeddings, lifespan="off"),
        "tools__sandbox_url": mcp,
        "tools__sandbox_token": SECRETS["tools.sandbox_token"],
        "tools__mcp_servers": {"repeating": {"url": mcp, "headers": {"x-key": SECRETS["mcp header"]}, **server}},
        "tools__allow_private_urls": True,
        "search__provider": "searxng",
        "search__url": serve(SearchServer({**SEARXNG, "results": [{"title": EVERYTHING, "url": "http://x", "content": "t"}]})),
        "search__api_key": SECRETS["search.api_key"],
    }


def runs_of(upstream: ScriptedUpstream, mcp: str) -> list[tuple[str, dict[str, Any]]]:
    """Script the upstream, and return for each party a request that makes it repeat the secrets."""
    theirs = {"type": "mcp", "server_label": "theirs", "server_url": mcp, "require_approval": "never"}
    theirs["authorization"] = SECRETS["caller's mcp authorization"]
    other = {**theirs, "headers": {"x-key": SECRETS["caller's mcp header"]}, "server_label": "other"}
    own = {"type": "mcp", "server_label": "repeating"}
    tools = {"tools": [own, theirs, other]}
    runs: list[tuple[str, dict[str, Any]]] = []
    for body in ({}, {"stream": True}, {"background": True}, tools, {**tools, "background": True}):
        said = EVERYTHING if "tools" in body else WITHOUT_TOOLS
        for status in (400, 401, 500):
            upstream.whole(error(said, status), status)
            runs.append((f"upstream {status}", body))
        upstream.queue(json_answer({"detail": [said], "code": said, "param": said}, 422))
        runs.append(("upstream 422", body))
        upstream.stream(text("Hel"), {"error": {"message": said, "code": said}}, done=False)
        runs.append(("upstream stream", {**body, "stream": True}))
    for name in ("repeat", "fail"):
        upstream.stream(call("{}", name=name, call_id="c"), finish("tool_calls"))
        upstream.stream(*HELLO)
        runs.append((f"MCP {name}", {"tools": [own, other]}))
        upstream.stream(call("{}", name=name, call_id="c"), finish("tool_calls"))
        upstream.stream(*HELLO)
        runs.append((f"caller's MCP {name}", {"tools": [other], "stream": True}))
    for code in ("run", "fail"):
        upstream.stream(call(json.dumps({"code": code}), name="python", call_id="c"), finish("tool_calls"))
        upstream.stream(*HELLO)
        interpreter = {"type": "code_interpreter", "container": {"type": "auto"}}
        outputs = ["code_interpreter_call.outputs"]
        runs.append((f"sandbox {code} repeat ", {"tools": [interpreter, other], "include": outputs, "stream": code == "run"}))
    upstream.stream(call('{"query": "x"}', name="web_search", call_id="c"), finish("tool_calls"))
    upstream.stream(*HELLO)
    runs.append(("search", {"tools": [{"type": "web_search"}, other]}))
    upstream.stream(*HELLO)
    runs.append(("embeddings", {"cache": "semantic"}))
    upstream.stream({**HELLO[0], "id": WITHOUT_TOOLS, "model": WITHOUT_TOOLS}, *HELLO[1:-1], finish(WITHOUT_TOOLS))
    runs.append(("names", {"stream": True}))
    return runs


# What an upstream with a Responses API repeats. The texts of its model are not among it.
ITEMS: dict[str, dict[str, Any]] = {
    "MCP result": {"type": "mcp_call", "server_label": "s", "name": EVERYTHING, "arguments": "{}", "output": EVERYTHING},
    "MCP error": {"type": "mcp_call", "name": "f", "arguments": "{}", "error": {"type": "http_error", "message": EVERYTHING}},
    "MCP list": {"type": "mcp_list_tools", "server_label": "s", "tools": [{"name": "f", "description": EVERYTHING}]},
    "MCP list error": {"type": "mcp_list_tools", "server_label": "s", "tools": [], "error": EVERYTHING},
    "search": {
        "type": "web_search_call",
        "action": {"type": "search", "sources": [{"url": EVERYTHING}]},
        "results": [{"title": EVERYTHING}],
    },
    "file search": {"type": "file_search_call", "queries": [], "results": [{"text": EVERYTHING}]},
    "code": {"type": "code_interpreter_call", "code": "1", "outputs": [{"type": "logs", "logs": EVERYTHING}]},
    "shell": {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": EVERYTHING, "stderr": EVERYTHING}]},
    "unknown": {"type": "made_up", "value": {EVERYTHING: [EVERYTHING]}},
    "message": item(detail=EVERYTHING),
    "call": {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "error": EVERYTHING},
    "annotation": item(
        content=[{"type": "output_text", "text": "x", "annotations": [{"type": "url_citation", "title": EVERYTHING}]}]
    ),
    "part": item(content=[{"type": "output_text", "text": "x", "annotations": [], "detail": EVERYTHING}]),
}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "incomplete": {"status": "incomplete", "incomplete_details": {"reason": EVERYTHING}},
    "failed": {"status": "failed", "error": {"code": EVERYTHING, "message": EVERYTHING}},
    "other member": {"made_up": {EVERYTHING: EVERYTHING}, "instructions": EVERYTHING},
    "tools": {"tools": [{"type": "function", "name": "f", "description": EVERYTHING}]},
    "usage": {"usage": {"input_tokens": 1, "output_tokens": 1, "cost": EVERYTHING}},
    "usage details": {"usage": {"input_tokens": 1, "output_tokens": 1, "input_tokens_details": {"cost": EVERYTHING}}},
}
EVENTS: tuple[dict[str, Any], ...] = (
    {"type": "response.mcp_call.failed", "error": {"message": EVERYTHING}},
    {"type": "response.mcp_list_tools.failed", "error": EVERYTHING},
    {"type": "response.shell_call_output_content.delta", "delta": {"stdout": EVERYTHING}},
    {"type": "response.code_interpreter_call_code.done", "code": "1", "error": EVERYTHING},
    {"type": "response.output_text.annotation.added", "annotation": {"title": EVERYTHING}},
    {"type": "response.content_part.added", "part": {"type": "output_text", "text": "", "detail": EVERYTHING}},
    {"type": "response.output_item.added", "item": item(content=[]), "detail": EVERYTHING},
)


def streams_of() -> list[tuple[str, list[dict[str, Any]]]]:
    """Return streams of an upstream with a Responses API in which it repeats the secrets."""
    streams: list[tuple[str, list[dict[str, Any]]]] = []
    for name, one in ITEMS.items():
        given = {"id": "x_theirs", "status": "completed", **one}
        added, done = ({"type": f"response.output_item.{step}", "output_index": 0, "item": given} for step in ("added", "done"))
        completed = {"type": "response.completed", "response": response(given)}
        streams += [(f"{name} {way}", [*events, completed]) for way, events in (("begun", [added, done]), ("done", [done]))]
        streams.append((f"{name} at the end", [completed]))
    for name, members in DOCUMENTS.items():
        streams.append((name, [*answer()[:-1], {"type": "response.completed", "response": response(item(), **members)}]))
    begun, end = answer()[:3], answer()[-1:]
    streams += [(event["type"], [*begun, {"item_id": "msg_theirs", "output_index": 0, **event}, *end]) for event in EVENTS]
    return streams


def dump(url: str) -> str:
    """Return all data in Redis."""
    with redis.Redis.from_url(url, socket_timeout=60) as client:
        read = {
            b"hash": client.hgetall,
            b"string": client.get,
            b"set": client.smembers,
            b"list": lambda key: client.lrange(key, 0, -1),
            b"zset": lambda key: client.zrange(key, 0, -1),
            b"stream": client.xrange,
        }
        return " ".join(repr(read[client.type(key)](key)) for key in client.keys("*"))


@pytest.mark.timeout(120)
async def test_secrets_sent_back_by_other_servers_are_not_repeated(
    start: Start, serve: Serve, upstream: ScriptedUpstream, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(serve)
    caplog.set_level(logging.DEBUG, "responses_mw")
    ours = start(redis__url=redis_url, **settings)
    headers = {"authorization": f"Bearer {SECRETS['caller']}"}
    shown: dict[str, str] = {}
    for number, (name, body) in enumerate(runs_of(upstream, settings["tools__sandbox_url"])):
        answer = await ours.http.post("/v1/responses", json={"model": "tiny", "input": "hi", **body}, headers=headers)
        if body.get("background") and not body.get("stream"):
            job = answer.json()["id"]
            while answer.json()["status"] in ("queued", "in_progress"):
                answer = await ours.http.get(f"/v1/responses/{job}", headers=headers)
        shown[f"{number} {name} {body}"] = answer.text
    assert {name: found for name, one in shown.items() if (found := leaked(one))} == {}
    assert [name for name, one in shown.items() if ("upstream 5" in name or " repeat " in name) and MARK not in one] == []
    assert leaked(dump(redis_url)) == set()
    assert leaked("\n".join(f"{one.getMessage()} {vars(one).get('facts')}" for one in caplog.records)) == set()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["streamed", "whole", "background"])
async def test_no_secret_is_repeated_by_an_upstream_with_a_responses_api(
    start: Start, serve: Serve, redis_url: str, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    upstream = ScriptedResponses()
    settings = settings_of(serve)
    caplog.set_level(logging.DEBUG, "responses_mw")
    ours = start(redis__url=redis_url, upstream=upstream, upstream__api="responses", **settings)
    headers = {"authorization": f"Bearer {SECRETS['caller']}"}
    theirs = {"type": "mcp", "server_label": "theirs", "server_url": settings["tools__sandbox_url"]}
    tools = [
        {**theirs, "authorization": SECRETS["caller's mcp authorization"]},
        {**theirs, "server_label": "other", "headers": {"x-key": SECRETS["caller's mcp header"]}},
    ]
    include = ["web_search_call.results", "web_search_call.action.sources", "code_interpreter_call.outputs"]
    body = {"model": "tiny", "input": "hi", "tools": tools, "include": include, "stream": way == "streamed"}
    shown: dict[str, str] = {}
    for name, events in [("nothing", answer()), *streams_of()]:
        if way == "whole":
            upstream.whole(events[-1]["response"])
        else:
            upstream.stream(*events, done=False)
        answered = await ours.http.post("/v1/responses", json={**body, "background": way == "background"}, headers=headers)
        shown[name] = answered.text
        if way == "background":
            url = f"/v1/responses/{answered.json()['id']}"
            shown[name] = (await ours.http.get(url, params={"stream": "true"}, headers=headers)).text
            shown[f"{name}, stored"] = (await ours.http.get(url, headers=headers)).text
    assert {name: found for name, one in shown.items() if (found := leaked(one))} == {}
    if way == "streamed":  # the echoed tools always contain marks
        expected = shown.pop("nothing").count(MARK)
        assert [name for name, one in shown.items() if one.count(MARK) <= expected] == []
    assert leaked(dump(redis_url)) == set()
    assert leaked("\n".join(f"{one.getMessage()} {vars(one).get('facts')}" for one in caplog.records)) == set()


def test_every_secret_setting_is_known() -> None:
    settings = make_settings(
        redis__url="redis://user:pass%2Fword@redis:6379/0",
        auth__secret_keys=[SECRETS["auth.secret_keys"]],
        upstream__api_key=SECRETS["upstream.api_key"],
        search__api_key=SECRETS["search.api_key"],
        tools__mcp_servers={
            "a": {"url": "https://mcp/x?api_key=in-a-query", "headers": {"authorization": "Bearer in-a-header"}}
        },
    )
    redactor = Redactor.of(settings)
    for secret in (
        "pass%2Fword",
        "pass/word",
        "in-a-query",
        "in-a-header",
        SECRETS["upstream.api_key"],
        SECRETS["search.api_key"],
    ):
        for form in forms(secret):
            assert redactor(f"no: {form}.") == f"no: {MARK}."


@given(st.text(min_size=8, max_size=40), st.text(max_size=5), st.text(max_size=5))
def test_a_secret_is_removed_in_every_form(secret: str, before: str, after: str) -> None:
    redactor = Redactor([secret])
    try:
        secret.encode()
    except UnicodeEncodeError:
        return
    for form in (secret, quote(secret, safe=""), json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]):
        assert form not in redactor(before + form + after).replace(MARK, "")
    encoded = base64.b64encode(f"{before}:{secret}{after}".encode()).decode()
    assert len(redactor(encoded).replace(MARK, "")) < 4


def test_other_texts_are_unchanged() -> None:
    redactor = Redactor(SECRETS.values())
    said = 'The model `tiny` does not exist. aGVsbG8gd29ybGQ= %2F {"a": 1}'
    assert redactor(said) == said
    assert Redactor(["short"])("a short text") == "a short text"


def test_credentials_are_found_in_headers() -> None:
    basic = base64.b64encode(b"user:basic-password").decode()
    headers = {"authorization": f"Basic {basic}", "x-key": "another-key", "traceparent": "00-0123456789"}
    found = set(credentials_in(headers))
    assert {"basic-password", basic, "another-key"} <= found
    assert "00-0123456789" not in found


def test_a_callers_secret_is_added_to_those_of_the_settings() -> None:
    activate(Redactor(["of-the-settings"]))
    protect(lambda: ["of-the-caller"])
    assert redacted("of-the-settings of-the-caller") == f"{MARK} {MARK}"
    assert redacted_values({"a": ["of-the-caller", 1, None]}) == {"a": [MARK, 1, None]}
    assert UpstreamError("of-the-caller", code="of-the-settings").body()["error"]["code"] == MARK
    activate(Redactor())


@pytest.mark.parametrize("form", [HumanFormatter, JSONFormatter])
def test_log_records_contain_no_secret(form: type[HumanFormatter | JSONFormatter]) -> None:
    formatter = form(with_messages=True, redactor=Redactor(["of-the-settings"]))
    fault = ValueError("of-the-settings")
    record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "of-the-settings", (), (ValueError, fault, None))
    assert "of-the-settings" not in formatter.format(record)


@pytest.mark.parametrize("before", [0, 70, 90, 95, 110, 40_000])
def test_a_truncated_text_does_not_end_with_the_beginning_of_a_secret(before: int) -> None:
    secret = "of-the-settings"
    activate(Redactor([secret]))
    shown = cut("." * before + secret * 20_000 + "." * 100, 100)
    assert secret[:2] not in shown.partition("\n")[0]
    activate(Redactor())


def test_settings_without_secrets_have_nothing_to_remove() -> None:
    assert Redactor.of(RedisSettings(url=SecretStr("redis://redis:6379/0")))("redis://redis:6379/1") == "redis://redis:6379/1"
