"""Lua scripts for Redis: one per file, preceded by the ``lib.lua`` of its folder."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = ["Script"]


class Script:
    """A script: its ``name`` in spans, its ``text``, and its ``sha``, by which EVALSHA runs it once a server has cached it."""

    __slots__ = ("name", "sha", "text")

    def __init__(self, folder: Traversable, file: str, *, prefix: str = "") -> None:
        """Read ``lib.lua`` and ``<file>.lua`` from ``folder``. The script's name is ``prefix + file``."""
        self.name = prefix + file
        self.text = "\n".join((folder / f"{part}.lua").read_text() for part in ("lib", file))
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
