"""Search providers, one a file. To add another, write its file, and add a line to ``PROVIDERS`` and its name to the setting."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from ...settings import Settings
from . import brave, tavily
from .brave import Brave
from .mcp_tool import CallMCP, MCPTool
from .query import Found, Place, Provider, Query, SearchFailed
from .searxng import SearXNG
from .tavily import Tavily

__all__ = ["CallMCP", "Found", "Place", "Provider", "Query", "SearchFailed", "open_provider"]

Make = Callable[[Settings, httpx.AsyncClient, CallMCP | None], Provider]


def open_provider(settings: Settings, http: httpx.AsyncClient, call_mcp: CallMCP | None = None) -> Provider | None:
    """The provider that the settings name, or None.

    ``http`` stays the caller's; ``call_mcp`` calls the tool that the setting ``web_search_tool`` names.
    """
    return PROVIDERS[settings.web_search](settings, http, call_mcp) if settings.web_search != "none" else None


def _searxng(settings: Settings, http: httpx.AsyncClient, _: CallMCP | None) -> Provider:
    return SearXNG(http, settings.web_search_url or "", _key(settings) or None, settings.web_search_timeout)


def _tavily(settings: Settings, http: httpx.AsyncClient, _: CallMCP | None) -> Provider:
    return Tavily(http, settings.web_search_url or tavily.URL, _key(settings), settings.web_search_timeout)


def _brave(settings: Settings, http: httpx.AsyncClient, _: CallMCP | None) -> Provider:
    return Brave(http, settings.web_search_url or brave.URL, _key(settings), settings.web_search_timeout)


def _mcp(_settings: Settings, _http: httpx.AsyncClient, call_mcp: CallMCP | None) -> Provider:
    if call_mcp is None:
        raise ValueError("web_search is mcp, and there is nothing to call the tool with")
    return MCPTool(call_mcp)


def _key(settings: Settings) -> str:
    return settings.web_search_key.get_secret_value() if settings.web_search_key else ""


PROVIDERS: dict[str, Make] = {"searxng": _searxng, "tavily": _tavily, "brave": _brave, "mcp": _mcp}
