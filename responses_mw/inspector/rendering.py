"""Render the templates of the pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from ..errors import APIError
from ..version import VERSION
from .inspector_context import InspectorContext
from .queries import STATUSES
from .texts import FILTERS


class Link(NamedTuple):
    """An entry of the navigation."""

    url: str
    name: str


NAVIGATION = (
    Link("/ui", "Overview"),
    Link("/ui/responses", "Responses"),
    Link("/ui/conversations", "Conversations"),
    Link("/ui/background", "Background"),
    Link("/ui/cache", "Cache"),
    Link("/ui/usage", "Usage"),
    Link("/ui/tools", "Tools"),
    Link("/ui/files", "Files"),
    Link("/ui/try", "Try it"),
)


class Renderer:
    """Renders templates with the values that all pages need."""

    def __init__(self, context: InspectorContext) -> None:
        self._templates = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= FILTERS
        self._templates.globals |= {
            "version": VERSION,
            "has_login": context.ui.token is not None,
            "statuses": STATUSES,
            "keys": context.keys,
            "navigation": NAVIGATION,
        }

    def page(self, request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        text = self._templates.get_template(template).render(path=request.url.path, **values)
        return HTMLResponse(text, status)

    def login(self, request: Request, wanted: str, fault: str = "") -> HTMLResponse:
        """Return the login form. After the login, the page `wanted` is shown."""
        return self.page(request, "login.html", 401 if fault else 200, wanted=wanted, fault=fault)

    def error(self, request: Request, error: APIError) -> HTMLResponse:
        return self.page(request, "error.html", error.status, message=error.message)
