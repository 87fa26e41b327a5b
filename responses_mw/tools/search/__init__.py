"""Search providers, one per file.

A module is named after its provider and has a class ``Provider``, which takes ``ProviderOptions``. CONTRIBUTING.md
explains how to add one.
"""

from __future__ import annotations

from importlib import import_module

import httpx

from ...settings import SearchSettings
from .provider import CallMCP, Place, ProviderOptions, Query, SearchFailed, SearchHit, SearchProvider, plain_host

__all__ = ["CallMCP", "Place", "Query", "SearchFailed", "SearchHit", "SearchProvider", "open_provider", "plain_host"]


def open_provider(
    settings: SearchSettings, http: httpx.AsyncClient, timeout: float, call_mcp: CallMCP | None = None
) -> SearchProvider | None:
    """Open the provider that the settings name; return None if they name none.

    The caller remains responsible for ``http``. ``call_mcp`` calls the MCP tool that ``settings.provider`` names.
    """
    if settings.provider == "none":
        return None
    key = settings.api_key.get_secret_value() if settings.api_key else ""
    options = ProviderOptions(http, settings.url, key, timeout, call_mcp)
    module = import_module(".mcp" if "/" in settings.provider else f".{settings.provider}", __name__)
    provider: SearchProvider = module.Provider(options)
    return provider
