"""How many tokens a request would give the model (OpenAI reference, "Get input token counts")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from ..protocol import checks
from ..protocol.request import CreateResponse
from ..replies import Answer
from ..runner import Runner
from ..upstream import Upstream
from .reading import Reader


class TokenRoutes:
    """``parse`` makes a valid request of a body."""

    def __init__(self, runner: Runner, upstream: Upstream, reader: Reader, parse: Callable[[Any, int], CreateResponse]) -> None:
        self._runner = runner
        self._upstream = upstream
        self._reader = reader
        self._parse = parse

    async def count(self, request: Request) -> ASGIApp:
        """``POST /v1/responses/input_tokens``: exact, of the very request that a create would send."""
        parsed = await self._reader.read(request, self._parsed)
        caller = self._reader.caller(request)
        await self._upstream.verify(caller)  # some tokenizers answer whoever asks
        count = await self._runner.count_tokens(parsed, caller)
        return Answer({"object": "response.input_tokens", "input_tokens": count})

    def _parsed(self, body: Any, size: int) -> CreateResponse:
        if isinstance(body, dict) and body.pop("personality", None) is not None:
            checks.unsupported("personality", "it belongs to OpenAI's models.")
        return replace(self._parse(body, size), stream=False, store=False, background=False)
