"""Errors of the upstream: overloads, messages, headers and `retry-after`."""

from __future__ import annotations

import time
from email.utils import formatdate

import httpx
import orjson
import pytest

from responses_mw.errors import UpstreamBrokeOff
from responses_mw.upstream.errors import find_error, from_frame, from_status, from_transport


@pytest.mark.parametrize("status", [429, 502, 503])
def test_429_502_and_503_are_overloads_with_a_retry_after(status: int) -> None:
    error = from_status(status, b"busy", httpx.Headers({"retry-after": "7"}))
    assert (error.is_overload, error.retry_after) == (True, 7)


@pytest.mark.parametrize("status", [302, 400, 401, 404, 500, 504])
def test_other_statuses_are_not_overloads(status: int) -> None:
    assert not from_status(status, b"no", httpx.Headers()).is_overload


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (502, b"Bad Gateway"),
        (503, b"upstream connect error or disconnect/reset before headers. reset reason: connection termination"),
    ],
)
def test_a_gateway_error_after_the_server_worked_for_a_while_is_not_an_overload(status: int, body: bytes) -> None:
    assert from_status(status, body, httpx.Headers(), elapsed=0.1).is_overload
    late = from_status(status, body, httpx.Headers(), elapsed=3)
    assert isinstance(late, UpstreamBrokeOff)
    assert (late.status, late.is_overload) == (status, False)
    assert from_status(503, b"The model is busy.", httpx.Headers(), elapsed=3).is_overload


def test_an_exhausted_quota_is_not_an_overload() -> None:
    body = orjson.dumps({"error": {"message": "You exceeded your current quota.", "code": "insufficient_quota"}})
    assert not from_status(429, body, httpx.Headers()).is_overload


@pytest.mark.parametrize("value", [[], {}, 5, True, ["validation"]])
def test_error_members_of_the_wrong_type_are_ignored(value: object) -> None:
    members = dict.fromkeys(("type", "error_type", "param", "code", "http_status_code"), value)
    for error in (from_frame({"message": "no", **members}), from_status(500, orjson.dumps(members), httpx.Headers())):
        assert (error.status, error.param, error.code) == (502, None, None)


def test_a_deeply_nested_message_is_omitted() -> None:
    body = b'{"error":{"message":%b}}' % (b"[" * 500 + b"]" * 500)
    assert from_status(400, body, httpx.Headers()).message == "The upstream answered with status 400."


@pytest.mark.parametrize("value", ["", "soon", "-1", "1e9", "Thu, 99 Nov 2026 00:00:00 GMT", "\u0661"])
def test_an_invalid_retry_after_is_ignored(value: str) -> None:
    assert from_status(503, b"", httpx.Headers([(b"retry-after", value.encode())])).retry_after is None


@pytest.mark.parametrize("status", [429, 503])
def test_headers_that_are_invalid_or_not_listed_are_omitted(status: int) -> None:
    given = [(b"x-ratelimit-note", "€".encode()), (b"retry-after", b"7"), (b"x-ratelimit-limit", b"9" * 300), (b"server", b"x")]
    assert from_status(status, b"", httpx.Headers(given)).headers == {"retry-after": "7"}


def test_a_retry_after_may_be_a_date() -> None:
    later = formatdate(time.time() + 60, usegmt=True)
    error = from_status(503, b"", httpx.Headers({"retry-after": later}))
    assert error.retry_after == pytest.approx(60, abs=30)
    assert from_status(503, b"", httpx.Headers({"retry-after": formatdate(0, usegmt=True)})).retry_after == 0


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (b"<html><head><title>502 Bad\n Gateway</title></head><body>" + b"x" * 5000, "502 Bad Gateway"),
        (b"<!DOCTYPE html>\n<TITLE lang=en>Oops &amp; sorry</TITLE>", "Oops & sorry"),
        (b"<html><body>" + b"x" * 5000, "The upstream answered with status 502."),
        (b"upstream connect error", "upstream connect error"),
    ],
)
def test_the_message_of_an_html_page_is_its_title(page: bytes, message: str) -> None:
    assert from_status(502, page, httpx.Headers()).message == message


def test_a_failed_connection_attempt_is_an_overload_and_a_broken_connection_is_not() -> None:
    assert from_transport(httpx.ConnectError("refused")).is_overload
    assert from_transport(httpx.ConnectTimeout("refused")).is_overload
    assert not from_transport(httpx.ReadError("reset")).is_overload
    assert not from_transport(TimeoutError()).is_overload


def test_the_headers_about_retries_are_forwarded() -> None:
    given = {"retry-after-ms": "1500", "x-should-retry": "false", "retry-after": "9"}
    error = from_status(503, b"busy", httpx.Headers(given))
    assert error.headers == given
    assert error.retry_after == 1.5
    assert from_status(503, b"busy", httpx.Headers({"retry-after-ms": "soon", "retry-after": "9"})).retry_after == 9


ERRORS = [
    ({"error": {"message": "boom"}}, "boom", 502),
    ({"error": {"error": {"message": "boom", "code": 429}}}, "boom", 429),
    ({"error": "boom"}, "boom", 502),
    ({"object": "error", "message": "boom", "code": 400}, "boom", 400),
    ({"object": "error", "error": ""}, "The upstream reported an error in its stream.", 502),
    ({"type": "error", "message": "boom"}, "boom", 502),
    ({"message": "boom"}, "boom", 502),
    ({"detail": "boom"}, "boom", 502),
    ({"detail": [{"msg": "boom"}]}, '[{"msg":"boom"}]', 502),
    ({"msg": "boom", "code": "500"}, "boom", 502),
    ({"code": 1302, "msg": "boom"}, "boom", 502),
    ({"code": "InternalError", "message": "boom"}, "boom", 502),
    ({"code": 400}, "The upstream reported an error in its stream.", 400),
    ({"status": 422, "title": "boom"}, "boom", 422),
    ({"status": "error"}, "The upstream reported an error in its stream.", 502),
    ({"success": False}, "The upstream reported an error in its stream.", 502),
    ({"choices": None, "base_resp": {"status_code": 1008, "status_msg": "boom"}}, "boom", 502),
    ({"choices": [], "base_resp": {"status_code": "1008", "status_msg": "boom"}}, "boom", 502),
    ({"choices": [{"delta": {}, "error": {"message": "boom", "code": 502}}]}, "boom", 502),
]


@pytest.mark.parametrize(("frame", "message", "status"), ERRORS)
def test_errors_of_all_known_forms_are_recognized(frame: dict[str, object], message: str, status: int) -> None:
    found = find_error(frame)
    assert found is not None
    error = from_frame(found)
    assert (error.message, error.status) == (message, status)


@pytest.mark.parametrize(
    "frame",
    [
        {},
        {"choices": [], "usage": {"prompt_tokens": 1}, "error": None},
        {"choices": [], "prompt_filter_results": [{}], "id": "", "object": ""},
        {"choices": [{"delta": {"content": "x"}}], "message": "x", "detail": "x", "code": 5, "base_resp": {"status_code": 5}},
        {"choices": [{"message": {"content": "x"}, "error": None}], "error": {}},
        {"type": "ping"},
        {"code": 0, "msg": "success"},
        {"code": "200", "message": "OK"},
        {"base_resp": {"status_code": 0, "status_msg": ""}, "status": "ok"},
        {"prompt_progress": {"total": 5}, "message": None},
    ],
)
def test_a_frame_without_an_error_raises_none(frame: dict[str, object]) -> None:
    assert find_error(frame) is None
