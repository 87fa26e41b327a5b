"""A WebSocket connection and its lanes, each of which has one running response.

1. Frames are read as they arrive, so that a disconnect is noticed at once. A limited number of requests wait in their lanes, in
   order.
2. Each lane is a task that sends the events of its runs. A client that does not read blocks `send`, and thereby the runs of its
   own connection.
3. A connection has a maximum lifetime. After it, or when the server shuts down, the connection accepts no more requests, and is
   closed when the running responses have ended.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from itertools import chain
from typing import Any

import anyio
from anyio.abc import TaskGroup
from starlette.types import Message, Receive, Send

from ...cache.policy import policy_of
from ...engine.run import REQUEST_LIMITS, RunMode
from ...engine.runner import Runner
from ...errors import APIError, BadRequest, RateLimited
from ...protocol.request.create import CreateResponse
from ...settings import CacheSettings
from ...threads import by_size
from ...upstream import Caller
from . import frames
from .frames import Create
from .memory import ConnectionHistory, Share

logger = logging.getLogger(__name__)

MAX_LIFETIME = 3600.0
"""Seconds after which a connection accepts no new requests, as at OpenAI. It is closed when its responses have ended."""
MAX_LANES = 32
"""Maximum concurrent responses of a connection. More need another connection, and an owner's connections are limited."""

Parse = Callable[[Any, int], CreateResponse]
"""Parse the body of a request, given its size. Raises `BadRequest`."""

Admission = Callable[[Caller], AbstractAsyncContextManager[None]]
"""Return the context manager for one response of a caller. Raises `APIError` if the response is not admitted."""

MAX_WAITING = 64
"""Maximum number of waiting requests in all lanes of a connection."""
_GOING_AWAY, _BROKEN, _SERVICE_RESTART = 1001, 1011, 1012


class WebSocketConnection:
    """An accepted WebSocket. `held` keeps its unstored responses; the owner's `share` counts its waiting requests."""

    def __init__(
        self,
        runner: Runner,
        held: ConnectionHistory,
        share: Share,
        parse: Parse,
        admission: Admission,
        caller: Caller,
        caching: CacheSettings,
        max_frame_bytes: int,
        receive: Receive,
        send: Send,
    ) -> None:
        self._runner = runner
        self._held = held
        self._share = share
        self._parse = parse
        self._admission = admission
        self._caller = caller
        self._caching = caching
        self._max_frame_bytes = max_frame_bytes
        self._limits = REQUEST_LIMITS
        self._receive = receive
        self._send = send
        self._lanes: dict[str | None, deque[Create]] = {}
        """The waiting requests of each lane that has a running response."""
        self._waiting = 0
        self._refusal: APIError | None = None
        """Why no more requests are accepted; None while they are."""
        self._idle = anyio.Event()

    async def run(self) -> None:
        """Serve until the client disconnects, which cancels its runs, or until the connection has been wound up."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._wind_up_with_server, group)
                with anyio.move_on_after(MAX_LIFETIME) as time:
                    await self._read(group)
                if time.cancelled_caught:
                    group.start_soon(self._wind_up, group, _GOING_AWAY, _limit_reached())
                    await self._read(group)
                group.cancel_scope.cancel()
        finally:
            self._held.close()
            for create in chain.from_iterable(self._lanes.values()):
                self._share.leave(create.size)

    async def _wind_up_with_server(self, group: TaskGroup) -> None:
        drain = self._runner.drain
        await drain.begun.wait()
        await self._wind_up(group, _SERVICE_RESTART, drain.error())

    async def _wind_up(self, group: TaskGroup, code: int, error: APIError) -> None:
        """Refuse further requests with `error`, and close the connection when the last response has ended."""
        self._refusal = error
        if self._lanes:
            await self._idle.wait()
        await self._close(group, code, error)

    async def _close(self, group: TaskGroup, code: int, error: APIError) -> None:
        try:
            await self._send_text(frames.error_text(error, None))
            await self._send({"type": "websocket.close", "code": code})
        except OSError:
            logger.debug("the client disconnected")
        group.cancel_scope.cancel()

    # -- frames ---------------------------------------------------------------------------------------------------------------

    async def _read(self, group: TaskGroup) -> None:
        """Process frames until the client disconnects."""
        with suppress(OSError):
            while (message := await self._receive())["type"] != "websocket.disconnect":
                await self._take(_data(message), group)

    async def _take(self, data: bytes, group: TaskGroup) -> None:
        lane = None
        try:
            frame = await by_size(len(data), frames.decode_frame, data, self._limits, maximum=self._max_frame_bytes)
            lane = frames.lane_of(frame)
            if frames.kind_of(frame) == frames.STEER:
                await self._send_text(frames.steer_failed_text(frame, lane))
            else:
                self._begin(frames.create(frame, lane, len(data)), group)
        except APIError as error:
            await self._send_text(frames.error_text(error, lane))

    def _begin(self, create: Create, group: TaskGroup) -> None:
        """Start the response, or queue the request in its lane. Raises `APIError` if the request is refused."""
        if self._refusal is not None:
            raise self._refusal
        lane = self._lanes.get(create.lane)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:
                raise RateLimited(f"The connection already has {MAX_LANES} responses in progress.")
            self._lanes[create.lane] = deque()
            group.start_soon(self._serve, create, group)
        elif self._waiting >= MAX_WAITING:
            raise RateLimited("Too many requests are waiting on the connection.")
        else:
            self._share.enter(create.size)
            self._waiting += 1
            lane.append(create)

    # -- responses ------------------------------------------------------------------------------------------------------------

    async def _serve(self, first: Create, group: TaskGroup) -> None:
        """Make the responses of one lane until no request is waiting in it."""
        lane = self._lanes[first.lane]
        await self._guard(first, group)
        while lane:
            create = lane.popleft()
            self._waiting -= 1
            self._share.leave(create.size)
            await self._guard(create, group)
        del self._lanes[first.lane]
        if self._refusal is not None and not self._lanes:
            self._idle.set()

    async def _guard(self, create: Create, group: TaskGroup) -> None:
        try:
            await self._respond(create)
        except OSError:
            logger.debug("the client disconnected")  # some servers report this by an OSError
            group.cancel_scope.cancel()
        except Exception:  # the outer edge of a response: close the connection, or the client would wait forever
            logger.exception("a response on a WebSocket failed")
            await self._close(group, _BROKEN, APIError("The server had an error while processing your request."))

    async def _respond(self, create: Create) -> None:
        """Send the events of one response, or an error if it is not admitted or fails before it starts."""
        caller = self._caller.again()
        try:
            async with self._admission(caller):
                await self._run(create, caller)
        except APIError as error:
            await self._send_text(frames.error_text(error, create.lane))

    async def _run(self, create: Create, caller: Caller) -> None:
        """Run an admitted request. If it fails, evict the previous response from memory."""
        succeeded = False
        try:
            request = await by_size(create.size, self._parse, create.body, create.size)
            succeeded = await self._stream(request, create, caller)
        finally:
            if not succeeded and create.parent is not None:
                self._held.evict(create.parent)

    async def _stream(self, request: CreateResponse, create: Create, caller: Caller) -> bool:
        """Send the events of the run. Return False if the response failed."""
        if create.generate:
            policy = policy_of(request.cache, None, self._caching, stored=request.store)
            run = self._runner.run(request, caller, RunMode.STREAMED, policy=policy, history=self._held).batches
        else:
            run = self._runner.create_without_model(request, caller, self._held)
        last = ""
        async with aclosing(run):
            async for events in run:
                for event in events:
                    await self._send_text(frames.event_text(event, create.lane))
                last = events[-1].type
        return last != "response.failed"

    async def _send_text(self, text: str) -> None:
        await self._send({"type": "websocket.send", "text": text})


def _limit_reached() -> BadRequest:
    minutes = f"{MAX_LIFETIME / 60:g} minutes"
    message = f"The connection has reached its limit of {minutes}. Create a new WebSocket connection to continue."
    return BadRequest(message, code="websocket_connection_limit_reached")


def _data(message: Message) -> bytes:
    text = message.get("text")
    return message.get("bytes") or b"" if text is None else text.encode()
