"""The caller of a request, and the check that the upstream accepts its credential. The check runs before any side effect.

1. The check first requests the list of models with the caller's headers. Any error fails the check, except those in step 3.
   The list alone is not enough, because some servers (llama.cpp, TGI, OpenRouter) show it without a valid credential.
2. If the server returns the list, the check sends an empty chat request. The server responds with 401 or 403 if it rejects the
   credential. If it answers or reports an invalid request, the credential is accepted. No model runs.
3. The list is inconclusive if the response is not a list, or has the status 403, 404, 405 or 501. A key that gets a 403
   may still be valid for chats. The other statuses mean that the server has no list.
4. If the list is inconclusive, or if the empty request fails with any other error, the check sends the smallest valid chat
   request. The server must answer it.
5. Only a 401 or 403 rejects the credential. If the check fails in another way, for example because the server is overloaded or
   unreachable, it raises an error. The caller is then neither accepted nor rejected.
6. After a successful check or chat, the credential stays accepted for 30 seconds. Rejections are not cached, nor is the
   result for a caller whom the host application may identify by other means than headers.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import httpx
import orjson

from ..auth import ANONYMOUS
from ..errors import Unauthorized, UpstreamError
from ..telemetry import metrics
from .decoding import check_values

REFUSALS = frozenset({401, 403})
"""Statuses of responses that refuse a credential."""


@dataclass(slots=True)
class Standing:
    """Whether the caller of a request has been accepted or refused. If neither is set, the caller has not been checked."""

    is_known: bool = False
    """Whether the caller has an API key of this server. A refusal by the upstream then concerns the operator's credential."""
    is_accepted: bool = False
    is_refused: bool = False
    has_chatted: bool = False
    """Whether the upstream has begun an answer for the caller."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request.

    `owner` is the owner of all objects that the request stores. `headers` are forwarded to the upstream. `scope` is the ASGI
    scope that an upstream in this process inherits, or None.
    """

    owner: str = ANONYMOUS
    headers: dict[str, str] = field(default_factory=dict)
    scope: MutableMapping[str, Any] | None = None
    standing: Standing = field(default_factory=Standing, compare=False)
    session: str = field(default="", compare=False)
    """Key of the session that a request belongs to (see `affinity.session_key`), or "" if it belongs to none."""
    model: str | None = field(default=None, compare=False)
    """The model that a request is for, or None if that is not known or does not matter."""

    def again(self, model: str | None) -> Caller:
        """Return a copy for the caller's next request, which is for `model`.

        Unless it has an API key of this server, it must be accepted again.
        """
        is_known = self.standing.is_known
        return replace(self, standing=Standing(is_known=is_known, is_accepted=is_known), model=model)

    def at_another_upstream(self) -> Caller:
        """Return the caller of the same request at another upstream, which does not get the credential of the caller."""
        headers = {name: value for name, value in self.headers.items() if name in _NOT_CREDENTIALS}
        return replace(self, headers=headers, standing=Standing(is_known=self.standing.is_known, is_accepted=True))


# -- the check ---------------------------------------------------------------------------------------------------------

ACCEPTED_FOR = 30.0
"""Seconds that an accepted credential is cached."""
MAX_ACCEPTED = 10_000

_INCONCLUSIVE = frozenset({403, 404, 405, 501})
"""Statuses of the response to the list of models that do not show whether the credential is accepted."""
_INVALID = frozenset({400, 422})
"""Statuses of the response to an empty request that show that the credential is accepted."""
_NOT_CREDENTIALS = frozenset({"traceparent", "tracestate", "baggage", "x-session-id", "x-vllm-priority"})
"""Headers that differ between requests of one caller."""
_OF_THE_HOST = frozenset({"user", "auth", "session"})
"""Members of the ASGI scope that the host application's middleware sets to identify the caller."""


class Verification:
    """Checks credentials at one upstream. `chat_path` is the upstream's path for chats or responses."""

    def __init__(
        self,
        fetch: Callable[..., Awaitable[httpx.Response]],
        fault_of: Callable[[httpx.Response, Caller], Awaitable[UpstreamError]],
        *,
        chat_path: str,
    ) -> None:
        """`fetch` and `fault_of` are methods of `Upstream`."""
        self._fetch = fetch
        self._fault_of = fault_of
        self._chat_path = chat_path
        self._accepted: OrderedDict[bytes, float] = OrderedDict()
        """Expiry of each accepted credential, in order of last use."""
        self._model = "default"
        """The last model that answered a chat. The smallest request uses it if the upstream lists no models."""

    async def verify(self, caller: Caller) -> None:
        """Check that the upstream accepts the caller, and record that it does. Raises the same errors as `Upstream.verify`."""
        standing = caller.standing
        if standing.is_refused:
            raise Unauthorized("The upstream refused the credential.")
        if standing.is_accepted:
            return
        key = _key(caller)
        if key is not None and self._accepted.get(key, 0.0) > time.monotonic():
            self._accepted.move_to_end(key)
        else:
            await self._find_out(caller)
            self._remember(key)
        standing.is_accepted = True

    def chat_accepted(self, caller: Caller, model: str) -> None:
        """Record that the upstream has accepted a chat request of the caller for `model`."""
        standing = caller.standing
        standing.has_chatted, standing.is_accepted, standing.is_refused = True, True, False
        self._model = model
        self._remember(_key(caller))

    def chat_refused(self, caller: Caller) -> None:
        """Record that the upstream has refused the caller's credential for a chat, and remove the credential from the cache.

        A caller with an API key of this server stays accepted, and so does a caller with an earlier answer (`has_chatted`).
        """
        standing = caller.standing
        if not (standing.is_known or standing.has_chatted):
            standing.is_accepted, standing.is_refused = False, True
        key = _key(caller)
        if key is not None:
            self._accepted.pop(key, None)

    def _remember(self, key: bytes | None) -> None:
        if key is None:
            return
        self._accepted[key] = time.monotonic() + ACCEPTED_FOR
        self._accepted.move_to_end(key)
        if len(self._accepted) > MAX_ACCEPTED:
            self._accepted.popitem(last=False)

    async def _find_out(self, caller: Caller) -> None:
        answer = await self._fetch("GET", "/v1/models", caller)
        models = listed(answer)
        if answer.status_code >= 300 and answer.status_code not in _INCONCLUSIVE:
            raise await self._refusal(answer, caller)
        if models is not None:
            answer = await self._fetch("POST", self._chat_path, caller, b"{}")
            if answer.status_code < 300 or answer.status_code in _INVALID:
                return
            if answer.status_code in REFUSALS:
                raise await self._refusal(answer, caller)
        smallest = orjson.dumps(self._smallest(models))
        answer = await self._fetch("POST", self._chat_path, caller, smallest, is_quick=False)
        if answer.status_code >= 300:
            refusal = await self._refusal(answer, caller)
            if not models:  # the upstream's message may quote the model, which another caller chose
                refusal.message = f"The upstream answered the check of the credential with status {answer.status_code}."
            raise refusal

    def _smallest(self, models: list[dict[str, Any]] | None) -> dict[str, Any]:
        model = models[0]["id"] if models else self._model
        if self._chat_path == "/v1/responses":
            return {"model": model, "input": ".", "max_output_tokens": 16, "store": False}
        return {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}

    async def _refusal(self, response: httpx.Response, caller: Caller) -> Unauthorized | UpstreamError:
        fault = await self._fault_of(response, caller)
        if fault.status in REFUSALS:
            refusal = Unauthorized(fault.message)
            refusal.upstream_status = fault.upstream_status
            return refusal
        if fault.status < 500 and fault.status != 429:  # the error concerns the check, not the caller's request
            return UpstreamError(f"The upstream does not say whether it accepts the credential: {fault.message}")
        return fault


def _key(caller: Caller) -> bytes | None:
    """Return a hash of the credentials, or None if the host application may identify the caller by other means."""
    if caller.scope is not None and not _OF_THE_HOST.isdisjoint(caller.scope):
        return None
    credentials = sorted((name, value) for name, value in caller.headers.items() if name not in _NOT_CREDENTIALS)
    return sha256(orjson.dumps(credentials)).digest()


def listed(response: httpx.Response) -> list[dict[str, Any]] | None:
    """Return the listed models, or None if `response` is not a list. Some servers respond to every path with a web page.

    The listed names may become labels of metrics. Raises `UpstreamError` if the response has too many JSON values.
    """
    if response.status_code >= 300:
        return None
    check_values(response.content)
    try:
        decoded = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return None
    models = decoded.get("data") if isinstance(decoded, dict) else None
    if not isinstance(models, list):
        return None
    models = [model for model in models if isinstance(model, dict) and isinstance(model.get("id"), str)]
    metrics.MODELS.add_listed(model["id"] for model in models)
    return models
