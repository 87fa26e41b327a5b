"""Where settings come from: environment variables and a TOML file. Flags are read by ``responses_mw.cli``."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsError

from .groups import Group

PREFIX = "RESPONSES_MW_"

COMMAND_SETTINGS = ("host", "port", "processes")
"""Settings that only ``responses-mw serve`` has. Other processes may share its environment and config file."""

_SERVICE_LINK = re.compile(
    r"(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)=|PORT=(?:tcp|udp|sctp)://"
)
"""Matches a variable that Kubernetes sets for a Service, as ``NAME=value`` without the Service's name."""


def groups(settings: type[BaseSettings]) -> dict[str, type[Group]]:
    """Return the groups of ``settings`` by name."""
    kinds = {name: field.annotation for name, field in settings.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Group)}


def variables(settings: type[BaseSettings]) -> dict[str, tuple[str, ...]]:
    """Map each environment variable of ``settings`` to the path of its setting: a group and a name, or only a name."""
    prefix, kinds = str(settings.model_config["env_prefix"]), groups(settings)
    paths = [(name,) for name in settings.model_fields if name not in kinds]
    members = [(group, name) for group, kind in kinds.items() for name in kind.model_fields]
    return {f"{prefix}{'_'.join(path)}".upper(): path for path in [*paths, *members]}


def unknown_variables(known: Iterable[str], ignored: tuple[str, ...] = ()) -> list[str]:
    """Return the environment variables that begin with ``RESPONSES_MW_`` but are not ``known``, with suggestions.

    Variables with a prefix in ``ignored`` and variables that Kubernetes sets for Services are omitted.
    """
    names = sorted(set(known))
    return [f"{name}{_nearest(name, names)}" for name in sorted(_ours()) if name not in names and not name.startswith(ignored)]


def origins(settings: BaseSettings) -> dict[str, str]:
    """Map each setting that differs from its default to its origin: an environment variable, the config file, or a flag."""
    kind = type(settings)
    given, path = _ours(), getattr(settings, "config", None)
    content = _read(Path(path)) if path else {}
    without_flags = _without_flags(kind)
    found: dict[str, str] = {}
    for variable, keys in variables(kind).items():
        value = _value(settings, keys)
        if value == _value(kind.model_construct(), keys):
            continue
        is_flag = without_flags is not None and value != _value(without_flags, keys)
        origin = variable if variable in given else str(path) if _value(content, keys) is not None else "a flag"
        found[".".join(keys)] = "a flag" if is_flag else origin
    return found


def _without_flags(kind: type[BaseSettings]) -> BaseSettings | None:
    """Return the settings from the environment and the file, or None if they are invalid without the flags."""
    try:
        return kind()
    except ValidationError:
        return None


def _value(source: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        source = source.get(key) if isinstance(source, dict) else getattr(source, key, None)
    return source


class Environment(PydanticBaseSettingsSource):
    """Environment variables of a settings class, without the variables that Kubernetes sets for Services.

    Raises ``SettingsError`` if a variable names a group instead of one of its settings.
    """

    def __call__(self) -> dict[str, Any]:
        given = _ours()
        for group, kind in groups(self.settings_cls).items():
            variable = f"{self.config['env_prefix']}{group}".upper()
            if variable in given:
                example = f"{variable}_{next(iter(kind.model_fields))}".upper()
                raise SettingsError(f"{variable} names a group of settings. Set one of its settings, such as {example}.")
        found: dict[str, Any] = {}
        for variable, (*parents, name) in variables(self.settings_cls).items():
            if variable in given:
                section = found.setdefault(parents[0], {}) if parents else found
                section[name] = given[variable]
        return found

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return nothing: all values are read at once."""
        return None, field_name, False


class ConfigFile(PydanticBaseSettingsSource):
    """The TOML file that the setting ``config`` names, with a table for each group.

    Raises ``SettingsError`` if the file cannot be read or contains unknown settings.
    """

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        if not path:
            return {}
        content = _read(Path(path))
        if unknown := list(_unknown_keys(content, groups(self.settings_cls))):
            raise SettingsError(f"{path} (config) contains unknown settings: {', '.join(unknown)}")
        return {name: value for name, value in content.items() if name in self.settings_cls.model_fields}

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return nothing: all values are read at once."""
        return None, field_name, False


def _ours() -> dict[str, str]:
    """Return the variables that begin with ``RESPONSES_MW_`` in upper case, except those that Kubernetes sets for Services."""
    found = {name.upper(): value for name, value in os.environ.items() if name.upper().startswith(PREFIX)}
    return {name: value for name, value in found.items() if not _is_service_link(name.removeprefix(PREFIX), value)}


def _is_service_link(name: str, value: str) -> bool:
    """Return whether Kubernetes set the variable, for a Service named ``responses-mw`` or ``responses-mw-...``."""
    words = name.split("_")
    return any(_SERVICE_LINK.match(f"{'_'.join(words[start:])}={value}") for start in range(len(words)))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} (config) cannot be read: {error.strerror}") from None
    except ValueError as error:  # invalid TOML or UTF-8
        raise SettingsError(f"{path} (config) is not valid TOML: {error}") from None


def _unknown_keys(content: Mapping[str, Any], kinds: Mapping[str, type[Group]]) -> Iterator[str]:
    known = [f"{group}.{name}" for group, kind in kinds.items() for name in kind.model_fields]
    for key, value in content.items():
        if key in kinds:
            if not isinstance(value, dict):
                raise SettingsError(f"config: {key} must be a table: [{key}]")
            yield from (f"{path}{_nearest(path, known)}" for path in (f"{key}.{name}" for name in value) if path not in known)
        elif key not in COMMAND_SETTINGS:
            yield f"{key}{_nearest(key, [*known, *kinds, *COMMAND_SETTINGS])}"


def _nearest(name: str, known: list[str]) -> str:
    """Return a hint with the known name that is most similar to ``name``, or "" if none is similar.

    A known name that only adds a group or an ending to ``name`` is preferred to one that is spelled differently.
    """
    tail = name.removeprefix(PREFIX)
    longer = [one for one in known if one.endswith((f"_{tail}", f".{tail}")) or one.startswith(f"{name}_")]
    found = longer if len(longer) == 1 else get_close_matches(name, known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""
