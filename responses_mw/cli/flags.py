"""The flags of a command: their help, their values, and the error for an unknown flag."""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from inspect import cleandoc
from typing import Any, ClassVar, NoReturn

from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsConfigDict

__all__ = ["FLAGS", "run"]

FLAGS = SettingsConfigDict(cli_kebab_case=True, cli_hide_none_type=True, cli_implicit_flags=True, cli_avoid_json=True)
_SHORT_FLAGS = {"upstream.url": "--upstream", "redis.url": "--redis"}
"""Short flags by setting. pydantic-settings' ``cli_shortcuts`` does not allow names of groups."""

_PLACEHOLDERS = {"float": "SECONDS", "int": "N", "str": "TEXT", "SecretStr": "SECRET", "dict[str,JSON]": "JSON"}
_ENDINGS = {
    "url": "URL",
    "_bytes": "SIZE",
    "ttl": "SECONDS",
    "_dir": "PATH",
    "host": "ADDRESS",
    "config": "PATH",
    "threshold": "N",
}


def run(command: type[BaseSettings], arguments: Sequence[str]) -> None:
    """Run ``command`` with the settings from ``arguments``, the environment and the config file."""
    parser = _Parser(command)
    source: CliSettingsSource[Any] = CliSettingsSource(
        command,
        root_parser=parser,
        parse_args_method=_Parser.parse_args,
        add_argument_method=parser.add_setting,
        formatter_class=parser.formatter_class,
    )
    CliApp.run(command, cli_args=list(arguments), cli_settings_source=source)


class _Parser(ArgumentParser):
    """Parser of flags for the settings that a command ``uses``; all settings if it does not define ``uses``."""

    everything: ClassVar[tuple[str, ...]] = ("*",)

    def __init__(self, command: type[BaseSettings]) -> None:
        super().__init__(
            prog=str(command.model_config["cli_prog_name"]),
            usage=f"%(prog)s {getattr(command, 'arguments', '')}[options]",
            description=cleandoc(command.__doc__ or ""),
            formatter_class=partial(RawDescriptionHelpFormatter, max_help_position=36),
            allow_abbrev=False,
        )
        self._uses: tuple[str, ...] = getattr(command, "uses", self.everything)
        self._known: list[str] = []
        self._unused: list[str] = []

    def add_setting(self, group: Any, *names: str, **options: Any) -> Any:
        """Add a flag with a readable placeholder. Its help omits an empty default."""
        setting = options.get("dest", "")  # a positional argument has none
        if options["help"] == SUPPRESS:  # a group as JSON
            return None
        if setting in _SHORT_FLAGS:
            names = (_SHORT_FLAGS[setting], *names)
        if setting and not any(fnmatchcase(setting, pattern) for pattern in self._uses):
            self._unused += names
            return None
        self._known += names
        kind = options.get("metavar")
        if kind is not None and setting:
            ending = next((placeholder for ending, placeholder in _ENDINGS.items() if setting.endswith(ending)), None)
            options["metavar"] = "A,B,..." if kind.startswith("list[") else ending or _PLACEHOLDERS.get(kind, kind)
        text = re.sub(r" \(default: (None||False|\[\]|\{\})\)$", "", options["help"])
        options["help"] = re.sub(r"\(default: \['(.*)'\]\)", lambda found: f"(default: {found[1]})".replace("', '", ","), text)
        return group.add_argument(*names, **options)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Return the values of the flags. If a flag is unknown, print a suggestion and exit."""
        parsed, unknown = self.parse_known_args(*args, **kwargs)
        if unknown:
            flags = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
            self.error("; ".join(map(self._unknown, flags)) or f"unexpected argument '{unknown[0]}'")
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nRun {self.prog} --help for its options.\n")

    def _unknown(self, flag: str) -> str:
        if flag in self._unused:
            return f"{flag}: this command does not use that setting"
        nearest = get_close_matches(flag, self._known, n=1)
        return f"unknown flag {flag}" + (f" (did you mean {nearest[0]}?)" if nearest else "")
