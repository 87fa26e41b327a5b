"""The flags of a command as a person reads them: in sections, each with what its value is, and without the noise."""

from __future__ import annotations

import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import partial
from inspect import cleandoc
from typing import Any

from pydantic_settings import BaseSettings, CliApp, CliSettingsSource

from .settings import Settings

SECTIONS = {
    "host": "where it listens",
    "upstream": "the upstream",
    "base_path": "what is answered",
    "websocket": "WebSockets",
    "redis": "state",
    "workers": "background responses",
    "cache": "cache",
    "mcp_servers": "tools",
    "prompts_dir": "prompt templates",
    "compaction_prompt": "compaction",
    "max_body_bytes": "bounds of a request",
    "api_keys_file": "API keys and limits",
    "admin_port": "telemetry",
}
"""The first setting of each section, as they stand in ``Settings``, and the section's title."""

_TYPES = {"float": "SECONDS", "int": "N", "str": "TEXT", "SecretStr": "SECRET", "dict[str,JSON]": "JSON"}
_ENDINGS = {
    "upstream": "URL",
    "redis": "URL",
    "_url": "URL",
    "_bytes": "BYTES",
    "ttl": "SECONDS",
    "_file": "PATH",
    "_dir": "PATH",
}
_VALUES = {"cache_memory": "BYTES", "cache_threshold": "0..1", "host": "ADDRESS", "admin_host": "ADDRESS"}
_NO_DEFAULTS = tuple(f" (default: {nothing})" for nothing in ("null", "", "[]", "{}", "False"))

_LIST = re.compile(r"\(default: \['(.*)'\]\)")


def run(command: type[BaseSettings], arguments: Sequence[str]) -> None:
    """Runs ``command`` with its ``arguments`` and the environment. Raises what ``CliApp.run`` does."""
    flags = _Flags()
    source: CliSettingsSource[Any] = CliSettingsSource(
        command, add_argument_method=flags.add, formatter_class=partial(RawDescriptionHelpFormatter, max_help_position=36)
    )
    source.root_parser.usage = f"%(prog)s {flags.positional}[options]"
    source.root_parser.description = cleandoc(command.__doc__ or "")
    CliApp.run(command, cli_args=list(arguments), cli_settings_source=source)


def titles() -> dict[str, str]:
    """The title of the section of each setting."""
    title, found = "", {}
    for name in ("host", "port", "check", *Settings.model_fields):
        title = SECTIONS.get(name, title)
        found[name] = title
    return found


class _Flags:
    """Adds flags to a parser: each to the group of its section, which are all made with the first one, to stand in order."""

    def __init__(self) -> None:
        self.positional = ""
        self._titles = titles()
        self._groups: dict[str, Any] = {}

    def add(self, parser: ArgumentParser, *names: str, **options: Any) -> Any:
        """In place of ``ArgumentParser.add_argument``."""
        if not self._groups:
            self._groups = {title: parser.add_argument_group(title) for title in SECTIONS.values()}
        if not names[0].startswith("-"):
            self.positional += f"{options['metavar']} "
        name = options.get("dest", "")
        if "metavar" in options:
            options["metavar"] = _metavar(name, options["metavar"])
        options["help"] = _help(options["help"])
        return self._groups.get(self._titles.get(name, ""), parser).add_argument(*names, **options)


def _metavar(name: str, kind: str) -> str:
    """What a value is, of a setting that pydantic calls ``kind``."""
    ending = next((metavar for ending, metavar in _ENDINGS.items() if name.endswith(ending)), None)
    listed = "A,B,..." if kind.startswith("list[") else None
    return _VALUES.get(name) or ending or listed or _TYPES.get(kind, kind)


def _help(text: str) -> str:
    """``text`` with its default as it would be given, and without one that says nothing."""
    text = next((text.removesuffix(default) for default in _NO_DEFAULTS if text.endswith(default)), text)
    return _LIST.sub(lambda listed: "(default: " + listed[1].replace("', '", ",") + ")", text)
