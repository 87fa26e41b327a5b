"""All settings, in small groups.

Each setting is an environment variable (``RESPONSES_MW_`` followed by the group and the name, e.g. ``RESPONSES_MW_CACHE_MODE``)
and a flag of ``responses-mw serve`` (``--cache.mode``). Inside vLLM, which creates the middleware without arguments,
only the environment is available. Lists are JSON or comma-separated; durations and sizes may have a unit (``30s``, ``64MiB``).
"""

from __future__ import annotations

from typing import Self

from pydantic import model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from .groups import (
    MIN_SECRET_LENGTH,
    PER_REQUEST_HEADERS,
    AuthSettings,
    CacheSettings,
    CompactionSettings,
    JobSettings,
    LimitSettings,
    RedisSettings,
    SearchSettings,
    ServerSettings,
    StateSettings,
    ToolSettings,
    UpstreamSettings,
)
from .tool_servers import EVERY_TOOL, ApprovalFilters, ToolFilter, ToolServer

__all__ = [
    "EVERY_TOOL",
    "MIN_SECRET_LENGTH",
    "PER_REQUEST_HEADERS",
    "ApprovalFilters",
    "AuthSettings",
    "CacheSettings",
    "CompactionSettings",
    "JobSettings",
    "LimitSettings",
    "RedisSettings",
    "SearchSettings",
    "ServerSettings",
    "Settings",
    "StateSettings",
    "ToolFilter",
    "ToolServer",
    "ToolSettings",
    "UpstreamSettings",
]


class Settings(BaseSettings):
    """Settings of the middleware."""

    model_config = SettingsConfigDict(
        env_prefix="RESPONSES_MW_",
        env_nested_delimiter="_",
        env_nested_max_split=1,
        extra="forbid",
        frozen=True,
        validate_default=True,
        hide_input_in_errors=True,
    )

    upstream: UpstreamSettings = UpstreamSettings()
    server: ServerSettings = ServerSettings()
    redis: RedisSettings = RedisSettings()
    state: StateSettings = StateSettings()
    auth: AuthSettings = AuthSettings()
    jobs: JobSettings = JobSettings()
    cache: CacheSettings = CacheSettings()
    tools: ToolSettings = ToolSettings()
    search: SearchSettings = SearchSettings()
    compaction: CompactionSettings = CompactionSettings()
    limits: LimitSettings = LimitSettings()

    @model_validator(mode="after")
    def _check_search_tool(self) -> Self:
        if self.search.provider == "mcp":
            label, _, tool = (self.search.mcp_tool or "").partition("/")
            if label not in self.tools.mcp_servers:
                raise ValueError(f"search.mcp_tool names '{label}', which is not in tools.mcp_servers")
            if self.tools.mcp_servers[label].excludes(tool):
                raise ValueError(f"search.mcp_tool names '{tool}', which allowed_tools of '{label}' does not allow")
        return self
