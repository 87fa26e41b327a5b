"""The Lua scripts, one a file. Each is the shared ``lib.lua`` and then its own text."""

from __future__ import annotations

import hashlib
from importlib.resources import files

_FOLDER = files("responses_mw.cache")


class Script:
    """A script's ``name`` in spans, its ``text``, and the ``sha`` that the server knows it by."""

    __slots__ = ("name", "sha", "text")

    def __init__(self, name: str) -> None:
        """Reads ``<name>.lua``."""
        self.name = f"cache_{name}"
        lib = (_FOLDER / "lib.lua").read_text()
        self.text = f"{lib}\n{(_FOLDER / f'{name}.lua').read_text()}"
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


LOOKUP, READ, FLIGHT, KEEP = (Script(name) for name in ("lookup", "read", "flight", "keep"))
SINCE, SEARCH, FORGET, PURGE, STATS = (Script(name) for name in ("since", "search", "forget", "purge", "stats"))
