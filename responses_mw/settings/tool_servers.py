"""MCP servers configured by the operator."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from .types import check_url

EVERY_TOOL = "*"
"""Matches every tool in a list of tool names."""


class ToolFilter(BaseModel):
    """Filter for tools of an MCP server. A tool must match every criterion that is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool_names: list[str] | None = None
    read_only: bool | None = None


class ApprovalFilters(BaseModel):
    """Tools of an MCP server that always need approval, and tools that never do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class ToolServer(BaseModel):
    """An MCP server of the operator. Requests refer to it by label or connector id; its URL and secrets stay hidden."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    headers: dict[str, SecretStr] = Field({})
    authorization: SecretStr | None = None
    """Bearer token. A request may replace it with its own."""
    allowed_tools: list[str] | ToolFilter | None = None
    """Tools that requests may use; None allows all. A request can narrow the list but not extend it."""
    require_approval: Literal["always", "never"] | ApprovalFilters | None = None
    """Default for requests that do not set ``require_approval``; None means ``always``."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        return check_url(value)

    def excludes(self, name: str) -> bool:
        """Return whether ``allowed_tools`` excludes a tool because of its name."""
        names = self.allowed_tools.tool_names if isinstance(self.allowed_tools, ToolFilter) else self.allowed_tools
        return names is not None and name not in names and EVERY_TOOL not in names


def _index_by_label(value: object) -> object:
    """Decode JSON, and convert a list of servers, each with a ``label``, to an object keyed by label."""
    decoded = json.loads(value) if isinstance(value, str) else value
    if not isinstance(decoded, list):
        return decoded
    if not all(isinstance(server, dict) and isinstance(server.get("label"), str) for server in decoded):
        raise ValueError("each server in the list must have a label")
    return {server["label"]: {name: server[name] for name in server if name != "label"} for server in decoded}


ToolServers = Annotated[dict[str, ToolServer], NoDecode, BeforeValidator(_index_by_label)]
