"""The demo upstream: a Chat Completions server that needs no model, shaped on the wire like vLLM 0.32."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import orjson
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from .answer import Answer, answer
from .request import MAX_MODEL_LEN, MODELS, RequestError, parse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

__all__ = ["create_upstream"]


def create_upstream(pace: float = 0.0) -> Starlette:
    """The application, with the models ``demo`` and ``demo-thinker``; a token takes ``pace`` seconds."""
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
    # "vllm" tells a client which server's dialect to speak, and vLLM's is the one that is spoken here.
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
    """The chunks as server-sent events, ``pace`` seconds apart."""
    for chunk in given.chunks():
        yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        await asyncio.sleep(pace)
    yield b"data: [DONE]\n\n"


async def not_found(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": "Not Found"}, status_code=404)
