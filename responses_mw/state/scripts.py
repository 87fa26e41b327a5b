"""The Lua scripts, one a file. Each is the shared ``lib.lua`` and then its own text."""

from __future__ import annotations

import hashlib
from importlib.resources import files

__all__ = ["Script"]

_FOLDER = files("responses_mw.state")


class Script:
    """A script's ``name`` and ``text``, and the ``sha`` that the server knows it by."""

    __slots__ = ("name", "sha", "text")

    def __init__(self, name: str) -> None:
        """Reads ``<name>.lua``."""
        self.name = name
        lib = (_FOLDER / "lib.lua").read_text()
        self.text = f"{lib}\n{(_FOLDER / f'{name}.lua').read_text()}"
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
