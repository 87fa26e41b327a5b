"""HTTP responses: JSON, errors, and the events of a run. If the client disconnects, a foreground run is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

import anyio
import orjson
from starlette import responses
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from ..engine.run import Outlet
from ..errors import APIError, without_traceback
from ..protocol.sse import DONE_FRAME, KEEP_ALIVE, encode, frame
from ..protocol.types import Event
from ..settings.groups import ServerSettings
from ..state import Batch
from ..tasks import MAX_INLINE_BYTES, background_task
from ..telemetry.context import annotate
from .telemetry import TelemetryMiddleware

logger = logging.getLogger(__name__)

Batches = AsyncGenerator[Any, None]
"""Batches of events, from a run or from the log of a background response."""

KEEP_ALIVE_INTERVAL = 7.5
"""Seconds between two checks of a stream. If nothing was sent in between, a comment or a `keepalive` event is sent.

A silence thus lasts at most twice as long, 15 s.
"""

BODY_WRITER = "responses_mw.body_writer"
"""The key in a request's scope under which the standalone server stores a `BodyWriter`.

Middleware around the application cannot see or change what the writer sends. In `responses-mw serve`, no middleware needs to.
"""

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the stream
]
TRY_AGAIN_LATER = 1013
"""The WebSocket close code of a server that is overloaded (IANA, "WebSocket Close Code Number Registry")."""


class FlowControl(Protocol):
    """What `BodyWriter` reads of the connection's flow control."""

    write_paused: bool
    """Whether the client has not read enough of what was sent."""


class BodyWriter:
    """Writes directly to the chunked body of a response that has started. Unlike ASGI's `send`, `write` is not awaited."""

    __slots__ = ("_flow", "_transport", "writes")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow
        self.writes = 0
        """Number of writes so far."""

    def is_ready(self) -> bool:
        """Return whether the client is connected and its connection accepts data without waiting."""
        return not (self._flow.write_paused or self._transport.is_closing())

    def write(self, data: bytes) -> None:
        """Write `data`, which must not be empty. Call this only if the writer is ready."""
        self.writes += 1
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class JSONResponse(responses.JSONResponse):
    """Starlette's JSON response, but encoded by orjson."""

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class ErrorResponse(JSONResponse):
    """An error in OpenAI's format, as the response to an HTTP request or to a WebSocket upgrade.

    Some ASGI servers do not support the extension `websocket.http.response`. They refuse an upgrade with a 403 without a body.
    """

    def __init__(self, error: APIError, cause: Exception | None = None) -> None:
        """If `cause` is set, it is recorded in logs and spans instead of `error`. Its message is not sent to the client."""
        super().__init__(error.body(), error.status, error.headers)
        self._cause = without_traceback(cause or error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._refuse_upgrade(scope, receive, send)
        else:
            annotate(error=self._cause)
            await super().__call__(scope, receive, send)

    async def _refuse_upgrade(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_refusal(message: Message) -> None:
            if "websocket.http.response" in scope.get("extensions", {}):
                await send({**message, "type": f"websocket.{message['type']}"})
            elif message["type"] == "http.response.start":
                await send({"type": "websocket.close", "code": TRY_AGAIN_LATER})

        async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await self(scope, receive, send)
            except OSError:
                logger.debug("the client disconnected before its upgrade was refused")

        await receive()
        await TelemetryMiddleware(refuse)({**scope, "type": "http", "method": "GET"}, receive, send_refusal)


def error_response(error: Exception) -> ErrorResponse | None:
    """Return the response to a request that failed with `error`.

    An `APIError` has its own response. For a `ClientDisconnect`, return None. Log any other exception, and return a 500.
    """
    if isinstance(error, APIError):
        return ErrorResponse(error)
    if isinstance(error, ClientDisconnect):
        return None
    logger.error("a request failed", exc_info=error)
    return ErrorResponse(APIError("The server had an error while processing your request."), error)


class EventResponse:
    """Base class of responses that are made from the events of one run. If the client disconnects, the run is closed.

    An error of the run is raised. Before `has_started` is set, an error response can be sent instead.
    """

    def __init__(self, run: Batches, settings: ServerSettings) -> None:
        self._run = run
        self._settings = settings
        self.has_started = False
        """Whether the response may have started."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = anyio.CancelScope()
        watching = background_task(cancel_on_disconnect(receive, reply))  # a task group would wrap exceptions of the reply
        try:
            with reply:
                async with aclosing(self._run):
                    await self._answer(scope, receive, send)
        except OSError:
            logger.debug("the client disconnected")  # some ASGI servers raise an OSError in this case
        finally:
            watching.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


async def cancel_on_disconnect(receive: Receive, reply: anyio.CancelScope) -> None:
    """Cancel `reply` when the client disconnects, or when `receive` fails."""
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except Exception as error:  # noqa: BLE001 (without a watcher, the upstream would go on for a client that has left)
        logger.info("the connection of a client failed: %r", error)
    reply.cancel()


class RunJSONResponse(EventResponse):
    """A JSON response with the document in the run's last event."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = None
        async for events in self._run:
            if events:
                response = events[-1].data["response"]
        assert response is not None, "a run ends with its document"
        encoded = JSONResponse(response)
        self.has_started = True
        await encoded(scope, receive, send)


class EventStreamResponse(EventResponse):
    """The events of a run as server-sent events. A batch becomes one ASGI message, a large one several. No event is split.

    Deltas that the run passes to `outlet` are written directly to the connection, with the scope's `BODY_WRITER`. `outlet` must
    be None if the scope has no `BODY_WRITER`.
    """

    def __init__(self, run: Batches, settings: ServerSettings, outlet: Outlet | None = None) -> None:
        super().__init__(run, settings)
        self._outlet = outlet
        self._writer: BodyWriter | None = None
        self._encoded_up_to = 0
        self._complete = True
        self._keeping_alive: asyncio.Task[None] | None = None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = await anext(self._run)  # an error before the first batch can still become an HTTP error response
        self.has_started = True
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        self._watch(send)
        try:
            await send(_message(b"".join(self._encode(first))))
            del first  # its copies of the document would take 4 kB per stream
            if self._outlet is not None:
                self._writer = writer = scope[BODY_WRITER]
                self._outlet.open(writer.is_ready, writer.write)
            async for batch in self._run:
                for body in self._encode(batch):
                    await send(_message(body))
                    if len(body) > MAX_INLINE_BYTES:
                        await asyncio.sleep(0)  # `send` waits only if the client has not read earlier parts
        finally:
            if self._outlet is not None:
                self._outlet.close()
            self._timer.cancel()
            if self._keeping_alive is not None:
                self._keeping_alive.cancel()  # if a slow client blocks the keep-alive, it must not follow the last event
        if not self._complete:
            annotate(outcome="interrupted")
        await send({"type": "http.response.body", "body": DONE_FRAME if self._complete else b"", "more_body": False})

    def _encode(self, batch: Any) -> Iterable[bytes]:
        """Encode a batch as the bodies of one or more messages."""
        if len(batch) > 1:
            return self._encode_parts(batch)
        self._encoded_up_to += 1
        return (encode(batch),)

    def _encode_parts(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Encode each part after the previous one is sent, so that other requests do not wait for all of a large batch."""
        part, size = [], 0
        for event in events:
            part.append(encode((event,)))
            size += len(part[-1])
            self._encoded_up_to += 1
            if size > MAX_INLINE_BYTES:
                yield b"".join(part)
                part, size = [], 0
        if part:
            yield b"".join(part)

    def _next_number(self) -> int:
        """Return the number of the next event that will be sent."""
        return self._encoded_up_to + (self._writer.writes if self._writer else 0)

    def _watch(self, send: Send, before: int = -1) -> None:
        """Send a keep-alive if the next event's number is still `before`, and schedule the next check."""
        # One check per interval needs neither a timer per token nor a task per stream.
        number = self._next_number()
        if number == before and (self._keeping_alive is None or self._keeping_alive.done()):
            self._keeping_alive = asyncio.create_task(self._keep_alive(send))  # a timer has no task group
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_INTERVAL, self._watch, send, number)

    async def _keep_alive(self, send: Send) -> None:
        body = KEEP_ALIVE
        if self._settings.keep_alive != "comment":
            body = frame("keepalive", orjson.dumps({"type": "keepalive", "sequence_number": self._next_number() - 1}))
        with suppress(OSError):  # the client disconnected
            await send(_message(body))


def _message(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


class LogStreamResponse(EventStreamResponse):
    """A stream of the events in the log of a background response.

    If `batches` ends without the final batch, `[DONE]` is not sent. The client can then resume the stream on another replica.
    """

    def __init__(self, batches: AsyncGenerator[Batch, None], settings: ServerSettings) -> None:
        super().__init__(batches, settings)
        self._complete = False

    def _encode(self, batch: Any) -> Iterable[bytes]:
        self._encoded_up_to = batch.last + 1
        self._complete = batch.final
        return (batch.data,)
