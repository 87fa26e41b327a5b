"""Load Lua scripts for Redis. A package's scripts are the files in its folder `lua`."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import NamedTuple


class Script(NamedTuple):
    """A Lua script. `name` is used in spans. EVALSHA selects the script by `sha`, the SHA-1 hash of `text`."""

    name: str
    text: str
    sha: str


def load(package: str, *names: str, prefix: str = "", library: str = "") -> list[Script]:
    """Load `<package>/lua/<name>.lua` for each name, and prepend the folder's `lib.lua` and then `library` to each script.

    `prefix` is prepended to each script's name in spans.
    """
    folder = files("responses_mw") / package / "lua"
    parts = ("lib", library) if library else ("lib",)
    texts = ["\n".join((folder / f"{part}.lua").read_text() for part in (*parts, name)) for name in names]
    return [
        Script(prefix + name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
        for name, text in zip(names, texts, strict=True)
    ]
