"""The inspector's ASGI application: checks requests, routes them, and explains errors."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Message, Receive, Scope, Send

from ..errors import APIError, BadRequest, Forbidden, NotFound, Unauthorized
from ..settings.groups import ServerSettings
from ..telemetry.audit import audit
from ..telemetry.context import WarningLimit
from .api import PREFIX, InspectorAPI, client_of, error_json
from .forms import read_form
from .inspector_context import InspectorContext
from .security import COOKIE, HEADERS, SESSION_SECONDS, Guard, is_foreign
from .vitals import Checks, Vitals

if TYPE_CHECKING:
    from .rendering import Renderer

logger = logging.getLogger(__name__)

HOME = "/ui"
LOGIN = "/ui/login"
_OPEN = frozenset({LOGIN, "/ui/static/style.css"})
"""Paths that need no token."""
FAILED_LOGIN_PAUSE = 0.5  # seconds before the answer to a failed login, which slows down guessing
_SCRIPTS = ("copy.js", "live.js", "page.js", "refresh.js", "response.js", "try.js")
_STATIC = {"style.css": "text/css", **dict.fromkeys(_SCRIPTS, "text/javascript")}


def create_inspector(context: InspectorContext | None, server: ServerSettings, checks: Checks) -> Inspector | None:
    """Return the inspector, or None if `ui.mode` is off or `context` is None, because there is no state."""
    if context is None or context.ui.mode == "off":
        return None
    return Inspector(context, server, checks)


class Inspector:
    """The ASGI application for the paths `/ui` and `/admin/api` of the admin port."""

    def __init__(self, context: InspectorContext, server: ServerSettings, checks: Checks) -> None:
        """`checks` are the readiness checks shown by the overview. They must not raise errors."""
        self._vitals = Vitals(context.state, checks)
        secret = context.ui.token
        token = secret.get_secret_value() if secret is not None else ""
        self._guard = Guard(token)
        self._is_closed = not token and not server.admin_is_local
        if self._is_closed and server.admin_port:
            logger.warning("the inspector is not served: server.admin_host is not a loopback address, and ui.token is not set")
        self._ended_sessions = context.state.ended_sessions
        self._foreign, self._failed_logins = WarningLimit(), WarningLimit()
        api = InspectorAPI(context.state, context.keys, shows_content=context.shows_content)
        routes: list[BaseRoute] = [*api.routes()]
        pages = _pages(context, self._vitals)
        self._renderer = pages[0] if pages is not None else None
        if pages is not None:
            routes += [
                *pages[1],
                Route(LOGIN, self._login, methods=["GET", "POST"]),
                Route("/ui/logout", self._logout, methods=["POST"]),
                Route("/ui/static/{name}", _static),
            ]
        self.routes = routes
        self._router = Router(routes, redirect_slashes=True)

    def watching(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which the inspector measures what the overview shows."""
        return self._vitals.watching()

    def serves(self, path: str) -> bool:
        """Return whether a path of the admin port belongs to the inspector."""
        return path.startswith(("/ui/", f"{PREFIX}/")) or path in ("/ui", PREFIX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = {name.encode(): value.encode() for name, value in HEADERS.items()}
                own = [(name, value) for name, value in message.get("headers", ()) if name.lower() not in added]
                message = {**message, "headers": [*own, *added.items()]}
            await send(message)

        try:
            refusal = await self._refuse(request)
            app = refusal if refusal is not None else self._router
            await app({**scope, "app": self}, receive, send_safely)
        except (APIError, HTTPException) as error:
            await self._explain(request, error)(scope, receive, send_safely)

    async def _refuse(self, request: Request) -> Response | None:
        """Return None if the request is allowed, or a redirect to the login. Raises `Forbidden` or `Unauthorized`."""
        if self._is_closed:
            raise Forbidden("The inspector needs ui.token, because the admin port is not bound to a loopback address.")
        if is_foreign(request):
            self._warn("a page of another origin tried to use the inspector", self._foreign)
            raise Forbidden("The request comes from a page of another origin.", code="origin_not_allowed")
        path = request.scope["path"]  # `request.url` also depends on the header Host
        if path in _OPEN or await self._is_admitted(request):
            return None
        if path.startswith(PREFIX) or self._renderer is None or request.method != "GET":
            raise Unauthorized("Send ui.token as a bearer token.")
        query = request.scope["query_string"].decode("latin-1")
        wanted = f"{path}?{query}" if query else path
        return RedirectResponse(LOGIN if wanted == HOME else f"{LOGIN}?{urlencode({'next': wanted})}", 303)

    async def _is_admitted(self, request: Request) -> bool:
        """Return whether the request has the token or a session that has not ended, if one is needed."""
        if not self._guard.needs_token or self._guard.has_bearer(request):
            return True
        session = self._guard.session_of(request)
        return session is not None and not await self._ended_sessions.has(session.id)

    def _explain(self, request: Request, error: APIError | HTTPException) -> Response:
        if isinstance(error, HTTPException):
            error = NotFound("There is no such page.") if error.status_code == 404 else BadRequest(str(error.detail))
        if request.scope["path"].startswith(PREFIX):
            return error_json(error)
        if self._renderer is None:
            return PlainTextResponse(
                f"{error.message}\nThe pages need jinja2: install responses-mw with the extra 'ui'.\n", 404
            )
        return self._renderer.error(request, error)

    def _warn(self, text: str, limit: WarningLimit) -> None:
        """Log an event that anyone without the token can cause. The rate is limited, so that nobody can fill the log."""
        logger.log(logging.WARNING if limit.is_due() else logging.DEBUG, text)

    # -- sessions ----------------------------------------------------------------------------------------------------------

    async def _login(self, request: Request) -> Response:
        assert self._renderer is not None
        if request.method == "GET":
            wanted = request.query_params.get("next", "")
            return self._renderer.login(request, wanted) if self._guard.needs_token else RedirectResponse(HOME, 303)
        form = await read_form(request)
        if not self._guard.is_token(form.get("token", "")):
            self._warn("a login to the inspector failed", self._failed_logins)
            await asyncio.sleep(FAILED_LOGIN_PAUSE)
            return self._renderer.login(request, form.get("next", ""), "This is not the token in ui.token.")
        audit("login", client=client_of(request))
        response = RedirectResponse(_page_in(form.get("next", "")), 303)
        is_https = request.url.scheme == "https"
        response.set_cookie(
            COOKIE,
            self._guard.new_session(),
            max_age=SESSION_SECONDS,
            httponly=True,
            samesite="lax",  # so that links in other pages open the page, and not the login form
            secure=is_https,
        )
        return response

    async def _logout(self, request: Request) -> Response:
        session = self._guard.session_of(request)
        if session is not None:
            await self._ended_sessions.add(session.id, session.seconds_left)
            audit("logout", client=client_of(request))
        response = RedirectResponse(LOGIN, 303)
        response.delete_cookie(COOKIE, httponly=True, samesite="lax")
        return response


def _page_in(text: str) -> str:
    """Return the path of a page that a login was needed for, or that of the first page."""
    return text if text.startswith((f"{HOME}/", f"{HOME}?")) else HOME


def _pages(context: InspectorContext, vitals: Vitals) -> tuple[Renderer, list[BaseRoute]] | None:
    """Return the renderer and the routes of the pages, or None if Jinja2 is not installed."""
    try:
        from .cache_pages import CachePages
        from .conversations import Conversations
        from .file_pages import FilePages
        from .overview import Overview
        from .pages import Pages
        from .rendering import Renderer
        from .tool_pages import ToolPages
        from .try_it import TryIt
        from .usage_pages import UsagePages
    except ModuleNotFoundError as missing:
        logger.warning("the inspector has no pages, because %s is not installed: install the extra 'ui'", missing.name)
        return None
    renderer = Renderer(context)
    rooms = (Pages, Conversations, CachePages, UsagePages, ToolPages, FilePages, TryIt)
    routes = [route for room in rooms for route in room(context, renderer).routes()]
    return renderer, [*Overview(context, renderer, vitals).routes(), *routes]


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _STATIC:
        raise NotFound("There is no such file.")
    content = (Path(__file__).parent / "static" / name).read_bytes()
    return Response(content, media_type=_STATIC[name])
