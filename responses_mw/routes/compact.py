"""A history made short (OpenAI reference, "Compact a response")."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Send

from ..config import Settings
from ..limits import allowance_of
from ..protocol.compaction import create_body
from ..protocol.request import CreateResponse
from ..protocol.types import Document
from ..replies import Reply, send_json
from ..runner import Runner
from ..upstream import Upstream
from .reading import Reader


class CompactReply(Reply):
    """The one document that the run yields."""

    async def _answer(self, send: Send) -> None:
        async for compacted in self._run:
            await send_json(send, 200, compacted)


class CompactRoutes:
    """``parse`` makes a valid request of a body."""

    def __init__(
        self,
        runner: Runner,
        upstream: Upstream,
        reader: Reader,
        parse: Callable[[Any, int], CreateResponse],
        settings: Settings,
    ) -> None:
        self._runner = runner
        self._upstream = upstream
        self._reader = reader
        self._parse = parse
        self._settings = settings

    async def compact(self, request: Request) -> ASGIApp:
        """``POST /v1/responses/compact``: nothing of it is stored."""
        parsed = await self._reader.read(request, lambda body, size: self._parse(create_body(body), size))
        caller = self._reader.caller(request)
        await allowance_of(request.scope).request(caller.owner, partial(self._upstream.verify, caller))

        async def documents() -> AsyncGenerator[Document, None]:
            yield await self._runner.compact(parsed, caller)

        return CompactReply(documents(), self._settings)
