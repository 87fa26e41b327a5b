"""Requests that the operator sends to the API on behalf of an owner.

They pass all checks and limits of that owner, except that the operator needs no API key: it cannot know the keys, of which only
hashes are stored.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..auth import ALLOWED_MODELS, API_KEY, APIKey, APIKeys
from ..errors import BadRequest
from ..settings.groups import AuthSettings
from ..telemetry.captures import HEADER as CAPTURE_HEADER
from ..telemetry.context import annotate
from .requests import PARAMETERS_SCOPE
from .telemetry import ROUTE_SCOPE, STARTED_SCOPE, TelemetryMiddleware

CREATE = "/v1/responses"
_INHERITED = ("client", "server", "scheme")


class OnBehalf:
    """Creates responses on behalf of owners."""

    def __init__(self, routes: ASGIApp, auth: AuthSettings, keys: APIKeys | None, host: Mapping[str, Any] | None) -> None:
        """`routes` is the API behind the check of API keys. `host` has the members of the host's scope."""
        self._routes = routes
        self._keys = keys
        self._host = dict(host or {})
        self._header = auth.tenant_header
        self.key_names: Sequence[str] = sorted(keys.names) if keys is not None else ()
        self.has_tenants = self._header is not None

    def create(self, body: bytes, request_id: str, *, key: str = "", tenant: str = "", credential: str = "") -> ASGIApp:
        """Return an application that creates a response with the JSON `body`, for the request that it is called with.

        `request_id` becomes the id of the request to the API.

        The owner is that of the API key named `key`. Without API keys, it is that of `credential`, a bearer token, which the
        upstream checks. `tenant` is the value of `auth.tenant_header`. Raises `BadRequest` if there is no such key, or if a
        text cannot be a header.
        """
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        headers += [(b"user-agent", b"responses-mw inspector"), (CAPTURE_HEADER.encode(), b"1")]
        headers.append((b"x-request-id", request_id.encode()))
        known = self._keys.named(key) if self._keys is not None else None
        if self._keys is not None and known is None:
            raise BadRequest("Choose one of the API keys.", param="key")
        if known is None and credential:
            headers.append((b"authorization", b"Bearer " + _value(credential, "credential")))
        if self._header is not None and tenant:
            headers.append((self._header.lower().encode(), _value(tenant, "tenant")))
        return _Create(self._routes, body, headers, known, self._host)


@dataclass(frozen=True, slots=True)
class _Create:
    """An ASGI application that sends one request to `routes`, which get the client of the request that it is called with."""

    routes: ASGIApp
    body: bytes
    headers: Sequence[tuple[bytes, bytes]]
    key: APIKey | None
    host: Mapping[str, Any]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        inherited = {name: scope[name] for name in _INHERITED if name in scope}
        host = [(name, value) for name, value in scope["headers"] if name == b"host"]
        sent: Scope = {
            **self.host,
            **inherited,
            "type": "http",
            "asgi": scope["asgi"],
            "http_version": "1.1",
            "method": "POST",
            "path": CREATE,
            "raw_path": CREATE.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [*host, *self.headers],
            "responses_mw.path": CREATE,
            ROUTE_SCOPE: CREATE,
            PARAMETERS_SCOPE: {},
            STARTED_SCOPE: time.perf_counter(),
        }
        if self.key is not None:
            sent[API_KEY], sent[ALLOWED_MODELS] = self.key
        await TelemetryMiddleware(self._annotated)(sent, _with_body(self.body, receive), send)

    async def _annotated(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.key is not None:
            annotate(key=self.key.name)
        await self.routes(scope, receive, send)


def _value(text: str, param: str) -> bytes:
    if not re.fullmatch(r"[\x20-\x7e\xa0-\xff]+", text):
        raise BadRequest(f"The {param} has characters that a header cannot have.", param=param)
    return text.encode("latin-1")


def _with_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns `body`, and then what `receive` returns."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> Message:
        return messages.pop() if messages else await receive()

    return receive_body
