"""Settings of the tests, as keyword arguments: `cache__mode="exact"` sets `cache.mode`."""

from __future__ import annotations

from typing import Any

from responses_mw import Settings

REDIS_TIMEOUT = 20
"""Timeout of Redis in seconds, for busy machines. What tests a timeout sets a shorter one itself."""


def make_settings(**options: Any) -> Settings:
    """Create settings from arguments `group__name`, or `name` for settings without a group. With a `redis__url`, the timeouts of Redis are generous by default."""
    if "redis__url" in options:
        options = {"redis__timeout": REDIS_TIMEOUT, "cache__timeout": REDIS_TIMEOUT, **options}
    groups: dict[str, Any] = {}
    for option, value in options.items():
        group, separator, name = option.partition("__")
        if separator:
            groups.setdefault(group, {})[name] = value
        else:
            groups[option] = value
    return Settings(**groups)


def flag(option: str) -> str:
    """Return the flag of a setting: `--cache.max-mode` for `cache__max_mode`."""
    return "--" + option.replace("__", ".").replace("_", "-")
