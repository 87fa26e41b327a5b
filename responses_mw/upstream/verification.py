"""Whether the upstream accepts a caller's credential, for what happens before it answers that caller, or without it.

1. Two questions are asked with the caller's headers, and neither may be refused. The list of models has no effect anywhere; but
   some servers (llama.cpp, TGI, OpenRouter) show it to everybody. So an empty chat request follows: a server that guards it
   refuses it before it looks into it, and one that takes the credential calls it invalid. No model is run.
2. Where the list tells nothing (403: keys may be for chats only; 404, 405, 501: there is none), an invalid request would prove
   too little; and some servers fail on one. Then the smallest whole one is sent, and must be answered.
3. Whatever is neither an acceptance nor a refusal (an overload, a server that is away) is an error: nobody is let in by it.
4. What was accepted holds for 30 seconds, and so does what a chat of the caller's has proven. Refusals are not remembered.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any

import httpx
import orjson

from ..errors import Unauthorized, UpstreamError
from .caller import REFUSALS, Caller

ACCEPTED_FOR = 30.0
"""Seconds for which an accepted credential is taken to be good."""
MOST_ACCEPTED = 10_000

_SILENT = frozenset({403, 404, 405, 501})
"""Statuses of a list of models that tell nothing of the credential."""
_INVALID = frozenset({400, 422})
"""Statuses of a request that was looked into."""
_NOT_CREDENTIALS = frozenset({"traceparent", "tracestate", "baggage", "x-session-id", "x-vllm-priority"})
"""Headers that differ from request to request and say nothing of who asks."""
_OF_THE_HOST = frozenset({"user", "auth", "session"})
"""What a host's own middleware knows of a caller beside his headers, as members of the ASGI scope."""

Ask = Callable[[str, str, Caller, bytes], Awaitable[httpx.Response]]
"""Sends a method and a body to a path for a caller; raises ``UpstreamError`` where there is no answer."""
FaultOf = Callable[[httpx.Response, Caller], Awaitable[UpstreamError]]


class Verification:
    """What one upstream says of credentials. ``chat_path`` is where it answers chats, or whole responses."""

    def __init__(self, ask: Ask, fault_of: FaultOf, *, chat_path: str) -> None:
        self._ask = ask
        self._fault_of = fault_of
        self._chat_path = chat_path
        self._accepted: OrderedDict[bytes, float] = OrderedDict()
        """Until when each credential is taken to be good, the one used last at the end."""
        self._model = "default"
        """One that the upstream has answered for, for questions that name none."""

    async def verify(self, caller: Caller) -> None:
        """Returns for a caller who is accepted. Raises ``Unauthorized`` for one who is not, ``UpstreamError`` where nobody
        knows."""
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
        """A chat of the caller's has been answered."""
        caller.standing.chat_accepted()
        self._model = model
        self._remember(_key(caller))

    def chat_refused(self, caller: Caller) -> None:
        """A chat of the caller's has been refused for his credential."""
        caller.standing.chat_refused()
        key = _key(caller)
        if key is not None:
            self._accepted.pop(key, None)

    # -- what is remembered -------------------------------------------------------------------------------------------

    def _is_accepted(self, key: bytes) -> bool:
        if self._accepted.get(key, 0.0) <= _now():
            return False
        self._accepted.move_to_end(key)
        return True

    def _remember(self, key: bytes | None) -> None:
        if key is None:
            return
        self._accepted[key] = _now() + ACCEPTED_FOR
        self._accepted.move_to_end(key)
        if len(self._accepted) > MOST_ACCEPTED:
            self._accepted.popitem(last=False)

    # -- what is asked ------------------------------------------------------------------------------------------------

    async def _find_out(self, caller: Caller) -> None:
        listed = await self._ask("GET", "/v1/models", caller, b"")
        models = _listed(listed)
        if listed.status_code >= 300 and listed.status_code not in _SILENT:
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
            return Unauthorized(fault.message)
        if fault.status < 500 and fault.status != 429:  # it is about our question, not about the request
            return UpstreamError(f"The upstream does not tell whether it accepts the credential: {fault.message}")
        return fault


def _key(caller: Caller) -> bytes | None:
    """What the upstream may know the caller by, hashed; None where it is more than we see."""
    if caller.scope is not None and not _OF_THE_HOST.isdisjoint(caller.scope):
        return None
    told = sorted((name, value) for name, value in caller.headers.items() if name not in _NOT_CREDENTIALS)
    return sha256(orjson.dumps(told)).digest()


def _listed(response: httpx.Response) -> list[Any] | None:
    """The models in an answer; None where it has none, or is no list: some servers have a page for every path."""
    if response.status_code >= 300:
        return None
    try:
        decoded = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return None
    models = decoded.get("data") if isinstance(decoded, dict) else None
    return models if isinstance(models, list) else None


def _now() -> float:
    return asyncio.get_running_loop().time()
