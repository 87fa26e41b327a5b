"""What acts for the operator: other spellings of our paths, headers and fields that steer the upstream, and redirects."""

from __future__ import annotations

import gzip
import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from responses_mw.asgi.spellings import OurPaths
from responses_mw.settings.values import ACTING_HEADERS, ROUTING_HEADERS
from tests.support.recording import RecordingUpstream
from tests.support.scripted import HELLO, Signal, json_answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.types import Receive, Scope, Send

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours

    StartAt = Callable[..., Ours]

KEYS = {"auth__api_keys": [f"alice:sha256:{sha256(b'k').hexdigest()}"], "upstream__api_key": "the operator's"}
BEARER = {"authorization": "Bearer k"}
BODY = {"model": "tiny", "input": "Hi"}
CHOSEN = "openai-project"

OTHER_SPELLINGS = [
    "//v1/responses",
    "/v1//responses",
    "/./v1/responses",
    "/v1/x/../responses",
    "/v1/x/%2e%2e/responses/",
    "/v1/Responses",
    "/V1/responses",
    "/v1/responses;x",
    "/v1;x/responses/resp_1",
    "/v1/responses%3bx",
    "/v1/responses%20",
    "/v1/responses.",
    "/v1%5cresponses",
    "/v1\\responses",
    "/v1%252fresponses",
    "/%25761/responses",
    "/v1/%2572esponses",
    "/v1/CONVERSATIONS/conv_1",
]
OTHER_PATHS = [
    "/v1/models",
    "/v1/responses_x",
    "/v1/chat/responses",
    "/v1/v1/responses",
    "/responses",
    "/x%2fy",
    "/v1/models/a%20b",
]


@pytest.fixture
async def recording() -> AsyncIterator[RecordingUpstream]:
    upstream = RecordingUpstream()
    await upstream.start()
    yield upstream
    await upstream.stop()


async def send(ours: Ours, path: str, method: str = "GET") -> httpx.Response:
    url = httpx.URL(ours.url).copy_with(raw_path=b"/x")
    request = httpx.Request(method, url, extensions={"target": path.encode()}, content=b"" if method == "POST" else None)
    return await ours.http.send(request)


# -- paths ----------------------------------------------------------------------------------------------------------------


async def test_other_spellings_of_our_paths_do_not_reach_the_upstream(start_at: StartAt, recording: RecordingUpstream) -> None:
    ours = start_at("proxy", upstream=recording.url, upstream__dialect="openai")
    for path in OTHER_SPELLINGS:
        for method in ("GET", "POST"):
            answer = await send(ours, path, method)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url"), path
    assert recording.requests == []
    for path in OTHER_PATHS:
        assert (await send(ours, path)).status_code == 200, path
    assert [seen.target.decode() for seen in recording.requests] == OTHER_PATHS


def test_our_paths_below_a_base_path_have_other_spellings_too() -> None:
    paths = OurPaths()
    assert paths.has_other_spelling("/v1/responses/%2e%2e/responses")
    assert not paths.has_other_spelling("/v1/responses/../models")
    assert not paths.has_other_spelling("")


def test_the_paths_of_files_are_ours_only_if_we_serve_files() -> None:
    for path in ("/v1/files", "/v1/files/file-1/content", "/v1/uploads/upload_1/parts", "/v1/vector_stores/vs_1/files"):
        assert path in OurPaths(files=True)
        assert path not in OurPaths()
    assert "/v1/filesystem" not in OurPaths(files=True)
    assert OurPaths(files=True).has_other_spelling("/v1/Files")


# -- headers ----------------------------------------------------------------------------------------------------------------


async def passed_headers(ours: Ours, recording: RecordingUpstream) -> set[str]:
    recording.forget()
    asked = dict.fromkeys(ROUTING_HEADERS | ACTING_HEADERS | {"x_http_method_override", "x-session-id"}, "x")
    assert (await ours.http.post("/v1/embeddings", headers=BEARER | asked, json={})).status_code == 200
    return {name.decode().lower() for name, _ in recording.requests[-1].fields} & asked.keys()


async def test_headers_that_act_for_the_operator_do_not_pass_through(start_at: StartAt, recording: RecordingUpstream) -> None:
    to_recording: dict[str, Any] = {"upstream": recording.url, "upstream__dialect": "openai"}
    ours = start_at("proxy", **to_recording, **KEYS)
    assert await passed_headers(ours, recording) == {"x-session-id"}
    ours = start_at("proxy", **to_recording, **KEYS, upstream__forward_headers=[CHOSEN, "x-http-method"])
    assert await passed_headers(ours, recording) == {"x-session-id", CHOSEN, "x-http-method"}
    ours = start_at("proxy", **to_recording, auth__api_keys=KEYS["auth__api_keys"])
    assert await passed_headers(ours, recording) == {"x-session-id"} | ACTING_HEADERS
    ours = start_at("proxy", **to_recording)
    assert len(await passed_headers(ours, recording)) == len(ROUTING_HEADERS | ACTING_HEADERS) + 2


@pytest.mark.parametrize(
    ("settings", "forwarded"),
    [
        ({"upstream__api_key": "the operator's"}, {"x-session-id"}),
        ({"upstream__headers": {"api-key": "the operator's"}}, {"x-session-id"}),
        ({"upstream__api_key": "the operator's", "upstream__forward_headers": [CHOSEN]}, {CHOSEN}),
        ({}, {"x-session-id"} | ACTING_HEADERS),
    ],
    ids=["api_key", "headers", "chosen", "the caller's own"],
)
async def test_headers_that_act_for_the_operator_are_forwarded_only_if_the_operator_names_them(
    start_at: StartAt, upstream: ScriptedUpstream, settings: dict[str, Any], forwarded: set[str]
) -> None:
    ours = start_at("proxy", **settings)
    upstream.stream(*HELLO)
    headers = dict.fromkeys((*ACTING_HEADERS, "x-session-id"), "x")
    assert (await ours.http.post("/v1/responses", json={**BODY, "stream": True}, headers=headers)).status_code == 200
    assert upstream.requests[0].headers.keys() & headers.keys() == forwarded


# -- fields -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field", ["priority", "kv_transfer_params", "vllm_xargs", "bootstrap_host", "api_base", "Keep_Alive", "bootſtrap_host"]
)
async def test_a_field_that_steers_the_upstream_is_a_400_with_the_operators_key(
    start_at: StartAt, upstream: ScriptedUpstream, field: str
) -> None:
    ours = start_at("proxy", upstream__api_key="the operator's")
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        refused = await ours.http.post(path, json={**BODY, field: {}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert "upstream.allowed_fields" in refused.json()["error"]["message"]
    assert upstream.requests == []
    upstream.stream(*HELLO)
    assert (await ours.http.post("/v1/responses", json={**BODY, "stream": True, field: None})).status_code == 200


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"upstream__api_key": "the operator's", "upstream__allowed_fields": ["Priority"]},
        {"upstream__api_key": "the operator's", "upstream__allowed_fields": ["*"]},
    ],
    ids=["the caller's own", "listed", "all"],
)
async def test_a_field_that_steers_the_upstream_is_forwarded_if_it_is_allowed(
    start_at: StartAt, upstream: ScriptedUpstream, settings: dict[str, Any]
) -> None:
    ours = start_at("proxy", **settings)
    upstream.stream(*HELLO)
    assert (await ours.http.post("/v1/responses", json={**BODY, "stream": True, "priority": 5})).status_code == 200
    assert upstream.requests[0].json["priority"] == 5


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
STEERED = json.dumps({**CHAT, "priority": 5}).encode()
STEERED_BODIES = {
    "plain": (STEERED, {}),
    "another type": (STEERED, {"content-type": "multipart/form-data; boundary=x"}),
    "after blanks": (b" \n" * 1000 + STEERED, {}),
    "after many blanks": (b" " * 200_000 + STEERED, {}),
    "compressed": (gzip.compress(STEERED), {"content-encoding": "gzip"}),
    "escaped": (STEERED.replace(b"priority", b"\\u0070riority"), {}),
    "capitalized": (STEERED.replace(b"priority", b"Priority"), {}),
    "at the end of a large body": (json.dumps({"messages": "x" * 1_000_000, "priority": 5}).encode(), {}),
}
UNREADABLE_BODIES = {
    "a byte order mark": b"\xef\xbb\xbf" + STEERED,
    "UTF-16": STEERED.decode().encode("utf-16"),
    "UTF-32": STEERED.decode().encode("utf-32-be"),
    "not a number": STEERED.replace(b"5", b"NaN"),
}


def posted(recording: RecordingUpstream) -> list[bytes]:
    return [seen.body for seen in recording.requests if seen.method == b"POST"]


@pytest.mark.parametrize("name", STEERED_BODIES)
async def test_a_chat_that_steers_the_upstream_does_not_pass_through(
    start_at: StartAt, recording: RecordingUpstream, name: str
) -> None:
    body, headers = STEERED_BODIES[name]
    ours = start_at("proxy", upstream=recording.url, upstream__dialect="openai", **KEYS)
    refused = await ours.http.post("/v1/chat/completions", content=body, headers=BEARER | headers)
    assert (refused.status_code, refused.json()["error"]["param"].lower()) == (400, "priority")
    assert "upstream.allowed_fields" in refused.json()["error"]["message"]
    assert posted(recording) == []


@pytest.mark.parametrize("name", UNREADABLE_BODIES)
async def test_a_chat_that_only_some_servers_can_read_does_not_pass_through(
    start_at: StartAt, recording: RecordingUpstream, name: str
) -> None:
    ours = start_at("proxy", upstream=recording.url, upstream__dialect="openai", **KEYS)
    refused = await ours.http.post("/v1/chat/completions", content=UNREADABLE_BODIES[name], headers=BEARER)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_json")
    assert posted(recording) == []


PASSED_BODIES = {
    "chat": json.dumps({**CHAT, "priority": None, "other": {"priority": 5}}, indent=3).encode(),
    "large chat": json.dumps({"messages": "x" * 1_000_000}).encode(),
    "form": b'--x\r\ncontent-disposition: form-data; name="priority"\r\n\r\n5\r\n--x--\r\n',
    "list": b'[{"priority": 5}]',
    "binary": bytes(range(256)) * 100,
    "blank": b"  ",
    "empty": b"",
}


@pytest.mark.parametrize("name", PASSED_BODIES)
async def test_the_bytes_of_other_bodies_pass_through_unchanged(
    start_at: StartAt, recording: RecordingUpstream, name: str
) -> None:
    ours = start_at("proxy", upstream=recording.url, upstream__dialect="openai", **KEYS)
    assert (await ours.http.post("/v1/x", content=PASSED_BODIES[name], headers=BEARER)).status_code == 200
    assert posted(recording) == [PASSED_BODIES[name]]


@pytest.mark.parametrize(
    "settings", [{**KEYS, "upstream__allowed_fields": ["priority"]}, {"auth__api_keys": KEYS["auth__api_keys"]}, {}]
)
async def test_a_chat_may_steer_the_upstream_if_the_operator_allows_it_or_sends_no_key(
    start_at: StartAt, recording: RecordingUpstream, settings: dict[str, Any]
) -> None:
    ours = start_at("proxy", upstream=recording.url, upstream__dialect="openai", **settings)
    assert (await ours.http.post("/v1/chat/completions", content=STEERED, headers=BEARER)).status_code == 200
    assert posted(recording) == [STEERED]


async def test_a_body_that_is_no_object_is_forwarded_as_it_arrives(start_at: StartAt, upstream: ScriptedUpstream) -> None:
    """Only objects are read before they are forwarded."""
    arrived = Signal()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"--x"
        await arrived.wait()
        yield b"--x--"

    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == "/v1/batches":
            assert (await receive())["body"] == b"--x"
            arrived.set()
        await upstream(scope, receive, send)

    ours = start_at("proxy", upstream=page, **KEYS)
    upstream.pages["/v1/batches"] = {}
    assert (await ours.http.post("/v1/batches", content=pieces(), headers=BEARER)).status_code == 200


# -- redirects --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("{upstream}/base/v1/models?a=b#c", "/llm/v1/models?a=b#c"),
        ("{upstream}/base", "/llm"),
        ("https://127.0.0.1:8443/base/x", "/llm/x"),
        ("//127.0.0.1/base//evil.example", "/llm//evil.example"),
        ("/base/v1/models", "/llm/v1/models"),
        ("models/", "models/"),
        ("?page=2", "?page=2"),
        ("https://example.com/file", "https://example.com/file"),
        ("{upstream}/other", None),
        ("/other", None),
        ("/basement", None),
        ("http://[", None),
    ],
)
async def test_a_redirect_of_the_upstream_does_not_reveal_its_address(
    start_at: StartAt, serve: Callable[..., str], upstream: ScriptedUpstream, location: str, expected: str | None
) -> None:
    url = serve(upstream)
    upstream.pages["/base/v1/moved"] = json_answer({}, 307, {"location": location.format(upstream=url)})
    ours = start_at("proxy", upstream=f"{url}/base", upstream__dialect="vllm", server__base_path="/llm")
    answer = await ours.http.get("/llm/v1/moved")
    assert answer.status_code == 307
    assert answer.headers.get("location") == expected


async def test_a_redirect_without_base_paths_cannot_become_one_to_another_host(
    start_at: StartAt, serve: Callable[..., str], upstream: ScriptedUpstream
) -> None:
    url = serve(upstream)
    upstream.pages["/moved"] = json_answer({}, 307, {"location": f"{url}//evil.example/x"})
    ours = start_at("proxy", upstream=url, upstream__dialect="vllm")
    assert (await ours.http.get("/moved")).headers["location"] == "/evil.example/x"
