"""A scripted Chat Completions server, as an ASGI application.

A test queues answers; each chat request takes the next one. An answer is played piece by piece: a chunk is sent at once, a
`Signal` holds the answer until the test sets it, and an exception breaks the answer off. The server records requests, and
whether the client left before the end of the answer.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import orjson
from starlette.types import Message, Receive, Scope, Send

Chunk = dict[str, Any]
Scripted = TypeVar("Scripted", bound="ScriptedUpstream")

DONE = b"data: [DONE]\n\n"
SSE = {"content-type": "text/event-stream; charset=utf-8"}
JSON = {"content-type": "application/json"}
TINY = {"id": "tiny", "object": "model", "created": 1, "owned_by": "vllm"}


class Signal:
    """An event that is set once. Any thread may set it, and any event loop may wait for it."""

    def __init__(self) -> None:
        self._future: Future[None] = Future()

    def set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def is_set(self) -> bool:
        return self._future.done()

    async def wait(self, longest: float | None = 60.0) -> None:
        """Wait until the signal is set. Raise `TimeoutError` after `longest` seconds."""
        async with asyncio.timeout(longest):
            await asyncio.shield(asyncio.wrap_future(self._future))


class BrokenOff(Exception):
    """Raised by the scripted application to make its server close the connection before the end of the answer."""


Piece = bytes | Signal | BrokenOff


@dataclass
class Answer:
    """One answer, and the progress of sending it."""

    pieces: Sequence[Piece]
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: dict(SSE))
    before: Signal | None = None
    """The status and everything after it wait for this signal."""
    asked: Signal = field(default_factory=Signal)
    """The request for the answer has arrived."""
    played: Signal = field(default_factory=Signal)
    left: Signal = field(default_factory=Signal)
    """The asker left before the end."""
    sent: int = 0
    """How many pieces have been sent."""


@dataclass(frozen=True)
class Asked:
    """A request that the upstream received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    client: Any
    """Address and port that the request came from."""

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


class ScriptedUpstream:
    """`requests` has the chat requests so far, `visits` all others. `pages` has answers for other paths, as JSON or `Answer`."""

    def __init__(self) -> None:
        self.models: list[dict[str, Any]] = [TINY]
        self.pages: dict[str, Any] = {}
        self.requests: list[Asked] = []
        self.visits: list[Asked] = []
        self.started = self.stopped = False
        self._answers: deque[Answer] = deque()

    async def received(self, count: int) -> None:
        """Wait until `count` chat requests have been received."""
        async with asyncio.timeout(60):
            while len(self.requests) < count:
                await asyncio.sleep(0.01)

    def queue(self, answer: Answer) -> Answer:
        self._answers.append(answer)
        return answer

    def stream(self, *pieces: Chunk | Piece, done: bool = True, **settings: Any) -> Answer:
        """Queue a streamed answer. Chunks are framed, and bytes are sent unchanged."""
        framed: list[Piece] = [frame(piece) if isinstance(piece, dict) else piece for piece in pieces]
        return self.queue(Answer([*framed, DONE] if done else framed, **settings))

    def whole(self, body: Any, status: int = 200, *, headers: dict[str, str] | None = None, **settings: Any) -> Answer:
        """Queue an answer that is not streamed: JSON, or raw bytes."""
        return self.queue(replace(json_answer(body, status, headers), **settings))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await _echo(receive, send)
        else:
            await self._http(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self.started = True
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self.stopped = True
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        client = tuple(scope.get("client") or ())
        asked = Asked(scope["method"], path, headers, await read_body(receive), client)
        await play(self.answer(asked), receive, send)

    def answer(self, asked: Asked) -> Answer:
        """Record a request, and return its answer. A body of `{}` checks a credential."""
        if asked.body == b"{}":
            self.visits.append(asked)
            return json_answer(error("There is no model."), 400)
        if not asked.path.endswith("/v1/chat/completions"):
            self.visits.append(asked)
            return self.page(asked)
        self.requests.append(asked)
        return self._answers.popleft() if self._answers else self.unscripted(asked)

    def page(self, asked: Asked) -> Answer:
        """Return the answer to anything but a chat request."""
        pages = {"/v1/models": {"object": "list", "data": self.models}, **self.pages}
        page = pages.get(asked.path, json_answer({"detail": "Not Found"}, 404))
        return page if isinstance(page, Answer) else json_answer(page)

    def unscripted(self, asked: Asked) -> Answer:
        """Return the answer to a chat request if none is queued; subclasses override it."""
        return json_answer({"error": {"message": "unscripted"}}, 500)


def listing(upstream: Scripted, *names: str) -> Scripted:
    """Return `upstream`, a vLLM that lists the models `names`."""
    upstream.models = [{**TINY, "id": name} for name in names]
    return upstream


def json_answer(body: Any, status: int = 200, headers: dict[str, str] | None = None, *, before: Signal | None = None) -> Answer:
    """Return an answer that is not streamed: JSON, or raw bytes. It waits for the signal `before`, if given."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Answer([content], status, {**JSON, **(headers or {})}, before)


def stream_answer(*chunks: Chunk) -> Answer:
    """Return an answer that streams chunks to its end."""
    return Answer([*map(frame, chunks), DONE])


async def read_body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        part: bytes = message.get("body", b"")
        body += part
        if not message.get("more_body"):
            return body


async def play(answer: Answer, receive: Receive, send: Send) -> None:
    answer.asked.set()
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_leave, answer, receive, group.cancel_scope)
            await _send_pieces(answer, send)
            answer.played.set()
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        if not answer.played.is_set():
            answer.left.set()


async def _leave(answer: Answer, receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _send_pieces(answer: Answer, send: Send) -> None:
    if answer.before:
        await answer.before.wait(None)
    headers = [(name.encode(), value.encode("latin-1")) for name, value in answer.headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    for piece in answer.pieces:
        if isinstance(piece, Signal):
            await piece.wait(None)
        elif isinstance(piece, BrokenOff):
            raise piece
        else:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            answer.sent += 1
            await anyio.lowlevel.checkpoint()  # so that each read returns one piece
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _echo(receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] != "websocket.disconnect":
        answer: Message = {"type": "websocket.send", "text": message["text"]}
        await send(answer)


# -- chunks and completions ----------------------------------------------------------------------------------------------


def frame(chunk: Chunk) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(chunk)


def delta(finish_reason: str | None = None, **members: Any) -> Chunk:
    choice = {"index": 0, "delta": members, "finish_reason": finish_reason}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny", "choices": [choice]}


def text(content: str) -> Chunk:
    return delta(content=content)


def reasoning(content: str) -> Chunk:
    return delta(reasoning=content)


def call(arguments: str, *, name: str | None = None, call_id: str | None = None, index: int = 0) -> Chunk:
    """A fragment of a tool call; the first one has a name and an id."""
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return delta(
        tool_calls=[{"index": index, "function": function, **({"id": call_id, "type": "function"} if call_id else {})}]
    )


def finish(reason: str = "stop") -> Chunk:
    return delta(reason)


def usage(prompt: int = 3, completion: int = 2) -> Chunk:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "tiny",
        "choices": [],
        "usage": counts,
    }


def completion(message: dict[str, Any], finish_reason: str = "stop", counts: dict[str, Any] | None = None) -> dict[str, Any]:
    """A whole `chat.completion`."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "tiny",
        "choices": [choice],
        "usage": counts or usage()["usage"],
    }


HELLO = (delta(role="assistant", content=""), text("Hel"), text("lo"), finish(), usage())
"""A short answer, as vLLM streams it."""


def error(message: str = "no good", status: int = 400, **members: Any) -> dict[str, Any]:
    """vLLM's error object."""
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status, **members}}
