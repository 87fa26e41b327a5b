"""The demo upstream: a Chat Completions server without a model, with vLLM's names and order of chunks.

An answer is a list of *deltas*, one for each token. Streams and whole answers are made from the same deltas. As in vLLM, a
request can continue the text of its last message, and `/tokenize` shows the prompt that the model gets.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from .model import Reply, reply_to
from .prompts import Vocabulary, prompt_of, tokens_of
from .request import MAX_MODEL_LEN, MODELS, ChatRequest, RequestError

_FINGERPRINT = "responses-mw-demo"
_STOP_SECONDS = 5.0


# -- the answer ----------------------------------------------------------------------------------------------------------


def answer(body: bytes) -> Answer:
    """Return the demo model's answer to the request in `body`. Raises `RequestError` if the request is invalid."""
    try:
        request = ChatRequest(orjson.loads(body))
        return _answer(request, reply_to(request))
    except (AttributeError, LookupError, TypeError, ValueError) as malformed:
        raise RequestError(f"The request is malformed: {malformed!r}") from malformed


def _answer(request: ChatRequest, reply: Reply) -> Answer:
    if request.beginning:
        reply = reply._replace(text=_rest(request.beginning, reply.text))
    deltas = list(_deltas(reply, thinks=request.model == "demo-thinker" and not request.beginning))
    finish_reason = "stop"
    if len(deltas) > request.answer_limit:
        finish_reason = "length"
    elif reply.calls and request.named_function is None:  # vLLM ends a named call with "stop"
        finish_reason = "tool_calls"
    return Answer(request, deltas[: request.answer_limit], finish_reason)


def _rest(beginning: str, text: str) -> str:
    """Return the rest of `text` after `beginning`. If it does not begin like this, return a line with the whole text."""
    return text.removeprefix(beginning) if text.startswith(beginning) else f"\n{text}"


def _deltas(reply: Reply, *, thinks: bool) -> Iterator[dict[str, Any]]:
    if thinks:
        yield from ({"reasoning": token} for token in tokens_of(reply.thought))
    yield from ({"content": token} for token in tokens_of(reply.text))
    for index, (name, arguments) in enumerate(reply.calls):
        call = {"id": f"chatcmpl-tool-{secrets.token_hex(8)}", "type": "function", "index": index, "function": {"name": name}}
        yield {"content": None, "tool_calls": [call]}
        for token in tokens_of(arguments):
            yield {"content": None, "tool_calls": [{"index": index, "function": {"arguments": token}}]}


@dataclass(frozen=True, slots=True)
class Answer:
    request: ChatRequest
    deltas: list[dict[str, Any]]
    finish_reason: str
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(8)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a stream: the role, each token, the finish reason and, if requested, the usage."""
        head = self._head("chat.completion.chunk")
        deltas = [{"role": "assistant", "content": ""}, *self.deltas]
        for number, delta in enumerate(deltas):
            yield head | {"choices": [_choice(delta)]} | self._counted(number)
        end = _choice({}) | {"finish_reason": self.finish_reason}
        yield head | {"choices": [end]} | self._counted(len(self.deltas))
        if self.request.wants_usage:
            yield head | {"choices": [], "usage": self._usage(len(self.deltas)), "system_fingerprint": _FINGERPRINT}

    def _counted(self, tokens: int) -> dict[str, Any]:
        return {"usage": self._usage(tokens)} if self.request.wants_usage_of_chunks else {}

    def completion(self) -> dict[str, Any]:
        choice = {"index": 0, "message": self._message(), "logprobs": None, "finish_reason": self.finish_reason}
        tail = {"system_fingerprint": _FINGERPRINT, "usage": self._usage(len(self.deltas))}
        return self._head("chat.completion") | {"choices": [choice], **tail}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}

    def _message(self) -> dict[str, Any]:
        texts = {kind: "".join(self._texts(kind)) or None for kind in ("content", "reasoning")}
        message: dict[str, Any] = {"role": "assistant", **texts}
        for part in (call for delta in self.deltas for call in delta.get("tool_calls", [])):
            calls = message.setdefault("tool_calls", [])
            if "id" in part:
                function = {"name": part["function"]["name"], "arguments": ""}
                calls.append({"id": part["id"], "type": "function", "function": function})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        return message

    def _texts(self, kind: str) -> list[str]:
        return [delta[kind] for delta in self.deltas if delta.get(kind)]

    def _usage(self, tokens: int) -> dict[str, Any]:
        """Return the usage of the first `tokens` tokens of the answer."""
        prompt_tokens = self.request.prompt_tokens
        reasoning = takewhile(lambda delta: "reasoning" in delta, islice(self.deltas, tokens))
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + tokens,
            "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": sum(1 for _ in reasoning)},
        }


def _choice(delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}


# -- the server ----------------------------------------------------------------------------------------------------------


def create_upstream(pace: float = 0.0) -> Starlette:
    """Create the ASGI application. Its models `demo` and `demo-thinker` generate a token every `pace` seconds."""

    async def chat_completions(request: Request) -> Response:
        try:
            given = answer(await request.body())
        except RequestError as refused:
            return JSONResponse(refused.body, status_code=refused.status)
        if given.request.streams:
            return StreamingResponse(_events(given, pace), media_type="text/event-stream")
        await asyncio.sleep(pace * len(given.deltas))
        return JSONResponse(given.completion())

    routes = [
        Route("/health", _health),
        Route("/v1/models", _models),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        *_tokenizer(),
    ]
    return Starlette(routes=routes, exception_handlers={404: _not_found})


def _tokenizer() -> list[Route]:
    vocabulary = Vocabulary()

    async def tokenize(request: Request) -> JSONResponse:
        try:
            body = orjson.loads(await request.body())
            tokens = tokens_of(body["prompt"] if "prompt" in body else prompt_of(body["messages"]))
        except (AttributeError, LookupError, TypeError, ValueError) as malformed:
            return _malformed(malformed)
        return JSONResponse({"count": len(tokens), "max_model_len": MAX_MODEL_LEN, "tokens": vocabulary.numbers(tokens)})

    async def detokenize(request: Request) -> JSONResponse:
        try:
            return JSONResponse({"prompt": vocabulary.text(orjson.loads(await request.body())["tokens"])})
        except (LookupError, TypeError, ValueError) as malformed:
            return _malformed(malformed)

    return [Route("/tokenize", tokenize, methods=["POST"]), Route("/detokenize", detokenize, methods=["POST"])]


def _malformed(error: Exception) -> JSONResponse:
    return JSONResponse(RequestError(f"The request is malformed: {error!r}").body, status_code=400)


async def _health(request: Request) -> Response:
    return Response()


async def _models(request: Request) -> JSONResponse:
    # "vllm" makes responses-mw select the dialect of vLLM.
    shared = {"object": "model", "created": int(time.time()), "owned_by": "vllm", "max_model_len": MAX_MODEL_LEN}
    data = [{"id": name, "root": name, "parent": None, **shared} for name in MODELS]
    return JSONResponse({"object": "list", "data": data})


async def _not_found(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": "Not Found"}, status_code=404)


async def _events(given: Answer, pace: float) -> AsyncIterator[bytes]:
    for chunk in given.chunks():
        yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        await asyncio.sleep(pace)
    yield b"data: [DONE]\n\n"


# -- in this process ------------------------------------------------------------------------------------------------------


def demo_upstream(pace: float) -> AbstractContextManager[str]:
    """Serve the demo upstream on a free port, and yield its URL. A token takes `pace` seconds."""
    return serve_in_thread(create_upstream(pace))


@contextmanager
def serve_in_thread(app: ASGIApp) -> Iterator[str]:
    """Serve `app` on a free port, in a thread, and yield its URL."""
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="warning", timeout_graceful_shutdown=1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(_STOP_SECONDS)


# -- in a process of its own -----------------------------------------------------------------------------------------------


if __name__ == "__main__":
    uvicorn.run(create_upstream(float(sys.argv[2])), port=int(sys.argv[1]), access_log=False, timeout_graceful_shutdown=1)
