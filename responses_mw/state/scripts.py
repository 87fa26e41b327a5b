"""The state's Lua scripts, in ``lua/``."""

from __future__ import annotations

from importlib.resources import files

from ..lua import Script

__all__ = ["script"]

_FOLDER = files("responses_mw.state") / "lua"


def script(name: str) -> Script:
    """Load ``lua/<name>.lua``."""
    return Script(_FOLDER, name)
