"""WebSocket mode: `GET /v1/responses` with an upgrade (OpenAI reference, "WebSocket mode").

1. Requests with the same `stream_id` form a lane. The requests of a lane run one after another, and lanes run concurrently.
   Each lane is a task. If the client stops reading, `send` blocks, and all runs of the connection wait.
2. Frames are read as they arrive, so that a disconnect is detected immediately.
3. A connection accepts no more requests after its maximum lifetime, or when the server shuts down. It is closed when the
   accepted requests have ended.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import anyio
import orjson
from anyio.abc import TaskGroup
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from ..cache.policy import policy_of
from ..engine.run import RunMode
from ..errors import APIError, BadRequest, RateLimited, TooLarge, Unavailable, without_traceback
from ..protocol import checks, json_limits
from ..tasks import background_task, by_size, loads
from ..telemetry.context import annotate
from ..upstream import Caller
from .capture_header import asks_for_capture
from .http_responses import ErrorResponse
from .requests import EndpointContext
from .telemetry import websocket_request_span
from .websocket_memory import ConnectionHistory, Memory, Share

logger = logging.getLogger(__name__)

MAX_LIFETIME = 3600.0
"""Number of seconds that a connection accepts requests, as in OpenAI's API."""
MAX_LANES = 32
"""Maximum number of concurrent responses on a connection."""
MAX_WAITING = 64
"""Maximum number of waiting requests in all lanes of a connection."""

_LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_CREATE, _STEER = "response.create", "response.steer"
_GOING_AWAY, _BROKEN, _SERVICE_RESTART = 1001, 1011, 1012


class WebSockets:
    """An ASGI application that serves the WebSockets of this process."""

    def __init__(self, context: EndpointContext) -> None:
        self._context = context
        memory_bytes = context.settings.limits.memory_bytes
        self._memory = Memory(owner_bytes=memory_bytes // 4, total_bytes=memory_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            caller = await self._verify(scope)
        except APIError as error:
            await ErrorResponse(error)(scope, receive, send)
            return
        context = self._context
        with self._memory.share(caller.owner) as share:
            await WebSocket(scope, receive, send).accept()
            history = ConnectionHistory(context.state, share, required=context.settings.state.required)
            await WebSocketConnection(context, history, share, caller, scope, receive, send).run()

    async def _verify(self, scope: Scope) -> Caller:
        """Return the verified caller. Raises `APIError` if the upgrade must be refused."""
        self._context.origins.check(Headers(scope=scope))
        # The upstream is always called over HTTP, even if it is an application in this process.
        http_scope = {**scope, "scheme": "https" if scope.get("scheme") == "wss" else "http"}
        # A request with `generate: false` does not call the upstream, which would check the credential.
        caller = await self._context.verify(HTTPConnection(http_scope))
        shares, total = self._memory.shares, self._context.settings.server.max_websockets
        maximum = max(1, total // 5)
        if caller.owner in shares and shares[caller.owner].connections >= maximum:
            raise RateLimited(f"You already have {maximum} open WebSocket connections.")
        if sum(share.connections for share in shares.values()) >= total:
            raise Unavailable("This server has too many open WebSocket connections.", retry_after=5)
        return caller


@dataclass(frozen=True, slots=True)
class Create:
    """A `response.create` frame of `size` bytes. `body` is the body of the equivalent POST request.

    `lane` is the frame's `stream_id`, or None. If `generate` is false, no model is called, and the response has no output.
    """

    body: dict[str, Any]
    lane: str | None
    generate: bool
    size: int


@dataclass(eq=False)
class WebSocketConnection:
    """An accepted WebSocket. Its waiting requests use memory of the owner's `share`."""

    context: EndpointContext
    history: ConnectionHistory
    share: Share
    caller: Caller
    scope: Scope
    receive: Receive
    send: Send
    _lanes: dict[str | None, deque[bytes]] = field(default_factory=dict)
    """The waiting frames of each lane that has a running response, not decoded, because that can take 30 times the memory."""
    _refusal: APIError | None = None
    """The error for further requests, or None while requests are accepted."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no response is running or waiting, and further requests are refused."""
    _open: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Cancelled to end the connection."""
    _serving: set[anyio.CancelScope] = field(default_factory=set)
    """A scope for each lane. If the task group cancelled a task, only the garbage collector would free its stack frames."""
    _group: TaskGroup = field(init=False)

    async def run(self) -> None:
        """Serve requests until the connection is closed. If the client disconnects, all runs are cancelled."""
        ending = background_task(self._wind_up())
        try:
            async with anyio.create_task_group() as self._group:
                with self._open:
                    await self._read()
                for scope in self._serving:
                    scope.cancel()
        finally:
            ending.cancel()
            self.history.close()
            for data in chain.from_iterable(self._lanes.values()):
                self.share.leave(len(data))

    async def _wind_up(self) -> None:
        """After the lifetime or when the server stops, refuse further requests. Close the connection when it is idle."""
        drain = self.context.runner.drain
        ending: tuple[int, APIError] = _SERVICE_RESTART, drain.error()
        try:
            async with asyncio.timeout(MAX_LIFETIME):
                await drain.begun.wait()
        except TimeoutError:
            limit = f"The connection has reached its limit of {MAX_LIFETIME / 60:g} minutes."
            message = f"{limit} Create a new WebSocket connection to continue."
            ending = _GOING_AWAY, BadRequest(message, code="websocket_connection_limit_reached")
        _, self._refusal = ending
        if self._lanes:
            await self._idle.wait()
        await self._close(*ending)

    async def _close(self, code: int, error: APIError) -> None:
        try:
            await self._send_error(error, None)
            if not self._open.cancel_called:
                await self.send({"type": "websocket.close", "code": code})
        except OSError:
            logger.debug("the client disconnected")
        self._open.cancel()

    # -- frames ---------------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Process frames until the client disconnects."""
        with suppress(OSError):
            while await self._process(await self.receive()):  # no variable keeps the last message, which may be large
                pass

    async def _process(self, message: Message) -> bool:
        """Process one frame. Return false if the client has disconnected."""
        if message["type"] == "websocket.disconnect":
            return False
        text, lane = message.get("text"), None
        data = message.get("bytes") or b"" if text is None else text.encode()
        try:
            frame = await self._decode(data)
            lane = _lane_of(frame)
            if _type_of(frame) == _STEER:
                await self._send_data(_steer_failed(frame), lane)
            else:
                self._begin(_create(frame, lane, len(data)), data)
        except APIError as error:
            await self._send_error(error, lane)
        return True

    async def _decode(self, data: bytes) -> dict[str, Any]:
        return await by_size(len(data), _decoded, data, self.context.settings.limits.max_request_bytes)

    def _begin(self, create: Create, data: bytes) -> None:
        """Start the response, or queue its frame `data` if its lane is busy. Raises `RateLimited` or, if set, `_refusal`."""
        if self._refusal is not None:
            raise self._refusal
        lane = self._lanes.get(create.lane)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:
                raise RateLimited(f"The connection already has {MAX_LANES} responses in progress.")
            self._lanes[create.lane] = deque()
            self._serving.add(scope := anyio.CancelScope())
            self._group.start_soon(self._serve, create, scope)
        elif sum(map(len, self._lanes.values())) >= MAX_WAITING:
            raise RateLimited("Too many requests are waiting on the connection.")
        else:
            self.share.enter(len(data))
            lane.append(data)

    # -- responses ------------------------------------------------------------------------------------------------------------

    async def _serve(self, create: Create, scope: anyio.CancelScope) -> None:
        """Respond to `create` and to the waiting requests of its lane, and remove the lane."""
        lane = self._lanes[create.lane]
        with scope:
            await self._respond(create)
            while lane:
                data = lane.popleft()
                self.share.leave(len(data))
                create = _create(await self._decode(data), create.lane, len(data))
                await self._respond(create)
            del self._lanes[create.lane]
        self._serving.discard(scope)
        if self._refusal is not None and not self._lanes:
            self._idle.set()

    async def _respond(self, create: Create) -> None:
        """Send the events of one response, or an error if the request is refused. Close the connection after other errors."""
        model = create.body.get("model")
        caller = self.caller.again(model if isinstance(model, str) else None)
        try:
            try:
                with websocket_request_span(_CREATE, self.scope, caller.owner):
                    annotate(is_captured=asks_for_capture(Headers(scope=self.scope)))
                    await self.context.upstreams.verify(caller)  # the credential may have expired since the upgrade
                    await self.context.limits.request(self.scope, caller)
                    await self._run(create, caller)
            except APIError as error:
                await self._send_error(error, create.lane)
        except Exception:  # close the connection, because otherwise the client would wait forever
            logger.exception("a response on a WebSocket failed")
            await self._close(_BROKEN, APIError("The server had an error while processing your request."))

    async def _run(self, create: Create, caller: Caller) -> None:
        """Send the events of a response. If it fails, or its request is invalid, remove the previous response from memory."""
        context, has_failed, last = self.context, True, ""
        try:
            request = await by_size(create.size, context.reader.parse, create.body, create.size, self.scope)
            if create.generate:
                policy = policy_of(request.cache, None, context.settings.cache, stored=request.store)
                run = context.runner.run(request, caller, RunMode.STREAMED, policy=policy, history=self.history)
            else:
                run = context.runner.create_without_model(request, caller, self.history)
            async with aclosing(run):
                async for events in run:
                    for event in events:
                        await self._send_data(event.data, create.lane)
                    last = events[-1].type
            has_failed = last == "response.failed"
        finally:
            parent = create.body.get("previous_response_id")
            if has_failed and isinstance(parent, str):
                self.history.evict(parent)

    async def _send_error(self, error: APIError, lane: str | None) -> None:
        without_traceback(error)
        members: dict[str, Any] = error.body()["error"]
        members["code"] = members["code"] or members["type"]  # the specification requires a code
        if error.headers:
            members["headers"] = error.headers
        await self._send_data({"type": "error", "status": error.status, "error": members}, lane)

    async def _send_data(self, data: dict[str, Any], lane: str | None) -> None:
        if self._open.cancel_called:  # ASGI forbids messages after `websocket.close`
            return
        text = orjson.dumps(data if lane is None else {**data, "stream_id": lane}).decode()
        try:
            await self.send({"type": "websocket.send", "text": text})
        except OSError:  # some ASGI servers raise one if the client has disconnected
            logger.debug("the client disconnected")
            self._open.cancel()
            await anyio.sleep_forever()  # so that the run is cancelled, and does not fail


def _decoded(data: bytes, maximum: int) -> dict[str, Any]:
    if len(data) > maximum:
        raise TooLarge(f"The frame is larger than {maximum} bytes.")
    frame = json_limits.decode(data, "the JSON of your frame", loads=loads)
    if not isinstance(frame, dict):
        raise BadRequest(f"A frame must be a JSON object, but is {checks.kind_of(frame)}.", code="invalid_type")
    return frame


def _type_of(frame: dict[str, Any]) -> str:
    if frame.get("type") is None:
        checks.missing("type")
    return checks.one_of(frame["type"], "type", {_CREATE, _STEER})


def _lane_of(frame: dict[str, Any]) -> str | None:
    lane = frame.get("stream_id")
    if lane is not None and not _LANE.fullmatch(checks.string(lane, "stream_id")):
        message = "Invalid 'stream_id'. Expected 1 to 256 ASCII letters, digits, underscores, hyphens or periods."
        raise BadRequest(message, param="stream_id", code="invalid_value")
    return lane


def _create(frame: dict[str, Any], lane: str | None, size: int) -> Create:
    generate = frame.get("generate")
    if generate is not None:
        checks.boolean(generate, "generate")
    if frame.get("background"):
        checks.unsupported("background", "responses on a WebSocket run in the foreground; create it over HTTP.")
    body = {name: value for name, value in frame.items() if name not in ("type", "generate", "stream_id")}
    return Create({**body, "stream": True}, lane, generate is not False, size)


def _steer_failed(frame: dict[str, Any]) -> dict[str, Any]:
    """Return the frame that refuses a `response.steer`. It contains the input, so that the client can send it again."""
    error = {
        "type": "invalid_request_error",
        "code": "steering_not_supported",
        "message": "This server cannot steer a running response. Send the input in a response.create when it has ended.",
    }
    steer = {name: frame.get(name) for name in ("input", "previous_response_id")}
    return {"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": steer}
