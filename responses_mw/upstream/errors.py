"""Convert errors of upstreams to `UpstreamError`. Each format handled here was sent by a real server."""

from __future__ import annotations

import html
import re
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx
import orjson

from ..errors import (
    CLIENT_CODES,
    APIError,
    BadRequest,
    Cause,
    UpstreamAnsweredError,
    UpstreamBrokeOff,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from ..network import failure_reason, is_shortage
from ..redaction import redacted
from .server_options import missing_option

CONTEXT_LENGTH = "context_length_exceeded"
"""A code that the SDKs do not list. Codex and other clients recover from this error."""
ERROR_CODES = CLIENT_CODES - {CONTEXT_LENGTH} | {"server_error", "rate_limit_exceeded"}
"""The codes of `response.error` that the SDKs know (openai-python, `ResponseError`) and that an upstream can send."""

_MAX_TEXT = 1000
_TITLE = re.compile(r"<title[^>]*>([^<]*)</title", re.IGNORECASE)
_RENAMED_CODES = {"invalid_base64": "invalid_base64_image"}
_PARAMS = {
    "messages": "input",
    "input_tokens": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}
_DEFAULT_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
_OVERLOAD = frozenset({429, 502, 503})
"""Statuses after which the same request may succeed later. Normally, no server has processed it (but see `CRASH_AFTER`)."""
CRASH_AFTER = 1.0
"""Seconds after which a gateway's 502 means that a server received the request and failed. A gateway without a server answers
sooner. The request may have crashed the server, so this is not treated as an overload, after which requests are repeated."""
_SENDABLE = re.compile(r"[ -~]{1,256}")
_RETRIES = frozenset({"retry-after", "retry-after-ms", "x-should-retry"})
"""Headers that tell a client whether and when to retry. The last two are those of OpenAI's SDKs."""
_RESET = "disconnect/reset before headers"
"""Part of the message that Envoy sends with status 503 if a server failed in this way."""
_OF_THE_REQUEST = frozenset({"validation", "invalid_request_error", "BadRequestError"})
"""Types of errors that the same request always causes."""
_OF_THE_DEPLOYMENT = frozenset({402, 405, 407, 408, 421, 425, 426, 429})
"""Statuses below 500 that the client's request does not cause."""
_OF_THE_ACCOUNT = frozenset({402, 429})
"""Statuses that may concern the limits of the account that the credential belongs to."""
_LASTING = frozenset({"insufficient_quota", "billing_hard_limit_reached"})
"""Codes of a 429 that waiting does not resolve."""
_MESSAGES = (
    *("message", "detail", "msg", "status_msg", "error_message", "error_msg", "errorMessage", "errmsg", "err_msg"),
    *("errors", "exception", "fault", "title", "reason"),
)
"""Members with the message of an error."""
_STATUSES = ("http_status_code", "status_code", "status")
_FINE = frozenset({"0", "200", "ok", "success"})
"""Codes of frames that report no error."""
_FAILED = frozenset({"error", "failed", "failure"})
_MAX_DEPTH = 4  # maximum depth of error objects within each other
_TOO_LONG = (
    "exceed_context_size_error",
    "context length",
    "max_model_len",
    "context window",
    "`inputs` must have less than",
    "`inputs` tokens + `max_new_tokens`",
)
"""Parts of the error messages of vLLM, SGLang, llama.cpp and TGI if a prompt is too long."""


_IN_LOG = "see the upstream's log"
_OVERLOADED = "wait, or give the upstream more capacity"
_STATUS_REMEDIES = {
    402: "check the account of the upstream's credential",
    404: "check upstream.url, and whether the upstream serves chats",
    429: _OVERLOADED,
    503: _OVERLOADED,
}
"""Remedies for a status of the upstream, for the operator."""


class _Fault(NamedTuple):
    """The members of an error object in any format."""

    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None
    status: int | None = None


def from_status(
    status: int,
    body: bytes,
    headers: httpx.Headers,
    *,
    own_key: bool = False,
    callers_key: bool = False,
    elapsed: float = 0.0,
) -> UpstreamError:
    """Return the error for an HTTP response with a `status` of 300 or more.

    `own_key` is whether the operator's credential was used instead of the caller's, and `callers_key` whether the caller sent
    one. `elapsed` is the time in seconds from the
    request to the response. The error is an `UpstreamBrokeOff` if the request may have crashed a server.
    """
    fault = _fault(_decoded(body))
    message = fault.message or f"The upstream answered with status {status}."
    if status < 400:  # callers must not see the target
        error = UpstreamError(f"The upstream answered with a redirect (status {status}), which is not followed.")
    elif status in (401, 403) and own_key and _is_about_model(fault):
        error = _client_error(404, message, fault._replace(code="model_not_found"), {})
    elif status in (401, 403) and own_key:
        error = UpstreamError("The upstream refused the credential of this server.", status=502, cause="server")
        error.remedy = "set a credential in upstream.api_key or upstream.headers that the upstream accepts"
    elif status < 500:
        error = _client_error(status, message, fault, _sendable(headers, limits=True))
        if status in _OF_THE_ACCOUNT:
            error.cause = cause_of_status(status, own_key=own_key, callers_key=callers_key)
    elif status == 501:  # the model cannot do what the request asks for (vLLM with gpt-oss)
        error = _client_error(400, message, fault, _sendable(headers, limits=True))
    else:
        has_crashed = elapsed > CRASH_AFTER and (status == 502 or (status == 503 and _RESET in message))
        kind = UpstreamBrokeOff if has_crashed else UpstreamError
        error = kind(message, status=status if status in (503, 504) else 502, code=fault.code, headers=_sendable(headers))
    error.upstream_status = status
    _note_remedy(error)
    error.is_overload = status in _OVERLOAD and error.code not in _LASTING and not isinstance(error, UpstreamBrokeOff)
    error.retry_after = _retry_after(headers)
    return error


def _is_about_model(fault: _Fault) -> bool:
    """Return whether a key is refused only for the model of the request (OpenAI; LiteLLM's `key_model_access_denied`)."""
    return fault.param == "model" or fault.code == "model_not_found" or (fault.type or "").endswith("model_access_denied")


def cause_of_status(status: int, *, own_key: bool = False, callers_key: bool = False) -> Cause:
    """Return who caused an error with this HTTP status of the upstream. The parameters are those of `from_status`."""
    if status in (401, 403):
        return "server" if own_key else "client"
    if status in _OF_THE_ACCOUNT and callers_key and not own_key:
        return "client"
    return "upstream" if status >= 500 or status in _OF_THE_DEPLOYMENT else "client"


def cause_of_answer(status: int, body: bytes, *, own_key: bool = False, callers_key: bool = False) -> Cause:
    """Return who caused the error `body` of the upstream. The parameters are those of `from_status`."""
    return from_status(status, body, httpx.Headers(), own_key=own_key, callers_key=callers_key).cause


def _sendable(headers: httpx.Headers, *, limits: bool = False) -> dict[str, str]:
    """Return the valid headers to forward to the client: those about retries and, with `limits`, the rate limits."""
    return {
        name: value
        for name, value in headers.items()
        if (name in _RETRIES or (limits and name.startswith("x-ratelimit-"))) and _SENDABLE.fullmatch(value)
    }


def _retry_after(headers: httpx.Headers) -> float | None:
    """Return the delay in seconds from the headers about retries, or None if they are missing or invalid."""
    exact = headers.get("retry-after-ms", "").strip()
    if exact.isascii() and exact.isdigit():
        return float(exact[:12]) / 1000
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def from_frame(data: dict[str, Any], *, is_first: bool = False) -> UpstreamError:
    """Convert an error object that the upstream sent in a stream or a body after a status of 200.

    A status from 400 to 499 in the object becomes the error's status. Otherwise, the error's status is 502, and it is an
    `UpstreamBrokeOff`, unless the object has no status and its type means that the request is invalid. If the error `is_first`,
    without a chunk before it, it is an `UpstreamAnsweredError`.
    """
    fault = _fault(data)
    message = fault.message or "The upstream reported an error in its stream."
    if fault.status is not None and 400 <= fault.status < 500:
        error: UpstreamError = _client_error(fault.status, message, fault, {})
    else:
        is_callers = fault.status is None and fault.type in _OF_THE_REQUEST
        broken = UpstreamAnsweredError if is_first else UpstreamBrokeOff
        kind = UpstreamError if is_callers else broken
        error = kind(message, status=502, code=fault.code, cause="client" if is_callers else "upstream")
    error.upstream_status = fault.status
    _note_remedy(error)
    return error


def _note_remedy(error: UpstreamError) -> None:
    """Set the remedy of `error` for the operator. If the upstream lacks an option, the client is not the cause."""
    if remedy := missing_option(error.message):
        error.cause, error.remedy = "upstream", remedy
    elif error.cause == "upstream" and not error.remedy:
        error.remedy = _IN_LOG if error.upstream_status is None else _STATUS_REMEDIES.get(error.upstream_status, _IN_LOG)


def _client_error(status: int, message: str, fault: _Fault, headers: dict[str, str]) -> UpstreamError:
    code = fault.code or _DEFAULT_CODES.get(status)
    if status == 404 and fault.code != "model_not_found" and "model" not in message.lower():
        code = None  # the path does not exist, because the URL is wrong or the server has no Chat Completions API
    param = (fault.param or "").removeprefix("body.") or None  # vLLM's validation reports a path in the body
    param = _PARAMS.get(param, param) if param else None
    text = f"{fault.type} {message}".lower()
    if status in (400, 413, 422) and param != "max_output_tokens" and any(sign in text for sign in _TOO_LONG):
        code, param = CONTEXT_LENGTH, param or "input"
    kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    cause: Cause = "upstream" if status == 404 and code is None else cause_of_status(status)
    return UpstreamError(message, status=status, type=kind, param=param, code=code, headers=headers, cause=cause)


def find_error(data: dict[str, Any]) -> dict[str, Any] | None:
    """Return the error in `data`, which was sent with status 200 in a stream or as a body, or None if it has none.

    Without choices, anything that reads like a message or an error code is an error, because no chunk of an answer has these.
    """
    if data.get("error") or "error" in (data.get("object"), data.get("type")):
        return data
    choices = data.get("choices")
    if choices:  # OpenRouter
        listed = choices if isinstance(choices, list) else []
        return next((choice for choice in listed if isinstance(choice, dict) and choice.get("error")), None)
    base = data.get("base_resp")
    if isinstance(base, dict) and not _is_fine(base.get("status_code")):  # MiniMax
        return base
    if "code" in data and _is_fine(data["code"]):
        return None
    is_failed = data.get("success") is False or str(data.get("status")).lower() in _FAILED
    status = _status(data.get("status")) or _status(data.get("status_code")) or 0
    return data if is_failed or status >= 400 or data.get("code") or any(map(data.get, _MESSAGES)) else None


def _is_fine(code: Any) -> bool:
    return not code or str(code).lower() in _FINE


def _decoded(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        text = redacted(body.decode(errors="replace").strip())[:_MAX_TEXT]  # a cut secret would not be recognized
        if not text.startswith("<"):
            return text
        title = _TITLE.search(text)  # of an HTML page, such as the error page of a proxy
        return " ".join(html.unescape(title[1]).split()) if title else ""


def _fault(data: Any) -> _Fault:
    for _ in range(_MAX_DEPTH):
        if isinstance(data, dict):
            # OpenAI, vLLM, llama.cpp, Ollama, LiteLLM; SGLang in streams; MiniMax
            data = next((data[name] for name in ("error", "base_resp") if isinstance(data.get(name), dict)), data)
    if not isinstance(data, dict):
        return _Fault(str(data or ""))
    code, param, kind = data.get("code"), data.get("param"), data.get("type") or data.get("error_type")
    return _Fault(
        _message(data.get("message") or data.get("error") or next(filter(None, map(data.get, _MESSAGES)), None)),
        type=kind if isinstance(kind, str) else None,
        param=param if isinstance(param, str) else None,
        code=_RENAMED_CODES.get(code, code) if isinstance(code, str) and not _status(code) else None,
        status=next(filter(None, map(_status, (code, *map(data.get, _STATUSES)))), None),
    )


def _message(message: Any) -> str:
    """Return `message` as text. FastAPI's `detail` may be a list. Bedrock's message may be the JSON of another error."""
    if not isinstance(message, str):
        with suppress(orjson.JSONEncodeError):  # nested deeper than the encoder allows
            return orjson.dumps(message).decode() if message else ""
        return ""
    inner = _decoded(message.encode()) if message.startswith("{") else None
    return (isinstance(inner, dict) and _fault(inner).message) or message


def _status(code: Any) -> int | None:
    """Return `code` as an HTTP status, or None if it is no status. `code` may be a number or a string of digits."""
    if isinstance(code, str) and code.isascii() and code.isdigit():
        code = int(code[:4])
    return code if isinstance(code, int) and 100 <= code < 600 else None


def from_transport(error: httpx.HTTPError | TimeoutError) -> UpstreamError:
    """Return the error for a failed request. If no connection could be made, the error is marked as an overload."""
    failure: UpstreamError
    if is_shortage(error):
        message = f"The upstream cannot be reached: {failure_reason(error)}."
        failure = UpstreamError(message, status=503, code="service_unavailable", cause="server")
    elif isinstance(error, TimeoutError | httpx.TimeoutException):
        failure = UpstreamTimeout("The upstream did not answer in time.")
    else:
        why = failure_reason(error) or type(error).__name__
        if isinstance(error, httpx.RemoteProtocolError):
            # Without a cause, the connection was closed. Python's TLS servers close it if the client sends plain HTTP.
            closed = "it closed the connection without an answer (it may have crashed, or need an https:// URL)"
            why = "its answer is not valid HTTP (an https:// server needs an https:// URL)" if error.__cause__ else closed
        failure = UpstreamUnreachable(f"The upstream cannot be reached: {why}.")
    failure.is_overload = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)  # nothing was sent
    return failure


def as_response_error(error: APIError) -> dict[str, str]:
    """Return the `error` member of a response whose run failed."""
    return {"code": _response_code(error), "message": error.message}


def _response_code(error: APIError) -> str:
    if error.code is not None and (error.code in ERROR_CODES or error.code == CONTEXT_LENGTH):
        return error.code
    if not isinstance(error, UpstreamError | BadRequest):
        return "server_error"
    if error.status == 429:
        return "rate_limit_exceeded"
    is_callers = 400 <= error.status < 500 and error.status not in (401, 424)  # 424: a tool's server
    return "invalid_prompt" if is_callers else "server_error"
