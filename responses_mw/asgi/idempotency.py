"""Idempotent creates. A request that repeats an `Idempotency-Key` gets the response to the first request with the key.

The header is defined by draft-ietf-httpapi-idempotency-key-header.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import orjson
from starlette.datastructures import Headers

from ..auth import Gate
from ..errors import BadRequest, Conflict
from ..protocol.request.create import CreateResponse
from ..protocol.response.document import whole
from ..protocol.response.events import TERMINAL, Event, events_of
from ..state import Missing, Reservation, State, StateUnavailable, Stored
from ..state.idempotency import LEASE
from ..telemetry.context import annotate
from ..threads import by_size, in_background
from ..upstream import Caller

logger = logging.getLogger(__name__)

HEADER = "Idempotency-Key"
_KEY = re.compile(r"[!-~]{1,255}")
RENEWAL_INTERVAL = LEASE / 3
_MIN_PAUSE, _MAX_PAUSE = 0.05, 1.0
"""Initial and maximum number of seconds between two checks whether the other request has ended."""


async def once(
    headers: Headers, state: State | None, parsed: CreateResponse, body: Any, caller: Caller, gate: Gate
) -> OnceOnly | None:
    """Return the guard against running a request twice, or None if `headers` contain no `Idempotency-Key`.

    `body` is the decoded body of the request.

    Raises `BadRequest` if the key is invalid, if the request sets `store: false`, or if `state` is None.
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
    return OnceOnly(Reservation(state.client, caller.owner, keys[0], canonical), state, caller.owner, gate)


@dataclass(eq=False)
class OnceOnly:
    """Guard that prevents a request with an idempotency key from running twice."""

    reservation: Reservation
    state: State
    owner: str
    gate: Gate
    _may_exist: bool = False

    async def earlier(self, *, wait: bool) -> Stored | None:
        """Return the response that has been created with the key, or reserve the key and return None.

        While another request is creating the response, wait if `wait` is true, otherwise raise `Conflict`. Raises `BadRequest`
        if the key was used with another body, `Missing` if the response has been deleted, and the errors of the gate.
        """
        await self.gate()
        pause = _MIN_PAUSE
        while True:
            verdict, response_id = await self.reservation.reserve()
            if verdict == "reserved":
                return None
            if verdict == "different":
                message = f"The header '{HEADER}' has been used for a request with another body."
                raise BadRequest(message, param=HEADER, code="idempotency_key_reused")
            if response_id is not None:
                try:
                    return await self.state.responses.get(response_id, self.owner)
                except Missing:
                    if verdict == "done":
                        raise
            if not wait:
                message = f"A request with this '{HEADER}' is in progress. Its response can be streamed when it has ended."
                raise Conflict(message, param=HEADER, code="idempotency_key_in_use")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)

    async def run(
        self, batches: AsyncGenerator[list[Event], None], request: CreateResponse, *, open_reasoning: bool
    ) -> AsyncGenerator[list[Event], None]:
        """Yield the events in `batches`. If a response has been created with the key, yield its events instead.

        Raises the errors of `earlier`.
        """
        async with aclosing(batches):
            stored = await self.earlier(wait=not request.stream)
            if stored is not None:
                annotate(outcome="repeated", response=stored.document)
                yield events_of(whole(stored.document, request.include), open_reasoning=open_reasoning)
                return
            async with self.making():
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
        """Renew the key's lease during the `with` block, which creates the response. If the block fails, release the key."""
        async with in_background(self._renew()):
            try:
                yield
            except BaseException as error:
                # After these errors, the response may be stored, so that a repeated request must not create another one.
                if not (self._may_exist and isinstance(error, StateUnavailable | GeneratorExit | asyncio.CancelledError)):
                    await self._release()
                raise

    async def name(self, response_id: str) -> None:
        """Record the id of a background response before its creation. Raises `Conflict` if the key has been lost."""
        if not await self.reservation.name(response_id):
            message = f"This request took so long that another with its '{HEADER}' has begun. Repeat it to get its response."
            raise Conflict(message, param=HEADER, code="idempotency_key_in_use")
        self._may_exist = True

    async def complete(self, response_id: str) -> None:
        """Record that the response is complete, so that repeated requests get this response."""
        self._may_exist = True
        try:
            await self.reservation.complete(response_id)
        except StateUnavailable as error:
            logger.warning("could not save response %s for its idempotency key: %s", response_id, error.message)

    async def _release(self) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self.reservation.release()
            except StateUnavailable as error:
                logger.debug("could not release an idempotency key; it expires with its lease: %s", error.message)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL_INTERVAL)
            try:
                await self.reservation.renew()
            except StateUnavailable as error:
                logger.debug("could not renew the lease of an idempotency key: %s", error.message)
