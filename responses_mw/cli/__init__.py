"""The command line. This module parses the arguments; `commands` defines the commands and their flags."""

from __future__ import annotations

import re
import sys
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from inspect import cleandoc
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsError

from ..settings import did_you_mean
from ..version import VERSION
from .commands import COMMANDS

__all__ = ["COMMANDS", "main"]

_SHORT_FLAGS = {"upstream.url": ["--upstream"], "redis.url": ["--redis"], "json_lines": ["--json"]}
"""Short flags by setting. pydantic-settings' own `cli_shortcuts` cannot use the name of a group as a flag."""

_PLACEHOLDERS = {
    "float": "SECONDS",
    "int": "N",
    "str": "TEXT",
    "SecretStr": "SECRET",
    "dict[str,JSON]": "JSON",
    "dict[str,SecretStr]": "JSON",
    "dict[str,str]": "JSON",
}
_ENDINGS = {
    "url": "URL",
    "_bytes": "SIZE",
    "ttl": "SECONDS",
    "_dir": "PATH",
    "host": "ADDRESS",
    "config": "PATH",
    "threshold": "N",
    "probability": "N",
    "audit": "N",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line `arguments`, which default to `sys.argv[1:]`. On an error, exit with a message."""
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["help"]
    if name == "help" and rest and not rest[0].startswith("-"):
        name, *rest = rest[0], "--help"
    if name in ("-h", "--help", "help"):
        print(_usage())
    elif name == "--version":
        print(f"responses-mw {VERSION}")
    elif name in COMMANDS:
        _run(name, rest)
    elif name.startswith("-"):
        sys.exit(f"responses-mw: the command comes before its flags, such as responses-mw serve {name}{_SEE_HELP}")
    else:
        sys.exit(f"responses-mw: unknown command '{name}'{did_you_mean(name, COMMANDS)}{_SEE_HELP}")


_SEE_HELP = "\nRun responses-mw help for the commands."


def _usage() -> str:
    lines = [f"  {name:8} {(command.__doc__ or '').splitlines()[0].rstrip(':')}" for name, command in COMMANDS.items()]
    end = "Run responses-mw help COMMAND for its options, and responses-mw --version for the version."
    return "\n".join(["usage: responses-mw COMMAND [options]", "", "commands:", *lines, "", end])


def _run(name: str, arguments: Sequence[str]) -> None:
    """Run the command `name`. If its settings are invalid or a package is missing, exit with an error message."""
    command = COMMANDS[name]
    parser = _Parser(command)
    source: CliSettingsSource[Any] = CliSettingsSource(
        command, root_parser=parser, parse_args_method=_Parser.parse_args, add_argument_method=parser.add_setting
    )
    try:
        CliApp.run(command, cli_args=list(arguments), cli_settings_source=source)
    except (ValidationError, SettingsError) as error:
        sys.exit(f"responses-mw {name}: {_explained(error)}")
    except ModuleNotFoundError as missing:  # the package was installed without the extras that a command needs
        extra = "demo" if name == "demo" else "all"
        how = f"install responses-mw with the extra '{extra}' (in a clone: pip install '.[{extra}]')"
        sys.exit(f"responses-mw {name} needs {missing.name}: {how}")


def _explained(error: ValidationError | SettingsError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    faults = [(".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")) for fault in error.errors()]
    return "; ".join(f"{where}: {what}" if where else what for where, what in faults)


def _placeholder(setting: str, kind: str) -> str:
    if kind.startswith("list["):
        return "A,B,..."
    ending = next((placeholder for ending, placeholder in _ENDINGS.items() if setting.endswith(ending)), None)
    return ending or _PLACEHOLDERS.get(kind, kind)


class _Parser(ArgumentParser):
    """Parser for the flags of a command. If the command defines `uses`, only settings that match its patterns have flags."""

    def __init__(self, command: type[BaseSettings]) -> None:
        super().__init__(
            prog=str(command.model_config["cli_prog_name"]),
            usage=f"%(prog)s {getattr(command, 'arguments', '')}[options]",
            description=cleandoc(command.__doc__ or ""),
            formatter_class=partial(RawDescriptionHelpFormatter, max_help_position=36),
            allow_abbrev=False,
        )
        self._uses: list[str] = getattr(command, "uses", "*").split()
        self._known: list[str] = []
        self._unused: list[str] = []

    def add_setting(self, group: Any, *names: str, **options: Any) -> None:
        """Add the flag of a setting if the command uses the setting. Omit an empty default from the help text."""
        setting = options.get("dest", "")  # a positional argument has none
        if options["help"] == SUPPRESS:  # a group as JSON
            return
        names = (*_SHORT_FLAGS.get(setting, ()), *names)
        if setting and not any(fnmatchcase(setting, pattern) for pattern in self._uses):
            self._unused += names
            return
        self._known += names
        if setting and options.get("metavar") is not None:
            options["metavar"] = _placeholder(setting, options["metavar"])
        text = re.sub(r" \(default: (None||False|\[\]|\{\}|\(\))\)$", "", options["help"])
        options["help"] = re.sub(r"\(default: \['(.*)'\]\)", lambda found: f"(default: {found[1]})".replace("', '", ","), text)
        group.add_argument(*names, **options)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments. If a flag is unknown, exit with an error, which suggests a similar flag if there is one."""
        parsed, unknown = self.parse_known_args(*args, **kwargs)
        if unknown:  # such as the texts after a flag
            parsed, unknown = self.parse_known_intermixed_args(*args, **kwargs)
        if unknown:
            flags = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
            self.error("; ".join(map(self._unknown, flags)) or f"unexpected argument '{unknown[0]}'")
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nRun {self.prog} --help for its options.\n")

    def _unknown(self, flag: str) -> str:
        if flag in self._unused:
            return f"{flag}: this command does not use that setting"
        return f"unknown flag {flag}{did_you_mean(flag, self._known)}"
