"""The command line: ``responses-mw serve``, ``worker``, ``cache``, ``sandbox``, ``demo``.

commands    each command, with its flags
flags       parsing of flags, their help, and suggestions for misspelt ones
check       ``serve --check``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches

from pydantic import ValidationError
from pydantic_settings import SettingsError

from ..version import VERSION
from .commands import COMMANDS
from .flags import run

__all__ = ["COMMANDS", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of ``responses-mw``."""
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["help"]
    if name == "help" and rest and not rest[0].startswith("-"):
        name, *rest = rest[0], "--help"
    if name in ("-h", "--help", "help"):
        print(_usage())
        return
    if name == "--version":
        print(f"responses-mw {VERSION}")
        return
    command = COMMANDS.get(name)
    if command is None:
        sys.exit(f"responses-mw: {_unknown(name)}\nRun responses-mw help for the commands.")
    try:
        run(command, rest)
    except (ValidationError, SettingsError) as error:
        sys.exit(f"responses-mw {name}: {_explained(error)}")
    except ModuleNotFoundError as missing:  # the package was installed without the extras that a command needs
        sys.exit(f"responses-mw {name} needs the package {missing.name}: pip install 'responses-mw[all]'")


def _usage() -> str:
    lines = [f"  {name:8} {(command.__doc__ or '').splitlines()[0].rstrip(':')}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: responses-mw COMMAND [options]",
            "",
            "commands:",
            *lines,
            "",
            "Run responses-mw help COMMAND for its options, and responses-mw --version for the version.",
        ]
    )


def _unknown(name: str) -> str:
    if name.startswith("-"):
        return f"the command comes before its flags, such as responses-mw serve {name}"
    nearest = get_close_matches(name, COMMANDS, n=1)
    return f"unknown command '{name}'" + (f" (did you mean {nearest[0]}?)" if nearest else "")


def _explained(error: ValidationError | SettingsError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    faults = [(".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")) for fault in error.errors()]
    return "; ".join(f"{where}: {what}" if where else what for where, what in faults)
