"""The Responses API (OpenAI reference, "Responses")."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from ..config import Settings
from ..errors import BadRequest, MethodNotAllowed, NotFound, UpgradeRequired
from ..protocol import document
from ..protocol.request import Limits, parse
from ..replies import Answer, JSONReply, StreamReply
from ..runner import Runner
from ..state import State
from ..upstream import Caller, Upstream
from .listing import listed
from .reading import Reader, check_include, flag, paging


class ResponseRoutes:
    def __init__(self, runner: Runner, upstream: Upstream, state: State | None, reader: Reader, settings: Settings) -> None:
        self._runner = runner
        self._upstream = upstream
        self._state = state
        self._reader = reader
        self._settings = settings
        self._limits = Limits(settings.max_input_items, settings.max_tools, settings.max_depth)

    async def create(self, request: Request) -> ASGIApp:
        """``POST /v1/responses``"""
        parsed = parse(await self._reader.json(request), self._limits)
        grace = self._settings.status_grace if parsed.stream else None
        run = self._runner.run(parsed, self._reader.caller(request), grace=grace)
        return (StreamReply if parsed.stream else JSONReply)(run, self._settings)

    async def connect(self, request: Request) -> ASGIApp:
        """``GET /v1/responses``: the WebSocket's upgrade, where the server in front of us takes it for a plain request."""
        if request.headers.get("upgrade", "").lower() == "websocket":
            raise UpgradeRequired("WebSockets are not served yet; use HTTP.", headers={"upgrade": "HTTP/1.1"})
        raise MethodNotAllowed("Method GET is not allowed for /v1/responses.", headers={"allow": "POST"})

    async def retrieve(self, request: Request) -> ASGIApp:
        """``GET /v1/responses/{response_id}``"""
        check_include(request)
        state, caller, response_id = await self._stored(request)
        stored = await state.responses.get(response_id, caller.owner)
        if flag(request, "stream"):
            message = f"Response with id '{response_id}' was not created with background=true: it cannot be streamed again."
            raise BadRequest(message, param="stream", code="not_a_background_response")
        return Answer(document.whole(stored.document))

    async def delete(self, request: Request) -> ASGIApp:
        """``DELETE /v1/responses/{response_id}``"""
        state, caller, response_id = await self._stored(request)
        await state.responses.delete(response_id, caller.owner)
        return Answer({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> ASGIApp:
        """``POST /v1/responses/{response_id}/cancel``"""
        state, caller, response_id = await self._stored(request)
        await state.responses.get(response_id, caller.owner)
        raise BadRequest("Cannot cancel a synchronous response.", param="response_id")

    async def input_items(self, request: Request) -> ASGIApp:
        """``GET /v1/responses/{response_id}/input_items``"""
        check_include(request)
        asked = paging(request)
        state, caller, response_id = await self._stored(request)
        page = await state.responses.input_items(
            response_id, caller.owner, after=asked.after, before=asked.before, limit=asked.limit, order=asked.order
        )
        return Answer(listed(page))

    async def _stored(self, request: Request) -> tuple[State, Caller, str]:
        """What a request about a stored response needs, once its credential is known to be good."""
        caller, response_id = self._reader.caller(request), request.path_params["response_id"]
        await self._upstream.verify(caller)
        if self._state is None:
            raise NotFound(f"Response with id '{response_id}' not found.")
        return self._state, caller, response_id
