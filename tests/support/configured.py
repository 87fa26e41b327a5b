"""Settings of the tests, as keyword arguments: `cache__mode="exact"` sets `cache.mode`."""

from __future__ import annotations

from typing import Any

from responses_mw import Settings


def make_settings(**options: Any) -> Settings:
    """Create settings from `group__name` arguments."""
    groups: dict[str, Any] = {}
    for option, value in options.items():
        group, _, name = option.partition("__")
        groups.setdefault(group, {})[name] = value
    return Settings(**groups)


def flag(option: str) -> str:
    """Return the flag of a setting: `--cache.max-mode` for `cache__max_mode`."""
    return "--" + option.replace("__", ".").replace("_", "-")
