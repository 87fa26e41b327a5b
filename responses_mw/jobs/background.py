"""What the routes ask of background responses. All of it works on any replica, with or without a worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from ..auth import Gate
from ..crypto import Sealer
from ..engine.run import Run
from ..errors import BadRequest, NotSupported, Unavailable
from ..protocol import sse
from ..protocol.types import Document
from ..settings import Settings
from ..state import Batch, Deleted, Fenced, State, StateUnavailable, Taken
from ..telemetry import with_trace_context
from .finalize import write_end
from .follower import Followers

logger = logging.getLogger(__name__)

RUNNING = frozenset({"queued", "in_progress"})
# How long the creation of a job may take before somebody looks what became of it.
_CREATION = 5.0
_CANCEL_TRIES = 10
_OTHERS_TURN = 0.05


class Background:
    def __init__(self, state: State, followers: Followers, sealer: Sealer, settings: Settings) -> None:
        self._state = state
        self._followers = followers
        self._sealer = sealer
        self._settings = settings
        self._keys_agree = settings.redis.url is None  # what is embedded has no other replicas

    async def check_secrets(self) -> None:
        """Raises ``NotSupported`` where other replicas could not open the credential that a job runs with, ``Unavailable``
        where that cannot be told."""
        if self._settings.redis.url is not None and not self._sealer.is_shared:
            raise NotSupported(
                "Background responses need 'auth.secret_keys' (RESPONSES_MW_AUTH_SECRET_KEYS), equal on all replicas: "
                "the credential that a job runs with is stored encrypted.",
                param="background",
            )
        if not self._keys_agree:
            self._keys_agree = await self._state.check_keys(self._sealer.key_ids)
        if not self._keys_agree:
            raise NotSupported(
                "Background responses need 'auth.secret_keys' (RESPONSES_MW_AUTH_SECRET_KEYS) that are equal on all replicas: "
                "this one's are not those of the others.",
                param="background",
            )

    async def create(self, run: Run, body: dict[str, Any], gate: Gate) -> Document:
        """Stores ``run``, made of the request ``body``, as a job, and returns its document (queued)."""
        await gate()
        if not run.document["store"]:
            raise Unavailable("The state store is nearly full: no background response can be made now.")
        start = sse.encode(run.assembler.start(queued=True))
        document, owner = run.document, run.context.owner
        request = {name: value for name, value in body.items() if name not in ("input", "tools")}
        # Tools hold credentials too: those of MCP servers.
        secrets = {"headers": with_trace_context(run.caller.headers), "tools": body.get("tools")}
        sealed = self._sealer.seal(orjson.dumps(secrets), purpose=purpose(document["id"]), owner=owner)
        await self._state.queue.reserve(document["id"], owner, _CREATION)
        try:
            await self._state.jobs.create(document, request, run.context.input, owner, sealed, Batch(0, 1, start))
        except Deleted:
            raise Unavailable("The state store took too long to take the response; try again.") from None
        try:
            await self._state.queue.ready(document["id"])
        except StateUnavailable as error:  # it is stored: who looks what became of its creation enters it
            logger.warning("response %s waits longer: %s", document["id"], error.message)
        return document

    def follow(self, document: Document, *, after: int = -1) -> AsyncGenerator[Batch, None]:
        """The events of a background response with a number greater than ``after``: what there is, then what comes."""
        return self._followers.follow(document, after)

    async def cancel(self, response_id: str, owner: str) -> Document:
        """Cancels a response that runs, and returns its document as it is then; one that has ended stays as it is.

        Raises ``BadRequest`` for one that is not a background response, ``Missing``.
        """
        for _ in range(_CANCEL_TRIES):
            document = (await self._state.responses.get(response_id, owner)).document
            if not document["background"]:
                raise BadRequest("Cannot cancel a synchronous response.", param="response_id")
            if document["status"] not in RUNNING:
                return document
            taken = await self._take(response_id, "cancel", owner)
            if taken.job is None:
                continue  # it ended just now
            if taken.worker:
                await self._state.jobs.tell(taken.worker, response_id)
            try:
                return await write_end(self._state, taken)
            except Fenced:
                await asyncio.sleep(_OTHERS_TURN)  # somebody else cancels it too, and would be fenced by the next try
        raise Unavailable("The response could not be cancelled; try again.")

    async def delete(self, response_id: str, owner: str) -> None:
        """Deletes a response; one that runs in the background is cancelled first. Raises ``Missing``."""
        document = (await self._state.responses.get(response_id, owner)).document
        if document["status"] in RUNNING:
            await self.cancel(response_id, owner)
        await self._state.responses.delete(response_id, owner)

    async def settle(self, response_id: str) -> None:
        """Writes the end of a response whose worker was lost; one that did not begin waits for another worker, and is put
        back in the queue if it is not there any more."""
        taken = await self._take(response_id, "settle")
        if taken.unseen and await self._state.queue.restore(response_id, taken.unseen):
            logger.warning("response %s had lost its place in the queue", response_id)
        if taken.job is not None:
            try:
                await write_end(self._state, taken)
            except (Deleted, Fenced):
                logger.debug("response %s was settled by somebody else", response_id)

    async def _take(self, response_id: str, why: str, owner: str = "") -> Taken:
        lease, attempts = self._settings.jobs.lease, self._settings.jobs.max_attempts
        return await self._state.jobs.take(response_id, why, worker="", lease=lease, max_attempts=attempts, owner=owner)


def purpose(response_id: str) -> str:
    """What the envelope of a job's secrets is for."""
    return f"job {response_id}"
