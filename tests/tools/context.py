"""The context of a tool, as a run of an anonymous caller has it."""

from __future__ import annotations

from typing import Any

import httpx

from responses_mw import Settings
from responses_mw.auth import ANONYMOUS
from responses_mw.crypto import Sealer
from responses_mw.tools import ToolConfig, ToolContext


def config(settings: Settings) -> ToolConfig:
    return ToolConfig(settings.tools, settings.search)


def context(settings: Settings, http: httpx.AsyncClient | None = None, **members: Any) -> ToolContext:
    return ToolContext(config(settings), http or httpx.AsyncClient(verify=False), Sealer([]), ANONYMOUS, **members)
