"""Idempotent creation of responses. A request that repeats an `Idempotency-Key` gets the response to the first request.

The header is defined by draft-ietf-httpapi-idempotency-key-header.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from typing import Any

import anyio
import orjson
from starlette.datastructures import Headers

from ..auth import Gate
from ..backoff import Backoff
from ..errors import BadRequest, Conflict
from ..protocol.request.create import CreateResponse
from ..protocol.response.document import whole
from ..protocol.response.events import TERMINAL, events_of
from ..protocol.types import Event
from ..state import Missing, State, StateUnavailable, Stored
from ..state.idempotency import LEASE, IdempotencyKey, Reservation
from ..tasks import by_size, in_background
from ..telemetry.context import annotate
from ..upstream import Caller

logger = logging.getLogger(__name__)

HEADER = "Idempotency-Key"
_KEY = re.compile(r"[!-~]{1,255}")
RENEWAL_INTERVAL = LEASE / 3
_MIN_PAUSE, _MAX_PAUSE = 0.05, 1.0
"""Initial and maximum number of seconds between two checks of whether the other request has ended."""


async def once(headers: Headers, state: State | None, parsed: CreateResponse, body: Any, caller: Caller, gate: Gate) -> Guard:
    """Return the guard of the request, which prevents it from running twice if `headers` contain an `Idempotency-Key`.

    `body` is the decoded body of the request, with its prompt template applied.

    Raises `BadRequest` if there is more than one key, if the key is invalid, if the request sets `store: false`, or if `state`
    is None.
    """
    keys = headers.getlist(HEADER)
    if not keys:
        return Guard()
    if len(keys) > 1 or not _KEY.fullmatch(keys[0]):
        message = f"The header '{HEADER}' must be a single value of 1 to 255 visible ASCII characters."
        raise BadRequest(message, param=HEADER, code="invalid_idempotency_key")
    if state is None or not parsed.store:
        reason = "remove 'store: false'" if state is not None else "configure Redis"
        message = f"The header '{HEADER}' needs stored state: {reason}."
        raise BadRequest(message, param=HEADER, code="idempotency_key_not_supported")
    canonical = await by_size(parsed.size, lambda: orjson.dumps(body, option=orjson.OPT_SORT_KEYS))
    return OnceOnly(state, caller.owner, keys[0], canonical, gate)


def refuse_key(headers: Headers) -> None:
    """Raise `BadRequest` if `headers` contain an `Idempotency-Key`, for an endpoint that would execute the request again."""
    if HEADER in headers:
        message = f"The header '{HEADER}' is supported only for POST /v1/responses. Send this request without it."
        raise BadRequest(message, param=HEADER, code="idempotency_key_not_supported")


class Guard:
    """Guard of a request without an idempotency key, which always runs."""

    async def find_earlier(self, *, wait: bool) -> Stored | None:
        """Return the stored response to an earlier request with the key, or None if the caller must run the request."""
        return None

    def run(
        self, batches: AsyncGenerator[list[Event], None], request: CreateResponse, *, open_reasoning: bool
    ) -> AsyncGenerator[list[Event], None]:
        """Return the events of the run `batches`, or those of the stored response."""
        return batches

    def hold_key(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager for the creation of the response."""
        return nullcontext()

    async def name(self, response_id: str) -> None:
        """Record the id of a background response before its creation."""

    async def complete(self, response_id: str) -> None:
        """Record that the response is complete."""


class OnceOnly(Guard):
    """Guard that prevents a request with an idempotency key from running twice. It reserves the key in Redis."""

    def __init__(self, state: State, owner: str, key: str, request: bytes, gate: Gate) -> None:
        """`request` is the body of the request as JSON with sorted members. It must be equal in all requests with the key."""
        self._state = state
        self._owner = owner
        self._gate = gate
        self._key = IdempotencyKey(state.client, owner, key, request)
        self._may_exist = False

    async def find_earlier(self, *, wait: bool) -> Stored | None:
        """Return the stored response to an earlier request with the key. If there is none, reserve the key and return None.

        If another request is creating the response, wait for it. If `wait` is false, raise `Conflict` instead. Raises `Missing`
        if the response was deleted or has expired, `BadRequest` if the key was used with another body, or `StateUnavailable` if
        Redis fails.
        """
        backoff = Backoff(_MIN_PAUSE, _MAX_PAUSE)
        while True:
            result, response_id = await self._key.reserve()
            if result is Reservation.RESERVED:
                return None
            if result is Reservation.DIFFERENT:
                message = f"The header '{HEADER}' has been used for a request with another body."
                raise BadRequest(message, param=HEADER, code="idempotency_key_reused")
            if response_id is not None:
                try:
                    return await self._state.responses.get(response_id, self._owner)
                except Missing:
                    if result is Reservation.DONE:
                        raise
            if not wait:
                message = f"A request with this '{HEADER}' is in progress. Its response can be streamed when it has ended."
                raise Conflict(message, param=HEADER, code="idempotency_key_in_use")
            await backoff.wait()

    async def run(
        self, batches: AsyncGenerator[list[Event], None], request: CreateResponse, *, open_reasoning: bool
    ) -> AsyncGenerator[list[Event], None]:
        """Yield the events of the run `batches`. If the key already has a response, yield that response's events instead.

        If `open_reasoning` is true, reasoning events have the names of Open Responses. Raises the errors of `earlier` and
        `hold_key`.
        """
        async with aclosing(batches), self.hold_key():
            stored = await self.find_earlier(wait=not request.stream)
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
    async def hold_key(self) -> AsyncIterator[None]:
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
        if not await self._key.renew(response_id):
            message = f"The reservation of this '{HEADER}' expired, because the request took too long. Repeat the request."
            raise Conflict(message, param=HEADER, code="idempotency_key_in_use")
        self._may_exist = True

    async def complete(self, response_id: str) -> None:
        """Record that the response is complete. Repeated requests then get it. If Redis is unavailable, log a warning."""
        self._may_exist = True
        try:
            await self._key.complete(response_id)
        except StateUnavailable as error:
            logger.warning("could not save response %s for its idempotency key: %s", response_id, error.message)

    async def _release(self) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self._key.release()
            except StateUnavailable as error:
                logger.debug("could not release an idempotency key; it expires with its lease: %s", error.message)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL_INTERVAL)
            try:
                await self._key.renew()
            except StateUnavailable as error:
                logger.debug("could not renew the lease of an idempotency key: %s", error.message)
