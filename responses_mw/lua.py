"""Lua scripts for Redis: one per file, in the folder `lua` of a package, preceded by the folder's `lib.lua`."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import NamedTuple


class Script(NamedTuple):
    """A script: its `name` in spans, its `text`, and its `sha`, by which EVALSHA runs it once a server has cached it."""

    name: str
    text: str
    sha: str


def load(package: str, *names: str, prefix: str = "") -> list[Script]:
    """Load `<package>/lua/<name>.lua` for each name. `prefix` precedes the names in spans."""
    folder = files("responses_mw") / package / "lua"
    texts = ["\n".join((folder / f"{part}.lua").read_text() for part in ("lib", name)) for name in names]
    return [
        Script(prefix + name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
        for name, text in zip(names, texts, strict=True)
    ]
