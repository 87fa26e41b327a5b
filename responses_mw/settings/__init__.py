"""All settings, in small groups.

Each setting is a flag of ``responses-mw serve`` (``--cache.mode``), an environment variable (``RESPONSES_MW_CACHE_MODE``) and a
key of the TOML file that ``RESPONSES_MW_CONFIG`` names (``mode`` in the table ``cache``), in this order of precedence. Inside
vLLM there are no flags, because vLLM creates the middleware without arguments. Lists are JSON or comma-separated; durations and
sizes may have a unit (``30s``, ``64MiB``).
"""

from __future__ import annotations

import logging
from typing import Any, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from .groups import (
    PER_REQUEST_HEADERS,
    SEARCH_PROVIDERS,
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
from .sources import COMMAND_SETTINGS, PREFIX, ConfigFile, Environment, groups, origins, unknown_variables, variables
from .tool_servers import EVERY_TOOL, ToolServer

__all__ = [
    "EVERY_TOOL",
    "PER_REQUEST_HEADERS",
    "SEARCH_PROVIDERS",
    "AuthSettings",
    "CacheSettings",
    "CompactionSettings",
    "JobSettings",
    "LimitSettings",
    "RedisSettings",
    "SearchSettings",
    "ServerSettings",
    "Settings",
    "ToolServer",
    "ToolSettings",
    "UpstreamSettings",
    "groups",
    "origins",
    "unknown_variables",
    "variables",
]

logger = logging.getLogger(__name__)

_OTHERS = ("RESPONSES_MW_SANDBOX_", "RESPONSES_MW_DEMO_")
"""Prefixes of the variables of other ``responses-mw`` commands, which may share the environment."""


class Settings(BaseSettings):
    """Settings of the middleware."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        frozen=True,
        validate_default=True,
        hide_input_in_errors=True,
    )

    config: str | None = Field(None, description="TOML file of settings, with a table for each group")
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

    @classmethod
    def from_environment(cls) -> Self:
        """Read the environment and the config file. Log a warning with the variables that name no setting."""
        settings = cls()
        command = [f"{PREFIX}{name}".upper() for name in COMMAND_SETTINGS]
        if unknown := unknown_variables([*variables(cls), *command], ignored=_OTHERS):
            logger.warning("unknown settings in the environment: %s", ", ".join(unknown))
        return settings

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_args: Any,
        **_others: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read keyword arguments, then the environment, then the file. Flags, if any, come before all of them."""
        return init_settings, Environment(settings_cls), ConfigFile(settings_cls)

    @model_validator(mode="after")
    def _check_search_tool(self) -> Self:
        label, slash, tool = self.search.provider.partition("/")
        if slash and label not in self.tools.mcp_servers:
            raise ValueError(f"search.provider names the server '{label}', which is not in tools.mcp_servers")
        if slash and self.tools.mcp_servers[label].excludes(tool):
            raise ValueError(f"search.provider names the tool '{tool}', which is not in allowed_tools of '{label}'")
        return self
