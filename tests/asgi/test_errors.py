"""Errors: status and OpenAI error in every case, and no upstream request for an invalid request."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import urlsplit

import httpx
import openai
import orjson
import pytest
from openai.types.responses import ResponseError

from responses_mw.errors import UpstreamError
from responses_mw.protocol.json_limits import MAX_DEPTH, MAX_ITEMS, MAX_TOOLS
from responses_mw.upstream.errors import ERROR_CODES, as_response_error, from_status
from tests.support.garbage import nothing_left
from tests.support.oracle import check, stream
from tests.support.scripted import HELLO, BrokenOff, Signal, completion, delta, error, frame, text

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

BODY = {"input": "Hi", "model": "tiny"}
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["json", "stream"])


def fault(response: httpx.Response, status: int) -> dict[str, Any]:
    """Check the form of an OpenAI error; return its members."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.json().keys() == {"error"}
    members: dict[str, Any] = response.json()["error"]
    assert members.keys() == {"message", "type", "param", "code"}
    assert isinstance(members["message"], str)
    assert members["message"]
    assert members["code"] is None or isinstance(members["code"], str)
    return members


# -- errors of the upstream -------------------------------------------------------------------------------------------------

UPSTREAM_ERRORS = [
    pytest.param(308, b"", 502, None, None, id="a redirect, which is not followed"),
    pytest.param(400, error("no", param="temperature"), 400, "temperature", None, id="vLLM"),
    pytest.param(400, error("no", param="messages"), 400, "input", None, id="a chat parameter becomes the Responses parameter"),
    pytest.param(401, {"error": "Unauthorized"}, 401, None, "invalid_api_key", id="invalid key, as a string"),
    pytest.param(403, error("forbidden", 403), 403, None, None, id="forbidden"),
    pytest.param(404, error("no such model", 404, param="model"), 404, "model", "model_not_found", id="unknown model"),
    pytest.param(422, {"error": "Input validation error", "error_type": "validation"}, 422, None, None, id="TGI"),
    pytest.param(429, error("slow down", 429), 429, None, "rate_limit_exceeded", id="rate limit"),
    pytest.param(500, error("engine died", 500), 502, None, None, id="internal error"),
    pytest.param(501, error("not implemented", 501), 400, None, None, id="not implemented"),
    pytest.param(502, b"<html>Bad gateway</html>", 502, None, None, id="HTML page of a proxy"),
    pytest.param(503, {"error": "The model is currently scaling"}, 503, None, None, id="unavailable"),
    pytest.param(504, b"", 504, None, None, id="status only"),
    pytest.param(400, {"object": "error", "message": "flat", "type": "BadRequest", "code": 400}, 400, None, None, id="SGLang"),
    pytest.param(
        400,
        {"error": {"code": 400, "message": "too long", "type": "exceed_context_size_error", "n_ctx": 5}},
        400,
        "input",
        "context_length_exceeded",
        id="llama.cpp: too long",
    ),
    pytest.param(404, {"detail": "Not Found"}, 404, None, None, id="FastAPI"),
    pytest.param(
        422, {"detail": [{"loc": ["body", "x"], "msg": "extra"}]}, 422, None, None, id="transformers: a list of faults"
    ),
    pytest.param(422, b"Failed to deserialize the JSON body", 422, None, None, id="TGI: plain text"),
    pytest.param(
        400,
        {"error": {"message": '{"error": {"message": "inner", "param": "top_p", "code": "invalid_value"}}', "code": None}},
        400,
        None,
        None,
        id="Bedrock: JSON within the message",
    ),
]


@STREAMED
@pytest.mark.parametrize(("status", "body", "expected", "param", "code"), UPSTREAM_ERRORS)
async def test_an_upstream_error_within_the_grace_sets_the_status(
    start: Start,
    upstream: ScriptedUpstream,
    streamed: bool,
    status: int,
    body: Any,
    expected: int,
    param: str | None,
    code: str | None,
) -> None:
    ours = start(upstream__status_grace=1 if status in (502, 503) else 60)  # these are retried within the grace
    for _ in range(40):
        upstream.whole(body, status)
    members = fault(await ours.http.post("/v1/responses", json={**BODY, "stream": streamed}), expected)
    assert (members["param"], members["code"]) == (param, code)


@pytest.mark.both_mounts
async def test_the_official_client_raises_the_right_exception(ours: Ours, upstream: ScriptedUpstream) -> None:
    expected: list[tuple[int, type[openai.APIStatusError]]] = [
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
        (404, openai.NotFoundError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
    ]
    for status, exception in expected:
        upstream.whole(error("told so", status), status)
        with pytest.raises(exception, match="told so"):
            await ours.client.responses.create(model="tiny", input="Hi")


@pytest.mark.both_mounts
async def test_a_rate_limit_error_has_the_upstreams_retry_after_and_ratelimit_headers(
    patient: Ours, upstream: ScriptedUpstream
) -> None:
    headers = {"retry-after": "7", "x-ratelimit-remaining-tokens": "0", "set-cookie": "a=b"}
    upstream.whole(error("slow down", 429), 429, headers=headers)
    response = await patient.http.post("/v1/responses", json={**BODY, "stream": True})
    assert fault(response, 429)["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "7"
    assert response.headers["x-ratelimit-remaining-tokens"] == "0"
    assert "set-cookie" not in response.headers
    assert len(upstream.requests) == 1


@pytest.mark.both_mounts
async def test_an_error_after_the_grace_is_a_failed_response(ours: Ours, upstream: ScriptedUpstream) -> None:
    late = Signal()
    upstream.whole(error("late", 400), 400, before=late)
    raw = b""
    async with ours.http.stream("POST", "/v1/responses", json={**BODY, "stream": True}) as response:
        async for data in response.aiter_raw():
            raw += data
            late.set()
    streamed = check(raw)
    assert streamed.terminal == "response.failed"
    assert streamed.response["error"]["message"] == "late"
    assert streamed.response["output"] == []


@pytest.mark.both_mounts
async def test_a_json_request_waits_for_an_error_beyond_the_grace(ours: Ours, upstream: ScriptedUpstream) -> None:
    late = Signal()
    upstream.whole(error("late", 429), 429, before=late)
    request = asyncio.create_task(ours.http.post("/v1/responses", json=BODY))
    await asyncio.sleep(0.3)
    late.set()
    fault(await request, 429)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(error("The engine prompt length 9 exceeds the max_model_len 5. Please reduce prompt."), id="vLLM"),
        pytest.param(error("longer than the model's context length (5 tokens)", object="error"), id="SGLang"),
        pytest.param({"error": "`inputs` tokens + `max_new_tokens` must be <= 5", "error_type": "validation"}, id="TGI"),
        pytest.param(error("n_ctx", type="exceed_context_size_error"), id="llama.cpp"),
        pytest.param({"error": {"message": "too long", "code": "context_length_exceeded"}}, id="OpenAI"),
    ],
)
def test_every_servers_error_for_a_long_prompt_is_context_length_exceeded(said: dict[str, Any]) -> None:
    fault = from_status(400, orjson.dumps(said), httpx.Headers())
    assert (fault.status, fault.code) == (400, "context_length_exceeded")
    assert as_response_error(fault)["code"] == "context_length_exceeded"


async def test_forwarded_unknown_fields_are_listed_in_a_header(ours: Ours, upstream: ScriptedUpstream) -> None:
    names = {"temprature": 0.5, "top_k": 5, "bad\r\nname: é": 1, "null": None}
    upstream.whole(completion({"content": "Hi"}))
    response = await ours.http.post("/v1/responses", json={**BODY, **names})
    assert response.headers["x-responses-forwarded"] == "bad__name___, temprature, top_k"
    assert upstream.requests[0].json["temprature"] == 0.5
    upstream.whole(completion({"content": "Hi"}))
    assert "x-responses-forwarded" not in (await ours.http.post("/v1/responses", json=BODY)).headers
    upstream.whole(completion({"content": "Hi"}))
    many = await ours.http.post("/v1/responses", json={**BODY, **{f"{n:03}{'x' * 500}": n for n in range(500)}})
    assert len(many.headers["x-responses-forwarded"]) < 1200
    assert many.headers["x-responses-forwarded"].endswith(", ...")


@pytest.mark.parametrize(("name", "hint"), [("temprature", " Did you mean 'temperature'?"), ("zzz", "")])
async def test_unknown_fields_can_be_refused(start: Start, upstream: ScriptedUpstream, name: str, hint: str) -> None:
    ours = start(server__unknown_fields="refuse")
    refused = fault(await ours.http.post("/v1/responses", json={**BODY, name: 0.5}), 400)
    assert (refused["param"], refused["code"]) == (name, "unknown_parameter")
    assert refused["message"] == f"Unknown parameter: '{name}'.{hint}"
    assert upstream.requests == []
    upstream.whole(completion({"content": "Hi"}))
    known = {"temperature": 0.5, "client_metadata": {}, "request_id": "r", "n": 1, "metadata": {}}
    assert (await ours.http.post("/v1/responses", json={**BODY, **known})).status_code == 200


TOO_LONG = error("The engine prompt length 9 exceeds the max_model_len 5. Please reduce prompt.")


async def test_a_stream_with_a_prompt_that_is_too_long_fails_with_context_length_exceeded(
    start: Start, upstream: ScriptedUpstream
) -> None:
    ours = start(upstream__status_grace=0)
    upstream.whole(TOO_LONG, 400)
    streamed = await stream(ours)
    assert (streamed.types[-1], streamed.response["error"]["code"]) == ("response.failed", "context_length_exceeded")


def test_error_codes_of_responses_are_those_of_the_openai_api() -> None:
    fault = from_status(400, orjson.dumps({"error": {"message": "no", "code": "invalid_base64"}}), httpx.Headers())
    assert fault.code == as_response_error(fault)["code"] == "invalid_base64_image"
    known = get_args(ResponseError.model_fields["code"].annotation)
    for status, code in ((400, "spells"), (401, None), (404, None), (429, None), (500, "spells"), (502, None)):
        fault = from_status(status, orjson.dumps({"error": {"message": "no", "code": code}}), httpx.Headers())
        assert as_response_error(fault)["code"] in known
    assert set(known) > ERROR_CODES


def test_an_unreachable_mcp_server_has_the_code_server_error() -> None:
    fault = UpstreamError("MCP server 'weather': it cannot be reached.", status=424, code="external_connector_error")
    assert as_response_error(fault)["code"] == "server_error"


def test_json_within_a_bedrock_message_is_decoded() -> None:
    inner = orjson.dumps({"error": {"message": "malformed input"}}).decode()
    assert from_status(400, orjson.dumps({"error": {"message": inner}}), httpx.Headers()).message == "malformed input"


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        pytest.param(error("bad grammar", 400), 400, id="vLLM"),
        pytest.param({"error": {"message": "too long", "http_status_code": 422}}, 422, id="TGI"),
        pytest.param({"error": {"message": "slow down", "code": "429"}}, 429, id="LiteLLM"),
        pytest.param({"error": {"message": "died"}}, 502, id="without a status"),
        pytest.param(b'error: {"code": 503, "message": "Loading model"}\n\n', 502, id="llama.cpp"),
    ],
)
async def test_an_error_in_the_first_frame_sets_the_status(
    patient: Ours, upstream: ScriptedUpstream, first: Any, expected: int
) -> None:
    upstream.stream(first)
    fault(await patient.http.post("/v1/responses", json={**BODY, "stream": True}), expected)


@STREAMED
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"<html>Hello</html>", id="not JSON"),
        pytest.param(b"[]", id="not an object"),
        pytest.param(b'{"count": 3}', id="not a completion"),
        pytest.param(b'{"choices": [{"message": {"content": "Hel', id="cut JSON"),
    ],
)
async def test_a_200_without_a_completion_is_a_502(
    patient: Ours, upstream: ScriptedUpstream, streamed: bool, answer: bytes
) -> None:
    upstream.whole(answer)
    fault(await patient.http.post("/v1/responses", json={**BODY, "stream": streamed}), 502)


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([text("Hel"), BrokenOff()], id="broken off"),
        pytest.param([text("Hel"), error("died", 500)], id="error frame"),
        pytest.param([b'{"choices": [', BrokenOff()], id="broken off within JSON"),
    ],
)
@pytest.mark.both_mounts
async def test_a_broken_stream_is_a_502_for_a_json_client(ours: Ours, upstream: ScriptedUpstream, pieces: list[Any]) -> None:
    upstream.stream(*pieces, done=False)
    fault(await ours.http.post("/v1/responses", json=BODY), 502)


async def test_an_aborted_completion_is_a_502_for_a_json_client(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": "Hel"}, "abort"))
    fault(await ours.http.post("/v1/responses", json=BODY), 502)


@STREAMED
@pytest.mark.parametrize("pieces", [[], [b": ping\n\n"], [b"data: null\n\n"]], ids=["nothing", "a comment", "null"])
async def test_a_stream_that_consists_only_of_done_is_an_error(
    patient: Ours, upstream: ScriptedUpstream, streamed: bool, pieces: list[Any]
) -> None:
    upstream.stream(*pieces)
    fault(await patient.http.post("/v1/responses", json={**BODY, "stream": streamed}), 502)


@STREAMED
@pytest.mark.parametrize(
    "piece",
    [b"event: error\n: no image\n\n", frame(error("no image", 500)), b'{"detail": "no image"}\n'],
    ids=["event", "frame", "bare"],
)
async def test_an_error_before_the_first_chunk_is_the_answer(
    patient: Ours, upstream: ScriptedUpstream, streamed: bool, piece: bytes
) -> None:
    upstream.stream(piece)
    members = fault(await patient.http.post("/v1/responses", json={**BODY, "stream": streamed}), 502)
    assert members["message"] == "no image"
    assert len(upstream.requests) == 1


async def test_an_answer_without_output_and_finish_reason_fails(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(delta(role="assistant", content=""))
    assert (await stream(ours)).terminal == "response.failed"
    upstream.whole({"choices": [{"index": 0, "message": {"content": None}, "finish_reason": None}]})
    fault(await ours.http.post("/v1/responses", json=BODY), 502)


async def test_a_200_with_an_error_object_is_an_error(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole({"error": {"message": "no", "code": 400}})
    assert fault(await ours.http.post("/v1/responses", json=BODY), 400)["message"] == "no"


@STREAMED
@pytest.mark.both_mounts
async def test_an_upstream_timeout_is_a_504(start: Start, upstream: ScriptedUpstream, streamed: bool) -> None:
    ours = start(upstream__timeout=0.5, upstream__status_grace=60)
    answer = upstream.stream(*HELLO, before=Signal())
    members = fault(await ours.http.post("/v1/responses", json={**BODY, "stream": streamed}), 504)
    assert members["code"] == "upstream_timeout"
    await answer.left.wait()


# -- invalid requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code"),
    [
        pytest.param(b"", "invalid_json", id="empty"),
        pytest.param(b"{", "invalid_json", id="cut JSON"),
        pytest.param(b'{"input": "\xff\xfe"}', "invalid_json", id="invalid UTF-8"),
        pytest.param(b'{"input": "\\ud800"}', "invalid_json", id="half a surrogate pair"),
        pytest.param(b"\xff\xfe{\x00}\x00", "invalid_json", id="UTF-16"),
        pytest.param(b"[]", "invalid_type", id="an array"),
        pytest.param(b'"Hi"', "invalid_type", id="a string"),
        pytest.param(b'{"input": NaN}', "invalid_json", id="NaN"),
        pytest.param(b'{"input": ' + b"[" * 100_000, "invalid_json", id="endless nesting"),
    ],
)
async def test_a_body_that_is_not_a_json_object_is_a_400(
    ours: Ours, upstream: ScriptedUpstream, body: bytes, code: str
) -> None:
    response = await ours.http.post("/v1/responses", content=body, headers={"content-type": "application/json"})
    assert fault(response, 400)["code"] == code
    assert upstream.requests == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({"model": "tiny"}, "input", id="no input"),
        pytest.param({"input": 5}, "input", id="wrong type of input"),
        pytest.param({"input": [{"type": "nonsense"}]}, "input[0].type", id="unknown item"),
        pytest.param(
            {"input": [{"role": "user", "content": [{"type": "nonsense"}]}]}, "input[0].content[0].type", id="unknown part"
        ),
        pytest.param({"input": "Hi", "temperature": "hot"}, "temperature", id="wrong type"),
        pytest.param({"input": "Hi", "temperature": 3}, "temperature", id="out of bounds"),
        pytest.param({"input": "Hi", "tools": [{"type": "function"}]}, "tools[0].name", id="nameless tool"),
        pytest.param({"input": "Hi", "prompt": {"id": "x"}}, "prompt", id="unsupported"),
        pytest.param({"input": "Hi", "stream": "yes"}, "stream", id="stream is a string"),
    ],
)
@STREAMED
async def test_an_invalid_request_is_a_400_with_the_path_of_the_parameter(
    ours: Ours, upstream: ScriptedUpstream, body: dict[str, Any], param: str, streamed: bool
) -> None:
    response = await ours.http.post("/v1/responses", json={"stream": streamed, **body})
    assert fault(response, 400)["param"] == param
    assert upstream.requests == []


async def test_a_body_that_is_too_large_is_a_413(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(limits__max_request_bytes=1000)

    async def chunked() -> Any:
        for _ in range(20):
            yield b" " * 100

    fault(await ours.http.post("/v1/responses", json={**BODY, "input": "x" * 1000}), 413)
    fault(await ours.http.post("/v1/responses", content=chunked()), 413)
    upstream.whole(completion({"content": "Hello"}))
    response = await ours.http.post("/v1/responses", json=BODY)
    assert response.status_code == 200


async def test_too_many_items_tools_and_levels_are_refused(ours: Ours, upstream: ScriptedUpstream) -> None:
    tool = {"type": "function", "name": "f"}
    deep: Any = "x"
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    for body, param in (
        ({"input": [{"role": "user", "content": "x"}] * (MAX_ITEMS + 1)}, "input"),
        ({"tools": [tool] * (MAX_TOOLS + 1)}, "tools"),
    ):
        assert fault(await ours.http.post("/v1/responses", json={**BODY, **body}), 400)["param"] == param
    fault(await ours.http.post("/v1/responses", json={**BODY, "metadata": deep}), 413)
    assert upstream.requests == []


async def test_an_incomplete_body_is_not_sent_upstream(ours: Ours, upstream: ScriptedUpstream) -> None:
    body = json.dumps(BODY).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(ours.url).port)
    writer.write(b"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (len(body) + 100) + body)
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    upstream.whole(completion({"content": "Hello"}))
    assert (await ours.http.post("/v1/responses", json=BODY)).status_code == 200
    assert len(upstream.requests) == 1


# -- routes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/responses/a/b/c", "/v1/responses/resp_x/nonsense", "/v1/conversations/a/b/c/d"])
async def test_an_unknown_api_path_is_a_404_with_an_openai_error(ours: Ours, upstream: ScriptedUpstream, path: str) -> None:
    fault(await ours.http.get(path), 404)
    assert all(visit.path == "/v1/models" for visit in upstream.visits)


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_a_wrong_method_is_a_405_with_an_allow_header(ours: Ours, method: str) -> None:
    response = await ours.http.request(method, "/v1/responses")
    assert fault(response, 405)["code"] == "method_not_allowed"
    assert "POST" in response.headers["allow"]


async def test_a_trailing_slash_is_ignored(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": "Hello"}))
    assert (await ours.http.post("/v1/responses/", json=BODY)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/responsesx", "/v1/response", "/v2/responses"])
async def test_similar_paths_are_proxied_to_the_upstream(ours: Ours, upstream: ScriptedUpstream, path: str) -> None:
    response = await ours.http.get(path)
    assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})
    assert upstream.visits[-1].path == path


# -- internal errors --------------------------------------------------------------------------------------------------------


@STREAMED
async def test_an_internal_error_before_the_start_is_a_500_with_an_openai_error(
    patient: Ours, upstream: ScriptedUpstream, streamed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("responses_mw.upstream.backends.chat.to_chat", broken)
    members = fault(await patient.http.post("/v1/responses", json={**BODY, "stream": streamed}), 500)
    assert "a bug" not in members["message"]
    assert "a bug" in caplog.text


@STREAMED
@pytest.mark.parametrize("error", [OSError("a bug"), TimeoutError("a bug"), ConnectionResetError("a bug")], ids=repr)
async def test_an_os_error_of_a_run_is_no_disconnect_of_the_client(
    patient: Ours, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, streamed: bool, error: OSError
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("responses_mw.upstream.backends.chat.to_chat", broken)
    fault(await patient.http.post("/v1/responses", json={**BODY, "stream": streamed}), 500)
    assert "a bug" in caplog.text


async def test_an_internal_error_in_a_route_is_a_500_with_an_openai_error(
    ours: Ours, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("responses_mw.asgi.requests.parse", broken)
    fault(await ours.http.post("/v1/responses", json=BODY), 500)
    assert "a bug" in caplog.text


async def test_an_internal_error_after_the_start_ends_the_stream_with_response_failed(
    ours: Ours, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("responses_mw.protocol.response.assembler.Assembler.end_turn", broken)
    upstream.stream(frame(text("Hel")))
    streamed = await stream(ours)
    assert streamed.response["error"]["code"] == "server_error"
    assert "a bug" not in streamed.response["error"]["message"]
    assert "a bug" in caplog.text


async def test_an_internal_error_of_a_json_request_is_logged_once_and_with_its_cause(
    ours: Ours, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug") from ValueError("its cause")

    monkeypatch.setattr("responses_mw.engine.run.Run.conclude", broken)
    upstream.whole(completion({"content": "Hello"}))
    fault(await ours.http.post("/v1/responses", json=BODY), 500)
    assert caplog.text.count("KeyError: 'a bug'") == caplog.text.count("ValueError: its cause") == 1


# -- garbage of failed requests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"input": [{"type": "unknown"}]}, {"previous_response_id": "resp_x"}, {}, {"stream": True}],
    ids=["invalid value", "unknown response", "upstream error", "upstream error in a stream"],
)
async def test_a_failed_request_leaves_nothing_to_the_garbage_collector(
    patient: Ours, upstream: ScriptedUpstream, wrong: dict[str, Any]
) -> None:
    async with nothing_left():
        upstream.whole(error("no"), 400)
        assert (await patient.http.post("/v1/responses", json={**BODY, **wrong})).status_code == 400
        upstream.stream(frame(text("Hel")), error("no"))
        await patient.http.post("/v1/responses", json={**BODY, **wrong, "stream": True})
