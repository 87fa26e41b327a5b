"""The settings of the middleware. Their sources are flags (see `responses_mw.cli`), environment variables and a TOML file.

Flags take precedence over variables, and variables over the file.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from .groups import (
    AuthSettings,
    CacheSettings,
    CompactionSettings,
    FileSettings,
    JobSettings,
    LimitSettings,
    RedisSettings,
    SearchSettings,
    ServerSettings,
    StateSettings,
    ToolSettings,
    UISettings,
)
from .upstreams import DEFAULT, Upstreams, UpstreamSettings, check_upstreams, path_of
from .values import Group

logger = logging.getLogger(__name__)

PREFIX = "RESPONSES_MW_"

COMMAND_SETTINGS = ("host", "port", "processes")
"""Settings of `responses-mw serve`. Other processes that share the environment or config file of `serve` ignore them."""

_OTHER_COMMANDS = ("RESPONSES_MW_SANDBOX_", "RESPONSES_MW_DEMO_")
"""Prefixes of the variables for other commands, which may be set in the same environment."""

_SERVICE_LINK = re.compile(
    r"(?:^|_)(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)=|(?:^|_)PORT=(?:tcp|udp|sctp)://"
)
"""Pattern of `NAME=value` for variables that Kubernetes sets for Services. `NAME` is the variable's name without `PREFIX`."""


class _Source(PydanticBaseSettingsSource):
    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False  # `__call__` reads all values at once


class Environment(_Source):
    """Settings source that reads environment variables. Raises `SettingsError` if a variable names a group, not a setting."""

    def __call__(self) -> dict[str, Any]:
        given, found = _ours(), dict[str, Any]()
        for group, kind in groups(self.settings_cls).items():
            variable = f"{self.config['env_prefix']}{group}".upper()
            if variable in given:
                example = f"{variable}_{next(iter(kind.model_fields))}".upper()
                raise SettingsError(f"{variable} names a group of settings. Set one of its settings, such as {example}.")
        for variable, (*parents, name) in variables(self.settings_cls).items():
            if variable in given:
                section = found.setdefault(parents[0], {}) if parents else found
                section[name] = given[variable]
        return found


class _ConfigFile(_Source):
    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")  # from a source with a higher precedence
        content = _read(path) if path else {}
        if unknown := list(_unknown_keys(content, groups(self.settings_cls))):
            raise SettingsError(f"{path} (config) contains unknown settings: {', '.join(unknown)}")
        return {name: value for name, value in content.items() if name in self.settings_cls.model_fields}


class Settings(BaseSettings):
    """The settings of the middleware."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        frozen=True,
        validate_default=True,
        hide_input_in_errors=True,
    )

    checks_callers: ClassVar[bool] = True
    """Whether the process receives requests, and therefore needs `auth.api_keys` for several upstreams with credentials."""

    config: str | None = Field(None, description="TOML file of settings, with a table for each group")
    upstreams: Upstreams = Field(
        {},
        description='further upstreams by name, each with the settings of upstream, as JSON: {"qwen": {"url": "http://..."}}',
    )
    upstream: UpstreamSettings = UpstreamSettings()
    server: ServerSettings = ServerSettings()
    redis: RedisSettings = RedisSettings()
    state: StateSettings = StateSettings()
    auth: AuthSettings = AuthSettings()
    jobs: JobSettings = JobSettings()
    cache: CacheSettings = CacheSettings()
    tools: ToolSettings = ToolSettings()
    search: SearchSettings = SearchSettings()
    files: FileSettings = FileSettings()
    compaction: CompactionSettings = CompactionSettings()
    limits: LimitSettings = LimitSettings()
    ui: UISettings = UISettings()

    @classmethod
    def from_environment(cls) -> Self:
        """Read the settings from the environment and the config file. If the environment has unknown variables, log a warning.

        Raises `ValidationError` or `SettingsError` if the settings are invalid.
        """
        settings = cls()
        command = [f"{PREFIX}{name}".upper() for name in COMMAND_SETTINGS]
        if unknown := unknown_variables([*variables(cls), *command], ignored=_OTHER_COMMANDS):
            logger.warning("unknown settings in the environment: %s", ", ".join(unknown))
        return settings

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_args: Any,
        **_others: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # in the order of precedence; pydantic-settings puts flags before these sources
        return init_settings, Environment(settings_cls), _ConfigFile(settings_cls)

    @property
    def named_upstreams(self) -> dict[str, UpstreamSettings]:
        """All upstreams by name. `upstream` is the first, as `DEFAULT`, unless only `upstreams` is set."""
        has_default = bool(self.upstream.url) or not self.upstreams
        return ({DEFAULT: self.upstream} if has_default else {}) | self.upstreams

    @property
    def serves_files(self) -> bool:
        """Whether this server serves files and vector stores. Otherwise, their paths are passed to the upstream."""
        return self.files.enabled and any(upstream.api != "responses" for upstream in self.named_upstreams.values())

    @model_validator(mode="after")
    def _check_upstreams(self) -> Self:
        if self.upstream.url and DEFAULT in self.upstreams:
            raise ValueError(f"upstreams.{DEFAULT}: the name is that of upstream.url: set only one of them")
        if without := [name for name, upstream in self.upstreams.items() if not upstream.url]:
            raise ValueError(f"upstreams.{without[0]} needs a url")
        upstreams = self.named_upstreams
        check_upstreams(upstreams)
        keyed = [path_of(name) for name, upstream in upstreams.items() if upstream.has_credential]
        if self.checks_callers and len(upstreams) > 1 and keyed and not self.auth.api_keys:
            raise ValueError(f"{keyed[0]} has a credential, and there are several upstreams: auth.api_keys is required")
        return self

    @model_validator(mode="after")
    def _check_search_tool(self) -> Self:
        label, slash, tool = self.search.provider.partition("/")
        if slash and label not in self.tools.mcp_servers:
            raise ValueError(f"search.provider names the server '{label}', which is not in tools.mcp_servers")
        if slash and self.tools.mcp_servers[label].excludes(tool):
            raise ValueError(f"search.provider names the tool '{tool}', which is not in allowed_tools of '{label}'")
        return self


def groups(settings: type[BaseSettings]) -> dict[str, type[Group]]:
    """Return a mapping from the names of the groups in `settings` to their classes."""
    kinds = {name: field.annotation for name, field in settings.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Group)}


def variables(settings: type[BaseSettings]) -> dict[str, tuple[str, ...]]:
    """Map each environment variable to the path of its setting in `settings`: a group and a name, or only a name."""
    prefix, kinds = str(settings.model_config["env_prefix"]), groups(settings)
    paths = [(name,) for name in settings.model_fields if name not in kinds]
    members = [(group, name) for group, kind in kinds.items() for name in kind.model_fields]
    return {f"{prefix}{'_'.join(path)}".upper(): path for path in [*paths, *members]}


def unknown_variables(known: Iterable[str], ignored: tuple[str, ...] = ()) -> list[str]:
    """Return the names of the environment variables that begin with `RESPONSES_MW_` but are not in `known`.

    If a name resembles a known name, it is followed by a hint. Variables that begin with a prefix in `ignored`, and variables
    that Kubernetes sets for Services, are omitted.
    """
    names = sorted(set(known))
    return [
        f"{name}{did_you_mean(name, names)}" for name in sorted(_ours()) if name not in names and not name.startswith(ignored)
    ]


def origins(settings: Settings) -> dict[str, str]:
    """Map each setting that is not at its default to its origin: a variable, the path of the config file, or `a flag`.

    Each of `upstreams` is listed by its name.
    """
    kind = type(settings)
    given, content = _ours(), _read(settings.config) if settings.config else {}
    defaults, without_flags, found = kind.model_construct(), settings, dict[str, str]()
    with suppress(ValidationError):
        without_flags = kind(config=settings.config)
    for variable, keys in variables(kind).items():
        value = _value(settings, keys)
        if value == _value(defaults, keys):
            continue
        origin = variable if variable in given else settings.config if _value(content, keys) is not None else None
        source = origin if origin and value == _value(without_flags, keys) else "a flag"
        found |= dict.fromkeys([f"{keys[0]}.{name}" for name in value] if keys == ("upstreams",) else [".".join(keys)], source)
    return found


_MASKED = frozenset({"auth.api_keys"})
"""Settings that are not typed as secrets, but are not shown either."""
_MAX_SHOWN = 300


def changed(settings: Settings) -> dict[str, str]:
    """Map each setting that is not at its default to its value as text. Secrets are masked, and long values are cut."""
    values = {name: _text(_value(settings, tuple(name.split(".", 1)))) for name in origins(settings)}
    return {name: "**********" if name in _MASKED else value[:_MAX_SHOWN] for name, value in values.items()}


def _text(value: Any) -> str:
    """Return a value as text, as in a settings file or, if it is a list or a table, as JSON. Secrets are masked."""
    plain = to_jsonable_python(value, exclude_none=True, fallback=str)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _value(source: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        source = source.get(key) if isinstance(source, dict) else getattr(source, key, None)
    return source


def _ours() -> dict[str, str]:
    """Return the variables that begin with `PREFIX`, except those that Kubernetes sets for Services. Names are upper-case."""
    found = {name.upper(): value for name, value in os.environ.items() if name.upper().startswith(PREFIX)}
    return {name: value for name, value in found.items() if not _SERVICE_LINK.search(f"{name.removeprefix(PREFIX)}={value}")}


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} (config) cannot be read: {error.strerror}") from None
    except ValueError as error:  # invalid TOML or UTF-8
        raise SettingsError(f"{path} (config) is not valid TOML: {error}") from None


def _unknown_keys(content: dict[str, Any], kinds: dict[str, type[Group]]) -> Iterator[str]:
    """Yield each unknown key with a hint. Raises `SettingsError` if a group is not a table."""
    settings = [f"{group}.{name}" for group, kind in kinds.items() for name in kind.model_fields]
    for key, value in content.items():
        if key in kinds:
            if not isinstance(value, dict):
                raise SettingsError(f"config: {key} must be a table: [{key}]")
            unknown = [f"{key}.{name}" for name in value if name not in kinds[key].model_fields]
        elif key == "upstreams":
            yield from _unknown_members(value)
            continue
        elif key in settings:
            yield f'"{key}" (remove the quotes: they prevent the dot from separating a table and a key)'
            continue
        else:
            unknown = [key] if key not in COMMAND_SETTINGS else []
        yield from (f"{path}{did_you_mean(path, [*settings, *COMMAND_SETTINGS, *kinds])}" for path in unknown)


def _unknown_members(upstreams: Any) -> Iterator[str]:
    """Yield each unknown key of the tables `[upstreams.NAME]` with a hint."""
    tables = upstreams.values() if isinstance(upstreams, dict) else [None]
    if not all(isinstance(table, dict) for table in tables):
        raise SettingsError("config: upstreams must be tables: [upstreams.NAME], or [upstream] for a single one")
    known = list(UpstreamSettings.model_fields)
    for name, table in upstreams.items():
        yield from (f"upstreams.{name}.{key}{did_you_mean(key, known)}" for key in table if key not in known)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint such as ` (did you mean redis.url?)`, or "" if no name in `known` is similar to `name`.

    If exactly one name in `known` extends `name`, the hint suggests it: `redis.url` extends `url`, and `limits.memory_bytes`
    extends `limits.memory`. Otherwise, the hint suggests the most similar name.
    """
    tail = name.removeprefix(PREFIX)
    longer = [one for one in known if one.endswith((f"_{tail}", f".{tail}")) or one.startswith(f"{name}_")]
    found = longer if len(longer) == 1 else get_close_matches(name, known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""
