"""The errors that a caller can receive. `state.errors` defines further subclasses of them.

APIError                        an HTTP status and the error body that OpenAI documents
├── BadRequest                  400  the request is invalid
│   ├── NotSupported            400  the request is valid, but this server or its upstream does not support it
│   └── TooLarge                413  a body, list or nesting beyond its limit
├── Unauthorized                401  the credential is missing or refused
├── Forbidden                   403  the origin of the page is not allowed, or the API key may not name a tenant
├── NotFound                    404  the owner has no such object, or the path is unknown
├── MethodNotAllowed            405  the path does not support the method
├── RequestTimeout              408  the client stopped sending its request, or sent it too slowly
├── Conflict                    409  an idempotency key is in use or its reservation has expired, or an approval was used
├── UnsupportedMediaType        415  the encoding of the body is not supported
├── UpgradeRequired             426  the server does not accept WebSockets
├── RateLimited                 429  the owner is over a limit; has Retry-After
├── WorkerLost                  500  the worker of a background response was lost, and no other worker can continue it
├── Unavailable                 503  the server, or a service that it needs, is temporarily unavailable; has Retry-After
└── UpstreamError               any  the upstream answered with an error, or did not answer
    ├── UpstreamUnreachable     502  the upstream could not be reached, or closed the connection without an answer
    ├── UpstreamBrokeOff        502  the upstream failed while it processed the request or sent its answer; 503 if it sent 503
    └── UpstreamTimeout         504  the upstream did not answer in time

Each error has a `cause`, which says who has to act. Alerts ignore errors that clients cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from .redaction import redacted

E = TypeVar("E", bound=BaseException)

Cause: TypeAlias = Literal["client", "upstream", "server"]
"""Who caused an error: the client, the upstream, or this server with its settings and the other services that it needs."""

CLIENT_CODES = frozenset(
    {
        "context_length_exceeded",
        "invalid_prompt",
        "invalid_image",
        "invalid_image_format",
        "invalid_base64_image",
        "invalid_image_url",
        "image_too_large",
        "image_too_small",
        "image_parse_error",
        "image_content_policy_violation",
        "unsupported_image_media_type",
        "empty_image_file",
        "failed_to_download_image",
        "image_file_not_found",
    }
)
"""The codes of `response.error` that mean that the request cannot be served."""


def without_traceback(error: E) -> E:
    """Return `error` without its traceback and its causes. Call this before an object of the failed request keeps the error.

    The stack frames in a traceback refer to the objects of the request, such as its body. If such an object also refers to the
    error, all of them stay in memory until the garbage collector runs, and `serve` makes it run rarely.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


class StartupError(RuntimeError):
    """The server, the worker or a command cannot start. The message gives the reason."""


def cause_of(error: BaseException) -> Cause:
    """Return who caused `error`. Unexpected exceptions are caused by this server."""
    return error.cause if isinstance(error, APIError) else "server"


def cause_of_code(code: str) -> Cause:
    """Return who caused the failure of a response whose `error` has this code, if no more is known about the error."""
    return "client" if code in CLIENT_CODES else "upstream"


class APIError(Exception):
    """An error that the caller receives: an HTTP `status`, response `headers`, and the members of OpenAI's error object.

    `param` is the path of the invalid value in the request, such as `input[3].content[0].type`. If `code` is None, the class's
    `default_code` is used.
    """

    status: int = 500
    type: str = "server_error"
    default_code: ClassVar[str | None] = None
    default_headers: ClassVar[Mapping[str, str]] = {}
    cause: Cause = "server"
    upstream_status: int | None = None
    """The status that the upstream sent, in its HTTP response or within a stream. None if it sent none."""
    remedy: str = ""
    """A remedy for the operator, for the log. It contains no text of others."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.headers = {**self.default_headers, **(headers or {})}

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the HTTP response."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class _ClientError(APIError):
    type = "invalid_request_error"
    cause = "client"


class BadRequest(_ClientError):
    status = 400


class NotSupported(BadRequest):
    default_code = "unsupported_parameter"


class TooLarge(BadRequest):
    status = 413
    default_code = "request_too_large"


class Unauthorized(_ClientError):
    status = 401
    default_code = "invalid_api_key"


class Forbidden(_ClientError):
    status = 403


class NotFound(_ClientError):
    status = 404


class MethodNotAllowed(_ClientError):
    status = 405
    default_code = "method_not_allowed"


class RequestTimeout(_ClientError):
    status = 408
    default_code = "request_timeout"
    default_headers: ClassVar = {"connection": "close"}  # where the next request would start is unknown


class Conflict(_ClientError):
    status = 409
    default_headers: ClassVar = {"retry-after": "1"}


class UnsupportedMediaType(_ClientError):
    status = 415


class Misdirected(_ClientError):
    status = 421
    default_code = "misdirected_request"


class UpgradeRequired(_ClientError):
    status = 426
    default_code = "websocket_not_supported"
    default_headers: ClassVar = {"upgrade": "HTTP/1.1"}


class RateLimited(APIError):
    """The owner is over a limit. `retry_after` is the number of seconds in the header `Retry-After`."""

    status = 429
    type = "requests"
    cause = "client"
    default_code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: int = 1, headers: dict[str, str] | None = None) -> None:
        super().__init__(message, headers={"retry-after": str(retry_after), **(headers or {})})


class Unavailable(APIError):
    """The server, or a service that it needs, is temporarily unavailable. `retry_after` is in seconds."""

    status = 503
    default_code = "service_unavailable"

    def __init__(self, message: str, *, retry_after: int = 1, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, code=code, headers={"retry-after": str(retry_after)})


class WorkerLost(APIError):
    def __init__(self) -> None:
        super().__init__("The server that was making this response was lost before the response was complete.")


class UpstreamError(APIError):
    """An error of the upstream. `status` is the HTTP status that the caller receives. Secrets are removed from its texts.

    If `is_overload` is true, the upstream has not processed the request and may accept it later. For example, it answered with
    503, or was unreachable. `retry_after` is the delay in seconds that the upstream asked for, or None if it asked for none.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 502,
        type: str = "server_error",  # noqa: A002 (the member's name in OpenAI's error object)
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        cause: Cause = "upstream",
        is_overload: bool = False,
        retry_after: float | None = None,
    ) -> None:
        given = {name: redacted(value) for name, value in (headers or {}).items()}
        super().__init__(redacted(message), param=param and redacted(param), code=code and redacted(code), headers=given)
        self.status, self.type, self.cause = status, type, cause
        self.is_overload, self.retry_after = is_overload, retry_after

    @property
    def may_succeed_elsewhere(self) -> bool:
        """Whether another upstream may serve the request: this one has not processed it, or the account has no quota left."""
        return self.is_overload or self.status == 429


class UpstreamUnreachable(UpstreamError):
    default_code = "upstream_unreachable"
    remedy = "check that the upstream runs, and upstream.url"


class UpstreamBrokeOff(UpstreamError):
    remedy = "look for a crash, a restart or an error in the upstream's log"


class UpstreamStartedOver(UpstreamBrokeOff):
    """The upstream began a new answer instead of continuing the interrupted one. The client has not seen the new one."""


class UpstreamAnsweredError(UpstreamBrokeOff):
    """The upstream began its answer with an error. The same run does not send the request again, as after a status of 500."""


class UpstreamTimeout(UpstreamError):
    default_code = "upstream_timeout"
    remedy = "check the load of the upstream, or raise upstream.timeout"

    def __init__(self, message: str) -> None:
        super().__init__(message, status=504)
