"""The client for the upstream's chat completions, models and other endpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import httpx
import orjson

from ..errors import BadRequest, UpstreamError
from ..http import MAX_BODY, MAX_ERROR_BODY, BodyRefused, read_body
from ..protocol.dialects import OPENAI, Dialect
from ..protocol.types import ChatRequest
from ..settings.upstreams import DEFAULT, UpstreamSettings
from ..telemetry import metrics
from .caller import REFUSALS, Caller, Verification, listed
from .captured import capture_answer
from .decoding import NULL, decoded
from .detection import detect
from .endpoint import Endpoint
from .errors import from_status, from_transport
from .forwarding import Forwarder
from .operator_key import KeyCheck, OperatorKey
from .pool import UNAVAILABLE, Pool, Wanted
from .responses_stream import ResponsesStream
from .sending import Sender
from .stream import ChatStream

logger = logging.getLogger(__name__)

Stream = TypeVar("Stream", bound=ChatStream)

CHECK_TIMEOUT = 10.0
"""Timeout in seconds of a request that any server answers at once, such as a check of a credential or a list of models."""
MODELS_INTERVAL = 30.0
"""Seconds between two requests for the endpoints' lists of models."""
MAX_MODELS = 10_000
"""Maximum number of models of an endpoint that are remembered."""
MAX_ANSWER_BYTES = 128 * 1024 * 1024
"""Maximum number of bytes from the upstream and tools for one response: about 400,000 tokens in chunks of 300 bytes."""


class Upstream:
    """A client of one upstream, whose endpoints are in `pool`. `transport` reaches them over the network or in this process.

    `passing` is the transport of the requests of clients that are forwarded, by default `transport`.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport,
        pool: Pool,
        settings: UpstreamSettings,
        name: str = DEFAULT,
        passing: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.name = name
        self.transport = transport
        self.pool = pool
        self.settings = settings
        self.fallbacks: list[tuple[Upstream, str | None]] = []
        """The upstreams that replace this one, and the names of their models, or None for models of the same name."""
        self.has_key = settings.has_credential
        """Whether `upstream.api_key` or another credential of the operator is set."""
        path = "/v1/responses" if settings.api == "responses" else "/v1/chat/completions"
        self.forwarder = Forwarder(passing or transport, pool, settings)
        self._sender = Sender(transport, pool, settings, path)
        self._verification = Verification(self._fetch, self._fault, chat_path=path)
        self._operator_key = OperatorKey(self._fetch, path, settings.credential_settings(name)) if self.has_key else None

    async def chat(self, body: ChatRequest, caller: Caller, dialect: Dialect | None = None) -> ChatStream:
        """Send the chat request `body`, and return the answer once it has begun. The caller must close it.

        The endpoint has the `dialect` of the body, unless this is None or no endpoint has it.

        Raises `UpstreamError` if the upstream responds with an error, or if its answer is malformed. Raises its subclass
        `UpstreamUnreachable` if there is no connection or it fails before the status arrives, `UpstreamBrokeOff` if it fails
        later or a server may have crashed (see `from_status`), and `UpstreamTimeout` if connecting or answering takes too long.
        """
        return await self._open(ChatStream, "/v1/chat/completions", body, caller, dialect)

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

    async def post(self, path: str, body: dict[str, Any] | bytes, caller: Caller, *, max_bytes: int = MAX_BODY) -> Any:
        """Post `body`, or JSON that is already encoded, to an endpoint other than completions. Return the decoded response.

        Raises the same errors as `get`. The response may have at most `max_bytes` bytes.
        """
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        return await self._json(await self._fetch("POST", path, caller, content, max_bytes, is_quick=False), caller)

    async def _json(self, response: httpx.Response, caller: Caller) -> Any:
        await self._check(response, caller)
        return decoded(response.content, largest=NULL)

    @property
    def known_dialect(self) -> str | None:
        """Name of the dialect, or None before its detection."""
        return next((one.dialect.name for one in self.pool.endpoints if one.dialect is not None), None)

    async def dialect(self, caller: Caller, only: Endpoint | None = None) -> Dialect:
        """Return the configured dialect, or detect it. If the upstream lists no models or refuses to (4xx), return OpenAI's.

        It is that of the endpoint `only` or, if this is None, of the endpoint for the caller's request.

        Raises `UpstreamError` if the upstream is overloaded, fails or cannot be reached.
        """
        wanted = Wanted(caller.model, only=only)
        endpoint = self.pool.choose(caller.session, wanted)
        if endpoint is not None and endpoint.dialect is not None:
            return endpoint.dialect
        response = await self._fetch("GET", "/v1/models", caller, wanted=wanted)
        answering: Endpoint = response.extensions["endpoint"]
        if answering.dialect is not None:
            return answering.dialect
        models = listed(response)
        if models is None:
            if response.status_code >= 300:
                error = await self._fault(response, caller)
                if error.is_overload or (error.status in UNAVAILABLE and response.status_code not in REFUSALS):
                    raise error
            return OPENAI  # if the upstream refuses the credential, its error for the chat request gives the reason
        wanted = Wanted(only=answering)
        answering.dialect = dialect = await detect(models, lambda path: self._fetch("GET", path, caller, wanted=wanted))
        logger.info("detected the dialect of the upstream: %s", dialect.name)
        return dialect

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

    async def check_key(self, caller: Caller) -> KeyCheck:
        """Check that the upstream answers and accepts the operator's key (see the module `operator_key`).

        Without the setting, only check that the upstream answers. Raises the same errors as `probe`.
        """
        status = await self.probe(caller)
        if self._operator_key is None:
            return KeyCheck()
        return KeyCheck(await self._operator_key.check(status, caller), self._operator_key.was_accepted)

    async def probe(self, caller: Caller) -> int:
        """Check that the upstream answers within `CHECK_TIMEOUT` seconds. Any status but 502, 503 and 504 is an answer.

        Return the status. Raises `UpstreamError` with `is_overload` set if the check fails.
        """
        try:
            response = await self._fetch("GET", "/v1/models", caller)
            if response.status_code in UNAVAILABLE:
                raise await self._fault(response, caller)
        except UpstreamError as error:
            error.is_overload = True
            raise
        if not metrics.MODELS.is_listed:  # with a configured dialect, nothing else may read the list
            with suppress(UpstreamError):
                listed(response)
        return response.status_code

    async def answers(self, endpoint: Endpoint, caller: Caller | None = None) -> bool:
        """Ask `endpoint` for its models and remember them. Return whether it answers."""
        try:
            response = await self._fetch("GET", "/v1/models", caller or Caller(), wanted=Wanted(only=endpoint))
            models = listed(response)
        except UpstreamError:
            return False
        if models is not None:
            endpoint.models = {model["id"]: model for model in models[:MAX_MODELS]}
        return response.status_code not in UNAVAILABLE

    @property
    def known_models(self) -> Mapping[str, dict[str, Any]]:
        """The models that the settings or the endpoints list, by name."""
        if self.settings.models:
            listed_as = {"object": "model", "created": 0, "owned_by": self.name}
            return {name: {"id": name, **listed_as} for name in self.settings.models}
        return {name: card for one in reversed(self.pool.endpoints) for name, card in (one.models or {}).items()}

    @property
    def has_list(self) -> bool:
        """Whether the settings or an endpoint list models."""
        return bool(self.settings.models) or any(one.models for one in self.pool.endpoints)

    def lists(self, model: str) -> bool:
        """Return whether the settings or an endpoint list `model`. Requests need this, so `known_models` is not built."""
        if self.settings.models:
            return model in self.settings.models
        return any(one.models is not None and model in one.models for one in self.pool.endpoints)

    @property
    def uses_sessions(self) -> bool:
        """Whether it matters which session a request belongs to."""
        return len(self.pool.endpoints) > 1 or bool(self.settings.session_header)

    async def list_models(self) -> None:
        """Ask each endpoint for its models."""
        if not self.settings.models:
            await asyncio.gather(*(self.answers(one) for one in self.pool.endpoints if not one.is_ejected))

    async def watch_models(self, *, always: bool) -> None:
        """Keep the models of the endpoints up to date until cancelled: `always`, or if there is a choice between endpoints."""
        while True:
            if always or len(self.pool.endpoints) > 1:
                await self.list_models()
            await asyncio.sleep(MODELS_INTERVAL)

    # -- requests ---------------------------------------------------------------------------------------------------

    async def _open(
        self, kind: type[Stream], path: str, body: dict[str, Any], caller: Caller, dialect: Dialect | None = None
    ) -> Stream:
        """Return the answer, and record whether the upstream accepted or refused the caller."""
        wanted = Wanted(caller.model, dialect)
        response, lease = await self._sender.send("POST", path, caller, orjson.dumps(body), wanted=wanted)
        capture_answer(response)
        first, idle = self.settings.timeout, self.settings.idle_timeout
        stream = kind(response, lease, first_chunk_timeout=first, idle_timeout=idle, max_bytes=MAX_ANSWER_BYTES)
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
        if self._operator_key is not None:
            self._operator_key.accept()
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
        wanted: Wanted | None = None,
    ) -> httpx.Response:
        """Return the response with its whole body. The timeout is `CHECK_TIMEOUT` if `is_quick`, else `upstream.timeout`.

        The extension `endpoint` of the response is the endpoint that sent it. If `wanted` is None, it serves the model of the
        caller's request.

        Raises `UpstreamError` if there is no response, or if its body is too large or compressed. In an error response, such a
        body is returned as empty.
        """
        limit, wanted = CHECK_TIMEOUT if is_quick else self.settings.timeout, wanted or Wanted(caller.model)
        try:
            async with asyncio.timeout(limit):
                response, lease = await self._sender.send(method, path, caller, content, limit, wanted)
                with lease:
                    body = await self._body(response, max_bytes)
        except (httpx.HTTPError, TimeoutError) as error:
            raise from_transport(error) from error
        extensions = {"endpoint": lease.endpoint}
        return httpx.Response(response.status_code, headers=response.headers, content=body, extensions=extensions)

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

    async def _check(self, response: httpx.Response, caller: Caller) -> None:
        if response.status_code >= 300:
            raise await self._fault(response, caller)

    async def _fault(self, response: httpx.Response, caller: Caller) -> UpstreamError:
        try:
            async with asyncio.timeout(self.settings.idle_timeout):
                body = response.content if response.is_closed else await read_body(response, MAX_ERROR_BODY)
        except (httpx.HTTPError, TimeoutError, BodyRefused):
            body = b""  # the status is enough
        own_key = self.has_key or caller.standing.is_known
        elapsed = response.extensions.get("elapsed", 0.0)
        callers_key = "authorization" in caller.headers
        error = from_status(
            response.status_code, body, response.headers, own_key=own_key, callers_key=callers_key, elapsed=elapsed
        )
        if self._operator_key is not None and response.status_code in REFUSALS and error.cause == "server":
            self._operator_key.doubt()
        return error


def member(decoded: Any, *names: str) -> Any:
    """Return the member of `decoded` at the path `names`, or None if the member does not exist."""
    for name in names:
        decoded = decoded.get(name) if isinstance(decoded, dict) else None
    return decoded
