"""The caller of a request, and the check that the upstream accepts its credential. The check runs before any side effect.

1. The check first requests the list of models with the caller's headers. This has no side effect, but some servers (llama.cpp,
   TGI, OpenRouter) list their models without a valid credential.
2. If the server returns the list, the check sends an empty chat request. A server that rejects the credential answers with 401
   or 403. A server that accepts it reports an invalid request. No model runs.
3. The list is inconclusive if the response is not a list or has the status 403 (the key may be valid for chats only), 404, 405
   or 501 (the server has no list). The check then sends the smallest valid chat request, and the server must answer it. This
   request is also sent if the empty request fails with any other error.
4. If the server is overloaded or unreachable, the check raises an error. The caller is neither accepted nor rejected.
5. An accepted credential stays accepted for 30 seconds, whether this check or a chat accepted it. Rejections are not cached.
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

REFUSALS = frozenset({401, 403})
"""Statuses with which a server refuses a credential."""


@dataclass(slots=True)
class Standing:
    """Whether a caller is accepted, because of one of our API keys, a recent check or the upstream's answer to this request."""

    is_known: bool = False
    """Whether the caller has one of our API keys. If so, a refusal by the upstream concerns the operator's credential."""
    is_accepted: bool = False
    is_refused: bool = False
    _has_chatted: bool = False

    def chat_accepted(self) -> None:
        """Record that the upstream began an answer for the caller."""
        self._has_chatted = self.is_accepted = True
        self.is_refused = False

    def chat_refused(self) -> None:
        """Record that the upstream refused the caller, unless the caller has one of our API keys or an answer has begun."""
        if not (self.is_known or self._has_chatted):
            self.is_accepted, self.is_refused = False, True


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request.

    `owner` is the owner of all objects that the request stores. `headers` are forwarded to the upstream. `scope` is the ASGI
    scope that a call to an upstream in this process inherits from.
    """

    owner: str = ANONYMOUS
    headers: dict[str, str] = field(default_factory=dict)
    scope: MutableMapping[str, Any] | None = None
    standing: Standing = field(default_factory=Standing, compare=False)

    def with_headers(self, headers: dict[str, str]) -> Caller:
        """Return the caller with other `headers`. The result shares the standing."""
        return Caller(self.owner, headers, self.scope, self.standing)

    def again(self) -> Caller:
        """Return the caller for another request, with a new standing.

        The upstream must accept the caller again, unless the caller has one of our API keys.
        """
        is_known = self.standing.is_known
        return replace(self, standing=Standing(is_known=is_known, is_accepted=is_known))


# -- the check ---------------------------------------------------------------------------------------------------------

ACCEPTED_FOR = 30.0
"""Seconds for which an accepted credential remains accepted."""
MAX_ACCEPTED = 10_000

_INCONCLUSIVE = frozenset({403, 404, 405, 501})
"""Statuses of the list of models that do not show whether the credential is accepted."""
_INVALID = frozenset({400, 422})
"""Statuses of a request whose body was validated."""
_NOT_CREDENTIALS = frozenset({"traceparent", "tracestate", "baggage", "x-session-id", "x-vllm-priority"})
"""Headers that differ between requests of one caller."""
_OF_THE_HOST = frozenset({"user", "auth", "session"})
"""Members of the ASGI scope in which the host application's middleware identifies the caller."""

Ask = Callable[[str, str, Caller, bytes], Awaitable[httpx.Response]]
"""Sends a request, given its method, path, caller and body. Raises `UpstreamError` if there is no response."""
FaultOf = Callable[[httpx.Response, Caller], Awaitable[UpstreamError]]


class Verification:
    """Checks credentials at one upstream. `chat_path` is the upstream's path for chats or responses."""

    def __init__(self, ask: Ask, fault_of: FaultOf, *, chat_path: str) -> None:
        self._ask = ask
        self._fault_of = fault_of
        self._chat_path = chat_path
        self._accepted: OrderedDict[bytes, float] = OrderedDict()
        """Expiry of each accepted credential, in order of last use."""
        self._model = "default"
        """The last model that answered a chat. The smallest request uses it if the upstream lists no models."""

    async def verify(self, caller: Caller) -> None:
        """Check that the upstream accepts the caller, and record the result in the caller's standing.

        Raises `Unauthorized` if the caller is refused, and `UpstreamError` if the check is inconclusive.
        """
        standing = caller.standing
        if standing.is_refused:
            raise Unauthorized("The upstream refused the credential.")
        if standing.is_accepted:
            return
        key = _key(caller)
        if key is None or not self._is_accepted(key):
            await self._find_out(caller)
            self._remember(key)
        standing.is_accepted = True

    def chat_accepted(self, caller: Caller, model: str) -> None:
        """Record that the upstream began to answer a chat of the caller with `model`."""
        caller.standing.chat_accepted()
        self._model = model
        self._remember(_key(caller))

    def chat_refused(self, caller: Caller) -> None:
        """Record that the upstream refused a chat because of the caller's credential."""
        caller.standing.chat_refused()
        key = _key(caller)
        if key is not None:
            self._accepted.pop(key, None)

    # -- accepted credentials -----------------------------------------------------------------------------------------

    def _is_accepted(self, key: bytes) -> bool:
        if self._accepted.get(key, 0.0) <= time.monotonic():
            return False
        self._accepted.move_to_end(key)
        return True

    def _remember(self, key: bytes | None) -> None:
        if key is None:
            return
        self._accepted[key] = time.monotonic() + ACCEPTED_FOR
        self._accepted.move_to_end(key)
        if len(self._accepted) > MAX_ACCEPTED:
            self._accepted.popitem(last=False)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def _find_out(self, caller: Caller) -> None:
        listed = await self._ask("GET", "/v1/models", caller, b"")
        models = _listed(listed)
        if listed.status_code >= 300 and listed.status_code not in _INCONCLUSIVE:
            raise await self._refusal(listed, caller)
        if models is not None:
            answer = await self._ask("POST", self._chat_path, caller, b"{}")
            if answer.status_code < 300 or answer.status_code in _INVALID:
                return
            if answer.status_code in REFUSALS:
                raise await self._refusal(answer, caller)
        answer = await self._ask("POST", self._chat_path, caller, orjson.dumps(self._smallest(models)))
        if answer.status_code >= 300:
            raise await self._refusal(answer, caller)

    def _smallest(self, models: list[Any] | None) -> dict[str, Any]:
        model = models[0].get("id") if models and isinstance(models[0], dict) else self._model
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
    """Return a hash of the caller's credentials, or None if the host application may identify the caller by other means."""
    if caller.scope is not None and not _OF_THE_HOST.isdisjoint(caller.scope):
        return None
    credentials = sorted((name, value) for name, value in caller.headers.items() if name not in _NOT_CREDENTIALS)
    return sha256(orjson.dumps(credentials)).digest()


def _listed(response: httpx.Response) -> list[Any] | None:
    """Return the models in `response`, or None if it is not a list of models. Some servers send a web page for every path."""
    if response.status_code >= 300:
        return None
    try:
        decoded = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return None
    models = decoded.get("data") if isinstance(decoded, dict) else None
    return models if isinstance(models, list) else None
