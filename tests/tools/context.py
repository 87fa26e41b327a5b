"""The tool context of a run of an anonymous caller."""

from __future__ import annotations

from typing import Any

import httpx

from responses_mw import Settings
from responses_mw.auth import ANONYMOUS
from responses_mw.crypto import Sealer
from responses_mw.protocol.search_results import sources_of
from responses_mw.tools import ToolContext


def context(settings: Settings, http: httpx.AsyncClient | None = None, **members: Any) -> ToolContext:
    http = http or httpx.AsyncClient(verify=False)
    sources = sources_of(members.get("earlier", ()))
    return ToolContext(settings.tools, settings.search, http, Sealer([]), ANONYMOUS, sources, **members)
