"""Types of settings: durations, sizes, lists, URLs and MCP servers."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic_settings import NoDecode

EVERY_TOOL = "*"
"""The entry in a list of tool names that matches every tool."""

_SECONDS: dict[str, float] = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES: dict[str, float] = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def _scale(value: Any, units: dict[str, float], fault: str) -> Any:
    """Convert text with a unit to a number. Return other values unchanged, and text without a unit as its digits.

    Raises `ValueError` with the message `fault` if the text is malformed or the unit is unknown.
    """
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
    """Split a comma-separated string, or decode a JSON array. Return values that are not text unchanged."""
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
"""A number of seconds, or text with a unit, such as `30s` or `7d`."""
WholeDuration = Annotated[int, BeforeValidator(_parse_duration), Field(json_schema_extra={"format": "duration"})]
Size = Annotated[int, BeforeValidator(_parse_size), Field(json_schema_extra={"format": "size"})]
"""A number of bytes, or text with a unit, such as `64MiB`."""
LIST = NoDecode, BeforeValidator(_split)
"""Annotations for a list that may be given as comma-separated text."""
Names = Annotated[list[str], *LIST]
Secrets = Annotated[list[SecretStr], *LIST]
URL = Annotated[str, AfterValidator(_check_url)]
ServerURL = Annotated[URL, AfterValidator(lambda url: url.rstrip("/"))]
BaseURL = Annotated[ServerURL, AfterValidator(lambda url: url.removesuffix("/v1"))]
"""The URL of a server. A final `/v1` is removed."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ToolFilter(_Model):
    """Filter for the tools of an MCP server. A tool matches if it meets all criteria that are set."""

    tool_names: list[str] | None = None
    read_only: bool | None = None


class ApprovalFilters(_Model):
    """Filters for the tools of an MCP server whose calls always need an approval, or never need an approval."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class ToolServer(_Model):
    """An MCP server of the operator. Requests select it by label or connector id. Its URL and secrets are never returned."""

    url: URL
    headers: dict[str, SecretStr] = Field({})
    authorization: SecretStr | None = None
    """Bearer token. A request may replace it with a token of its own."""
    allowed_tools: list[str] | ToolFilter | None = None
    """The tools that requests may use. None allows all tools. A request can further restrict the tools."""
    require_approval: Literal["always", "never"] | ApprovalFilters | None = None
    """The default for requests that do not set `require_approval`. None means `always`."""

    def excludes(self, name: str) -> bool:
        """Return whether `allowed_tools` excludes a tool because of its name."""
        names = self.allowed_tools.tool_names if isinstance(self.allowed_tools, ToolFilter) else self.allowed_tools
        return names is not None and name not in names and EVERY_TOOL not in names


ToolServers = Annotated[
    dict[str, ToolServer], NoDecode, BeforeValidator(lambda value: json.loads(value) if isinstance(value, str) else value)
]
