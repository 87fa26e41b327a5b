"""The demo upstream: a Chat Completions server without a model, with the wire format of vLLM 0.32.

An answer is a list of tokens. Each token is one *delta*, the ``delta`` object of a stream's chunk. An answer that is not
streamed joins the same deltas, so the two forms cannot differ.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from .request import MAX_MODEL_LEN, MODELS, ChatRequest, NamedTool, RequestError, parse
from .rules import Reply, reply_to
from .values import SchemaError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.requests import Request

__all__ = ["Answer", "answer", "create_upstream"]

Delta = dict[str, Any]

_TOKEN = re.compile(r"\s*\S+|\s+\Z")
_FINGERPRINT = "responses-mw-demo"


def answer(request: ChatRequest) -> Answer:
    """Return the model's answer, up to a stop string or the token limit. Raises `RequestError`."""
    try:
        reply, stop = _stopped(reply_to(request), request.stop)
    except SchemaError as error:
        raise RequestError(f"Grammar error: {error}") from error
    deltas = list(_deltas(reply, request.thinks))
    finish_reason = "stop"
    if len(deltas) > request.answer_limit:
        finish_reason, stop = "length", None
    elif reply.calls and not isinstance(request.tool_choice, NamedTool):  # vLLM ends a named call with "stop"
        finish_reason = "tool_calls"
    return Answer(request, deltas[: request.answer_limit], finish_reason, stop)


def _stopped(reply: Reply, stop: str | list[str] | None) -> tuple[Reply, str | None]:
    """Return the reply up to the first stop string in its text, and that string."""
    strings = [stop] if isinstance(stop, str) else stop or []
    found = [(reply.text.index(string), string) for string in strings if string and string in reply.text]
    if not found:
        return reply, None
    position, string = min(found)
    return Reply(reply.thought, reply.text[:position]), string


def _deltas(reply: Reply, thinks: bool) -> Iterator[Delta]:
    if thinks:
        yield from ({"reasoning": token} for token in _TOKEN.findall(reply.thought))
    yield from ({"content": token} for token in _TOKEN.findall(reply.text))
    for index, call in enumerate(reply.calls):
        call_id = f"chatcmpl-tool-{secrets.token_hex(8)}"
        yield _call_delta({"id": call_id, "type": "function", "index": index, "function": {"name": call.name}})
        for token in _TOKEN.findall(call.arguments):
            yield _call_delta({"index": index, "function": {"arguments": token}})


def _call_delta(call: dict[str, Any]) -> Delta:
    return {"content": None, "tool_calls": [call]}


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. ``stop_reason`` is the stop string that ended it."""

    request: ChatRequest
    deltas: list[Delta]
    finish_reason: str
    stop_reason: str | None
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(8)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a stream: the role, each token, the finish reason and, if requested, the usage."""
        yield self._chunk(self._choice({"role": "assistant", "content": ""}))
        for delta in self.deltas:
            yield self._chunk(self._choice(delta) | {"token_ids": None})
        finish = {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason, "token_ids": None}
        yield self._chunk(self._choice({}) | finish)
        options = self.request.stream_options
        if options and options.include_usage:
            yield self._chunk() | {"usage": self._usage(), "system_fingerprint": _FINGERPRINT}

    def completion(self) -> dict[str, Any]:
        """Return the answer as one ``chat.completion``."""
        choice = {
            "index": 0,
            "message": self._message(),
            "logprobs": self._logprobs(self._texts("content")),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "token_ids": None,
        }
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.request.model,
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": _FINGERPRINT,
            "usage": self._usage(),
        }

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.request.model,
            "choices": list(choices),
        }

    def _choice(self, delta: Delta) -> dict[str, Any]:
        token = delta.get("content")
        return {"index": 0, "delta": delta, "logprobs": self._logprobs([token] if token else []), "finish_reason": None}

    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(self._texts("content")) or None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": "".join(self._texts("reasoning")) or None,
        }
        if calls := self._calls():
            message["tool_calls"] = calls
        return message

    def _texts(self, kind: str) -> list[str]:
        return [delta[kind] for delta in self.deltas if delta.get(kind)]

    def _calls(self) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        for part in (call for delta in self.deltas for call in delta.get("tool_calls", [])):
            if "id" in part:
                function = {"name": part["function"]["name"], "arguments": ""}
                calls.append({"id": part["id"], "type": "function", "function": function})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        return calls

    def _logprobs(self, tokens: list[str]) -> dict[str, Any] | None:
        """Return the log probabilities of the tokens, if requested. All are 0, because rules have no alternatives."""
        if not self.request.logprobs or not tokens:
            return None
        certain = [{"token": token, "logprob": 0.0, "bytes": list(token.encode())} for token in tokens]
        shown = bool(self.request.top_logprobs)
        return {"content": [entry | {"top_logprobs": [entry] if shown else []} for entry in certain]}

    def _usage(self) -> dict[str, Any]:
        prompt_tokens = self.request.prompt_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + len(self.deltas),
            "completion_tokens": len(self.deltas),
            "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": len(self._texts("reasoning"))},
        }


# -- the server -------------------------------------------------------------------------------------------------------


def create_upstream(pace: float = 0.0) -> Starlette:
    """Create the application, with the models ``demo`` and ``demo-thinker``. A token takes ``pace`` seconds."""
    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        ],
        exception_handlers={404: not_found},
    )
    app.state.pace = pace
    return app


async def health(request: Request) -> Response:
    return Response()


async def models(request: Request) -> JSONResponse:
    created = int(time.time())
    # "vllm" makes responses-mw select the dialect of vLLM.
    shared = {"object": "model", "created": created, "owned_by": "vllm", "parent": None, "max_model_len": MAX_MODEL_LEN}
    return JSONResponse({"object": "list", "data": [{"id": name, "root": name, **shared} for name in MODELS]})


async def chat_completions(request: Request) -> Response:
    try:
        given = answer(parse(await request.body()))
    except RequestError as refused:
        return JSONResponse(refused.body, status_code=refused.status)
    pace: float = request.app.state.pace
    if given.request.stream:
        return StreamingResponse(stream(given, pace), media_type="text/event-stream")
    await asyncio.sleep(pace * len(given.deltas))
    return JSONResponse(given.completion())


async def stream(given: Answer, pace: float) -> AsyncIterator[bytes]:
    """Yield the chunks as server-sent events, ``pace`` seconds apart."""
    for chunk in given.chunks():
        yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        await asyncio.sleep(pace)
    yield b"data: [DONE]\n\n"


async def not_found(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": "Not Found"}, status_code=404)
