"""Types of settings: durations, sizes, lists, URLs and MCP servers."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic_settings import NoDecode

EVERY_TOOL = "*"
"""Matches every tool in a list of tool names."""

_SECONDS: dict[str, float] = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES: dict[str, float] = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def _scale(value: Any, units: dict[str, float], fault: str) -> Any:
    """Convert text with a unit to a number. Text without a unit is left to pydantic."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or (match[2] and match[2] not in units):
        raise ValueError(fault)
    return float(match[1]) * units[match[2]] if match[2] else match[1]


def _parse_duration(value: Any) -> Any:
    return _scale(value, _SECONDS, "must be a duration such as 30, 500ms, 30s, 10m, 2h or 7d")


def _parse_size(value: Any) -> Any:
    return _scale(value, _BYTES, "must be a size such as 1000, 64KiB, 16MiB or 2GiB")


def _split(value: Any) -> Any:
    """Split a comma-separated string, or decode a JSON array."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [name.strip() for name in value.split(",") if name.strip()]


def _check_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an http:// or https:// URL")
    if parts.username or parts.password:
        raise ValueError("must not contain credentials, because it is logged; use the setting for the key")
    _ = parts.port  # raises ValueError if it is not a number
    return value


Duration = Annotated[float, BeforeValidator(_parse_duration), Field(json_schema_extra={"format": "duration"})]
"""Seconds, or text with a unit: `30s`, `7d`."""
WholeDuration = Annotated[int, BeforeValidator(_parse_duration), Field(json_schema_extra={"format": "duration"})]
Size = Annotated[int, BeforeValidator(_parse_size), Field(json_schema_extra={"format": "size"})]
"""Bytes, or text with a unit: `64MiB`."""
LIST = NoDecode, BeforeValidator(_split)
"""Annotations of a list that may be comma-separated text."""
Names = Annotated[list[str], *LIST]
Secrets = Annotated[list[SecretStr], *LIST]
URL = Annotated[str, AfterValidator(_check_url)]
ServerURL = Annotated[URL, AfterValidator(lambda url: url.rstrip("/"))]
BaseURL = Annotated[ServerURL, AfterValidator(lambda url: url.removesuffix("/v1"))]
"""The URL of a server, which may be given with or without /v1 at its end."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ToolFilter(_Model):
    """Filter for tools of an MCP server. A tool must match every criterion that is set."""

    tool_names: list[str] | None = None
    read_only: bool | None = None


class ApprovalFilters(_Model):
    """Tools of an MCP server that always need approval, and tools that never do."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class ToolServer(_Model):
    """An MCP server of the operator. Requests refer to it by label or connector id; its URL and secrets stay hidden."""

    url: URL
    headers: dict[str, SecretStr] = Field({})
    authorization: SecretStr | None = None
    """Bearer token. A request may replace it with its own."""
    allowed_tools: list[str] | ToolFilter | None = None
    """Tools that requests may use; None allows all. A request can narrow the list but not extend it."""
    require_approval: Literal["always", "never"] | ApprovalFilters | None = None
    """Default for requests that do not set `require_approval`; None means `always`."""

    def excludes(self, name: str) -> bool:
        """Return whether `allowed_tools` excludes a tool because of its name."""
        names = self.allowed_tools.tool_names if isinstance(self.allowed_tools, ToolFilter) else self.allowed_tools
        return names is not None and name not in names and EVERY_TOOL not in names


ToolServers = Annotated[
    dict[str, ToolServer], NoDecode, BeforeValidator(lambda value: json.loads(value) if isinstance(value, str) else value)
]
