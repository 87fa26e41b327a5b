"""The client for the upstream's chat completions, models and other endpoints."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import httpx
import orjson

from .. import ids
from ..errors import BadRequest, UpstreamError
from ..http import MAX_BODY, MAX_ERROR_BODY, BodyRefused, read_body
from ..protocol.chat.dialects import DIALECTS, OPENAI, TRANSFORMERS, Dialect
from ..protocol.types import ChatRequest
from ..settings.groups import UpstreamSettings
from .caller import REFUSALS, Caller, Verification, listed
from .errors import CRASH_AFTER, from_status, from_transport
from .stream import ChatStream, ResponsesStream, check_values

logger = logging.getLogger(__name__)

Stream = TypeVar("Stream", bound=ChatStream)

CHECK_TIMEOUT = 10.0
"""Timeout in seconds of a request that any server answers at once, such as a check of a credential or a list of models."""
CONNECT_TIMEOUT = 5.0
"""Timeout in seconds for a connection to the upstream. Even a busy server accepts connections at once."""
MAX_ANSWER_BYTES = 128 * 1024 * 1024
"""Maximum number of bytes from the upstream and tools for one response: about 400,000 tokens in chunks of 300 bytes."""

_RETRIED = frozenset({502, 503})
_NO_ANSWER = frozenset({502, 503, 504})
"""Statuses that a gateway sends if the server behind it is unavailable."""
_FIRST_BACK_OFF = 0.01


class Upstream:
    """A client of one upstream server. `base` is the server's URL without `/v1`.

    `transport` reaches the server over the network or in this process. It is used without an `httpx.AsyncClient`, because
    redirects, cookies and proxies are not wanted and take time.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, base: str, settings: UpstreamSettings) -> None:
        self.transport = transport
        self._base = base
        self._urls: dict[str, httpx.URL] = {}  # by path, because parsing a URL costs as much as sending a request
        self._settings = settings
        self._key = settings.api_key.get_secret_value() if settings.api_key else None
        self._dialect = DIALECTS.get(settings.dialect)
        path = "/v1/responses" if settings.api == "responses" else "/v1/chat/completions"
        self._verification = Verification(self._fetch, self._fault, chat_path=path)

    async def chat(self, body: ChatRequest, caller: Caller) -> ChatStream:
        """Send the chat request `body`, and return the answer once it has begun. The caller must close it.

        Raises `UpstreamError` if the upstream responds with an error, or if its answer is malformed. Raises its subclass
        `UpstreamUnreachable` if there is no connection or it fails before the status arrives, `UpstreamBrokeOff` if it fails
        later or a server may have crashed (see `from_status`), and `UpstreamTimeout` if connecting or answering takes too long.
        """
        return await self._open(ChatStream, "/v1/chat/completions", body, caller)

    async def responses(self, body: dict[str, Any], caller: Caller) -> ResponsesStream:
        """Send the Responses request `body`, and return the answer once it has begun. Raises the same errors as `chat`."""
        return await self._open(ResponsesStream, "/v1/responses", body, caller)

    async def models(self, caller: Caller) -> list[dict[str, Any]]:
        """Return the models that `GET /v1/models` lists. Raises `UpstreamError` if the request fails or returns no list."""
        response = await self._fetch("GET", "/v1/models", caller)
        await self._check(response, caller)
        models = listed(response)
        if models is None:
            raise UpstreamError("The upstream's /v1/models did not return a list of models.")
        return models

    async def get(self, path: str, caller: Caller) -> Any:
        """Return the decoded JSON at `path`.

        Raises `UpstreamError` if the request fails, or if the response is not JSON, compressed or too large.
        """
        return await self._json(await self._fetch("GET", path, caller), caller)

    async def post(self, path: str, body: dict[str, Any], caller: Caller, *, max_bytes: int = MAX_BODY) -> Any:
        """Post `body` to an endpoint other than completions, and return the decoded JSON response.

        Raises the same errors as `get`. The response may have at most `max_bytes` bytes.
        """
        return await self._json(await self._fetch("POST", path, caller, orjson.dumps(body), max_bytes, is_quick=False), caller)

    async def _json(self, response: httpx.Response, caller: Caller) -> Any:
        await self._check(response, caller)
        check_values(response.content)
        try:
            return orjson.loads(response.content)
        except orjson.JSONDecodeError:
            raise UpstreamError("The upstream sent a body that is not JSON.") from None

    @property
    def known_dialect(self) -> str | None:
        """Name of the dialect, or None before its detection."""
        return self._dialect.name if self._dialect is not None else None

    async def dialect(self, caller: Caller) -> Dialect:
        """Return the configured dialect, or detect it. If the upstream lists no models or refuses to (4xx), return OpenAI's.

        Raises `UpstreamError` if the upstream is overloaded, fails or cannot be reached.
        """
        if self._dialect is None:
            response = await self._fetch("GET", "/v1/models", caller)
            models = listed(response)
            if models is None:
                if response.status_code >= 300:
                    error = await self._fault(response, caller)
                    if error.is_overload or (error.status in _NO_ANSWER and response.status_code not in REFUSALS):
                        raise error
                return OPENAI  # if the upstream refuses the credential, its error for the chat request gives the reason
            self._dialect = await detect(models, lambda path: self._fetch("GET", path, caller))
            logger.info("detected the dialect of the upstream: %s", self._dialect.name)
        return self._dialect

    async def model(self, wanted: str | None, caller: Caller) -> str:
        """Return `wanted`. If it is None, return the upstream's only model. Adapters do not count.

        Raises `BadRequest` if there is no model or more than one, and `UpstreamError` if the models cannot be listed.
        """
        if wanted is not None:
            return wanted
        models = [model for model in await self.models(caller) if not model.get("parent")]  # without adapters
        if len(models) == 1:
            return str(models[0]["id"])
        names = ", ".join(model["id"] for model in models)
        message = f"Missing required parameter: 'model'. The upstream serves: {names}."
        raise BadRequest(message, param="model", code="missing_required_parameter")

    async def verify(self, caller: Caller) -> None:
        """Check that the caller has an API key of this server or is accepted by the upstream (see the module `caller`).

        Call this before every side effect. Raises `Unauthorized` if the caller is refused, or `UpstreamError` if the check
        fails or is inconclusive.
        """
        await self._verification.verify(caller)

    async def probe(self, caller: Caller) -> None:
        """Check that the upstream answers within `CHECK_TIMEOUT` seconds. Any status but 502, 503 and 504 is an answer.

        Raises `UpstreamError` with `is_overload` set if the check fails.
        """
        try:
            response = await self._fetch("GET", "/v1/models", caller)
            if response.status_code in _NO_ANSWER:
                raise await self._fault(response, caller)
        except UpstreamError as error:
            error.is_overload = True
            raise

    # -- requests ---------------------------------------------------------------------------------------------------

    async def _open(self, kind: type[Stream], path: str, body: dict[str, Any], caller: Caller) -> Stream:
        """Return the answer, and record whether the upstream accepted or refused the caller."""
        first, idle = self._settings.timeout, self._settings.idle_timeout
        response = await self._send("POST", path, caller, orjson.dumps(body))
        stream = kind(response, first_byte_timeout=first, idle_timeout=idle, max_bytes=MAX_ANSWER_BYTES)
        try:
            await self._check(response, caller)
            await stream.begin()
        except BaseException as error:
            if isinstance(error, UpstreamError) and error.status in REFUSALS:
                self._verification.chat_refused(caller)
            with anyio.CancelScope(shield=True):
                await stream.aclose()
            raise
        self._verification.chat_accepted(caller, body["model"])
        return stream

    async def _fetch(
        self,
        method: str,
        path: str,
        caller: Caller,
        content: bytes = b"",
        max_bytes: int = MAX_BODY,
        *,
        is_quick: bool = True,
    ) -> httpx.Response:
        """Return the response with its whole body. The timeout is `CHECK_TIMEOUT` if `is_quick`, else `upstream.timeout`.

        Raises `UpstreamError` if there is no response, or if its body is too large or compressed. In an error response, such a
        body is returned as empty.
        """
        limit = CHECK_TIMEOUT if is_quick else self._settings.timeout
        try:
            async with asyncio.timeout(limit):
                response = await self._send(method, path, caller, content, limit)
                body = await self._body(response, max_bytes)
        except (httpx.HTTPError, TimeoutError) as error:
            raise from_transport(error) from error
        return httpx.Response(response.status_code, headers=response.headers, content=body)

    async def _body(self, response: httpx.Response, max_bytes: int) -> bytes:
        is_fault = response.status_code >= 300
        try:
            return await read_body(response, MAX_ERROR_BODY if is_fault else max_bytes)
        except BodyRefused as error:
            if not is_fault:
                raise UpstreamError(f"The upstream sent {error}.") from None
            return b""
        finally:
            await response.aclose()

    async def _send(
        self, method: str, path: str, caller: Caller, content: bytes = b"", limit: float = math.inf
    ) -> httpx.Response:
        """Send a request, and return the response without reading its body. Raises `UpstreamError` if there is no response.

        The request is retried if no connection can be made, or if a 502 or 503 arrives within `CRASH_AFTER` seconds. Retries
        stop after half of `upstream.status_grace`, or after half of the caller's `limit` in seconds.
        """
        # The second half of the grace period is left for the last attempt, so that its status can still be sent to the caller.
        until = time.monotonic() + min(self._settings.status_grace, limit) / 2
        pause = _FIRST_BACK_OFF
        while True:
            try:
                response = await self._try(method, path, caller, content)
            except (httpx.HTTPError, TimeoutError) as error:
                if time.monotonic() + pause > until or not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                    raise from_transport(error) from error
            else:
                is_retried = response.status_code in _RETRIED and response.extensions["elapsed"] < CRASH_AFTER
                if time.monotonic() + pause > until or not is_retried:
                    return response
                await response.aclose()
            await asyncio.sleep(pause)
            pause *= 2

    async def _try(self, method: str, path: str, caller: Caller, content: bytes) -> httpx.Response:
        # Each call needs a new id, because vLLM uses it as the id of the completion, which must be unique.
        headers = {**caller.headers, "x-request-id": ids.random_part(), "accept-encoding": "identity"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        if content:
            headers |= {"content-type": "application/json", "content-length": str(len(content))}
        # Headers were decoded as Latin-1, because a caller's headers may contain any byte.
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        url = self._urls.get(path) or self._urls.setdefault(path, httpx.URL(self._base + path))
        extensions = {"timeout": {"connect": CONNECT_TIMEOUT}, "asgi_scope": caller.scope}
        # With `content` instead of `stream`, httpx would make the headers a second time.
        request = httpx.Request(
            method, url, headers=[(b"host", url.netloc), *encoded], stream=httpx.ByteStream(content), extensions=extensions
        )
        began = time.monotonic()
        async with asyncio.timeout(self._settings.timeout):
            response = await self.transport.handle_async_request(request)
        response.extensions["elapsed"] = time.monotonic() - began
        return response

    async def _check(self, response: httpx.Response, caller: Caller) -> None:
        if response.status_code >= 300:
            raise await self._fault(response, caller)

    async def _fault(self, response: httpx.Response, caller: Caller) -> UpstreamError:
        try:
            async with asyncio.timeout(self._settings.idle_timeout):
                body = response.content if response.is_closed else await read_body(response, MAX_ERROR_BODY)
        except (httpx.HTTPError, TimeoutError, BodyRefused):
            body = b""  # the status is enough
        own_key = self._key is not None or caller.standing.is_known
        elapsed = response.extensions.get("elapsed", 0.0)
        return from_status(response.status_code, body, response.headers, own_key=own_key, elapsed=elapsed)


async def detect(models: list[dict[str, Any]], get: Callable[[str], Awaitable[httpx.Response]]) -> Dialect:
    """Return the dialect of the server that lists `models`. For an unknown server, return OpenAI's.

    If no model has an `owned_by` that identifies the server, send probes with `get`. Raises the same errors as `get`.
    """
    by_owner = {owner: dialect for dialect in DIALECTS.values() for owner in dialect.owned_by}
    for model in models:
        owner = model.get("owned_by")
        if isinstance(owner, str) and owner in by_owner:
            return by_owner[owner]
    for dialect in DIALECTS.values():
        if dialect.probe is not None and await _is_confirmed(*dialect.probe, get):
            return dialect
    is_prefix = [model.get("owned_by") == model["id"].split("/")[0] and "/" in model["id"] for model in models]
    return TRANSFORMERS if models and all(is_prefix) else OPENAI


async def _is_confirmed(path: str, matches: Callable[[Any], bool], get: Callable[[str], Awaitable[httpx.Response]]) -> bool:
    response = await get(path)
    try:
        return response.status_code == 200 and matches(orjson.loads(response.content))
    except orjson.JSONDecodeError:
        return False


def member(decoded: Any, *names: str) -> Any:
    """Return the member of `decoded` at the path `names`, or None if the member does not exist."""
    for name in names:
        decoded = decoded.get(name) if isinstance(decoded, dict) else None
    return decoded
