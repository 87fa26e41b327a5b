"""The cache's Lua scripts. Their names in spans begin with ``cache_``."""

from __future__ import annotations

from importlib.resources import files

from ..lua import Script

__all__ = ["FLIGHT", "FORGET", "KEEP", "LOOKUP", "PURGE", "READ", "SEARCH", "SINCE", "STATS", "Script"]


def _script(name: str) -> Script:
    return Script(files("responses_mw.cache"), name, prefix="cache_")


LOOKUP, READ, FLIGHT, KEEP = (_script(name) for name in ("lookup", "read", "flight", "keep"))
SINCE, SEARCH, FORGET, PURGE, STATS = (_script(name) for name in ("since", "search", "forget", "purge", "stats"))
