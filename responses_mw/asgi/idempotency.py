"""Idempotent creation of responses. A request that repeats an `Idempotency-Key` gets the response to the first request.

The header is defined by draft-ietf-httpapi-idempotency-key-header.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from hashlib import sha256
from typing import Any

import anyio
import orjson
from starlette.datastructures import Headers

from ..auth import Gate
from ..errors import BadRequest, Conflict
from ..ids import random_part
from ..lua import load
from ..protocol.request.create import CreateResponse
from ..protocol.response.document import whole
from ..protocol.response.events import TERMINAL, Event, events_of
from ..state import Missing, State, StateUnavailable, Stored
from ..state.client import Args
from ..telemetry.context import annotate
from ..threads import by_size, in_background
from ..upstream import Caller

logger = logging.getLogger(__name__)

_RESERVE, _UPDATE = load("state", "idempotency_reserve", "idempotency_update")

HEADER = "Idempotency-Key"
_KEY = re.compile(r"[!-~]{1,255}")
_KEPT = 24 * 60 * 60
"""Number of seconds that a key is stored after its response was created."""
_LEASE = 30.0
"""Seconds that a key is reserved. The reservation is renewed while the request runs. It expires if the replica is lost."""
RENEWAL_INTERVAL = _LEASE / 3
_MIN_PAUSE, _MAX_PAUSE = 0.05, 1.0
"""Initial and maximum number of seconds between two checks of whether the other request has ended."""


async def once(
    headers: Headers, state: State | None, parsed: CreateResponse, body: Any, caller: Caller, gate: Gate
) -> OnceOnly | None:
    """Return a guard that prevents the request from running twice, or None if `headers` contain no `Idempotency-Key`.

    `body` is the decoded body of the request, with its prompt template applied.

    Raises `BadRequest` if there is more than one key, if the key is invalid, if the request sets `store: false`, or if `state`
    is None.
    """
    keys = headers.getlist(HEADER)
    if not keys:
        return None
    if len(keys) > 1 or not _KEY.fullmatch(keys[0]):
        message = f"The header '{HEADER}' must be a single value of 1 to 255 visible ASCII characters."
        raise BadRequest(message, param=HEADER, code="invalid_idempotency_key")
    if state is None or not parsed.store:
        reason = "remove 'store: false'" if state is not None else "configure Redis"
        message = f"The header '{HEADER}' needs stored state: {reason}."
        raise BadRequest(message, param=HEADER, code="idempotency_key_not_supported")
    canonical = await by_size(parsed.size, lambda: orjson.dumps(body, option=orjson.OPT_SORT_KEYS))
    return OnceOnly(state, caller.owner, keys[0], canonical, gate)


class OnceOnly:
    """Guard that prevents a request with an idempotency key from running twice. It reserves the key in Redis."""

    def __init__(self, state: State, owner: str, key: str, request: bytes, gate: Gate) -> None:
        """`request` is the body of the request as JSON with sorted members. It must be equal in all requests with the key."""
        self._state = state
        self._owner = owner
        self._gate = gate
        name = sha256(f"{owner}\0{key}".encode()).hexdigest()[:32]
        self._name = f"rmw:{{i{name}}}:key"
        self._request_hash = sha256(request).hexdigest()
        self._token = random_part()
        self._may_exist = False

    async def earlier(self, *, wait: bool) -> Stored | None:
        """Return the stored response to an earlier request with the key. If there is none, reserve the key and return None.

        If another request is creating the response, wait for it. If `wait` is false, raise `Conflict` instead. Raises `Missing`
        if the response was deleted or has expired, `BadRequest` if the key was used with another body, or `StateUnavailable` if
        Redis fails.
        """
        pause = _MIN_PAUSE
        while True:
            verdict, response_id = await self._reserve()
            if verdict == "reserved":
                return None
            if verdict == "different":
                message = f"The header '{HEADER}' has been used for a request with another body."
                raise BadRequest(message, param=HEADER, code="idempotency_key_reused")
            if response_id is not None:
                try:
                    return await self._state.responses.get(response_id, self._owner)
                except Missing:
                    if verdict == "done":
                        raise
            if not wait:
                message = f"A request with this '{HEADER}' is in progress. Its response can be streamed when it has ended."
                raise Conflict(message, param=HEADER, code="idempotency_key_in_use")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)

    async def _reserve(self) -> tuple[str, str | None]:
        """Reserve the key for `_LEASE` seconds, unless another request has reserved the key. Repeating the call is safe.

        Return a verdict and the id of the other request's response. The id is None if it is not known. The verdict is one of:

        reserved    the caller must run the request
        running     another request with the key is running
        done        another request with the key has created its response
        different   the key belongs to a request with a different body
        """
        args: Args = [self._request_hash, self._token, int(_LEASE * 1000)]
        verdict, *rest = await self._state.client.script(_RESERVE, [self._name], args)
        return verdict.decode(), rest[0].decode() if rest and rest[0] is not None else None

    async def run(
        self, batches: AsyncGenerator[list[Event], None], request: CreateResponse, *, open_reasoning: bool
    ) -> AsyncGenerator[list[Event], None]:
        """Yield the events of the run `batches`. If the key already has a response, yield that response's events instead.

        If `open_reasoning` is true, reasoning events have the names of Open Responses. Raises the errors of `earlier` and
        `making`.
        """
        async with aclosing(batches), self.making():
            stored = await self.earlier(wait=not request.stream)
            if stored is not None:
                annotate(outcome="repeated", response=stored.document)
                yield events_of(whole(stored.document, request.include), open_reasoning=open_reasoning)
                return
            async for events in batches:
                if events and events[-1].type in TERMINAL:
                    document = events[-1].data["response"]
                    if document["store"]:
                        await self.complete(document["id"])
                yield events
            if not self._may_exist:
                await self._release()

    @asynccontextmanager
    async def making(self) -> AsyncIterator[None]:
        """Renew the key's lease while the `with` block reserves the key and creates the response.

        If the block fails, release the key if it is reserved, unless the response may already be stored. Raises the gate's
        errors before Redis is used.
        """
        await self._gate()
        async with in_background(self._renew()):
            try:
                yield
            except BaseException as error:
                # After these errors, the response may be stored, so that a repeated request must not create another one.
                if not (self._may_exist and isinstance(error, StateUnavailable | GeneratorExit | asyncio.CancelledError)):
                    await self._release()
                raise

    async def name(self, response_id: str) -> None:
        """Record the id of a background response before its creation.

        Raises `Conflict` if the reservation has expired, or `StateUnavailable` if Redis fails.
        """
        if not await self._update(_LEASE, response_id):
            message = f"The reservation of this '{HEADER}' expired, because the request took too long. Repeat the request."
            raise Conflict(message, param=HEADER, code="idempotency_key_in_use")
        self._may_exist = True

    async def complete(self, response_id: str) -> None:
        """Record that the response is complete. Repeated requests then get it. If Redis is unavailable, log a warning."""
        self._may_exist = True
        try:
            await self._update(_KEPT, response_id, done="1")
        except StateUnavailable as error:
            logger.warning("could not save response %s for its idempotency key: %s", response_id, error.message)

    async def _release(self) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self._update(0)
            except StateUnavailable as error:
                logger.debug("could not release an idempotency key; it expires with its lease: %s", error.message)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL_INTERVAL)
            try:
                await self._update(_LEASE)
            except StateUnavailable as error:
                logger.debug("could not renew the lease of an idempotency key: %s", error.message)

    async def _update(self, seconds: float, response_id: str = "", *, done: str = "") -> bool:
        """Keep the key for at least `seconds`, or delete it if `seconds` is 0. Return false if the reservation has expired."""
        args: Args = [self._token, int(seconds * 1000), response_id, done]
        return bool(await self._state.client.script(_UPDATE, [self._name], args))
