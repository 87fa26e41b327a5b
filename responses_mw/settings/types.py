"""Types of settings: durations, sizes, lists of names and URLs."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

KIB, MIB, GIB = 1024, 1024**2, 1024**3

_NUMBER = r"\s*(\d+(?:\.\d+)?)\s*"
_DURATION = re.compile(_NUMBER + r"(ms|s|m|h|d|w)\s*")
_SECONDS: dict[str, float] = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZE = re.compile(_NUMBER + r"(B|KB|MB|GB|KiB|MiB|GiB)\s*")
_BYTES: dict[str, float] = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": KIB, "MiB": MIB, "GiB": GIB}


def _parse_duration(value: Any) -> Any:
    """Convert ``30s`` or ``7d`` to seconds. A plain number is a number of seconds."""
    return _scale(value, _DURATION, _SECONDS, "must be a duration such as 30, 500ms, 30s, 10m, 2h or 7d")


def _parse_size(value: Any) -> Any:
    """Convert ``64MiB`` to bytes. A plain number is a number of bytes."""
    return _scale(value, _SIZE, _BYTES, "must be a size such as 1000, 64KiB, 16MiB or 2GiB")


def _scale(value: Any, pattern: re.Pattern[str], units: dict[str, float], fault: str) -> Any:
    if not isinstance(value, str):
        return value
    if match := pattern.fullmatch(value):
        return float(match[1]) * units[match[2]]
    if re.fullmatch(r"\s*-?\d+(\.\d+)?\s*", value):
        return value
    raise ValueError(fault)


def split_names(value: object) -> object:
    """Split a comma-separated string, or decode a JSON array."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [name.strip() for name in value.split(",") if name.strip()]


def check_url(value: str) -> str:
    """Return ``value`` if it is an http:// or https:// URL without credentials. Raises ``ValueError``."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an http:// or https:// URL")
    if parts.username or parts.password:
        raise ValueError("must not contain credentials, because it is logged; use the setting for the key")
    _ = parts.port  # raises ValueError if it is not a number
    return value


Duration = Annotated[float, BeforeValidator(_parse_duration), Field(json_schema_extra={"format": "duration"})]
WholeDuration = Annotated[int, BeforeValidator(_parse_duration), Field(json_schema_extra={"format": "duration"})]
"""A duration in whole seconds."""
Size = Annotated[int, BeforeValidator(_parse_size), Field(json_schema_extra={"format": "size"})]
Names = Annotated[list[str], NoDecode, BeforeValidator(split_names)]
Secrets = Annotated[list[SecretStr], NoDecode, BeforeValidator(split_names)]
