"""The prompt templates of ``server.prompts_dir``: a TOML or JSON file each, named by its id.

    # support.toml: {"prompt": {"id": "support", "version": "2", "variables": {"product": "Widget"}}}
    current = "2"                       # for requests that name no version; needed where there are several

    [versions.2]
    instructions = "You answer questions about {{product}}."
    temperature = 0.2
    input = [{role = "developer", content = "Be brief."}]

A file without ``versions`` is its own version ``1``. A version may hold every parameter of a request that says nothing of where
it belongs or how it is answered. The directory may be a mounted ConfigMap: a file that changes is read again.
"""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ..errors import BadRequest, NotSupported, StartupError
from ..protocol.request import checks
from ..protocol.request.items import parse_input
from ..protocol.request.prompts import Template, filled, variables

logger = logging.getLogger(__name__)

LARGEST_FILE = 1024 * 1024
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SUFFIXES = (".toml", ".json")
_check_prompt = checks.closed_object({"id": checks.string}, version=checks.string, variables=checks.as_it_is)
_NOT_DEFAULTS = frozenset(
    {"prompt", "previous_response_id", "conversation", "background", "background_options", "stream", "store"}
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The templates of one prompt, by version; ``current`` is the one for who names none."""

    versions: Mapping[str, Template]
    current: str


@dataclass(frozen=True, slots=True)
class _Read:
    """A file as it was read; ``stamp`` changes with it."""

    stamp: tuple[int, int, int]
    prompt: Prompt


class UnfitPrompt(StartupError, ValueError):
    """A file that is no prompt; the message names it and says why."""


class Prompts:
    """``directory`` is read once here, so that a bad file is seen at the start. Raises ``UnfitPrompt``."""

    def __init__(self, directory: str | None) -> None:
        self._directory = Path(directory) if directory is not None else None
        self._read: dict[Path, _Read] = {}
        if self._directory is not None:
            if not self._directory.is_dir():
                raise UnfitPrompt(f"server.prompts_dir: {self._directory} is no directory")
            for path in sorted(self._directory.iterdir()):
                if path.suffix in _SUFFIXES and _ID.fullmatch(path.stem):
                    self._read[path] = _Read(_stamp(path), _prompt(path))

    def resolve(self, body: Any) -> Any:
        """The body of a request, with what its ``prompt`` stands for; the ``prompt`` itself is left as the response is to show
        it: with its version. Raises ``BadRequest`` for an id, a version or variables that do not fit."""
        if not isinstance(body, dict) or body.get("prompt") is None:
            return body
        if self._directory is None:
            raise NotSupported("'prompt' is not supported: this server has no prompt templates.", param="prompt")
        asked = _check_prompt(body["prompt"], "prompt")
        version, template = self._template(self._directory, asked["id"], asked.get("version"))
        return {**filled(body, template, variables(asked.get("variables", {}))), "prompt": {**asked, "version": version}}

    def _template(self, directory: Path, prompt_id: str, version: str | None) -> tuple[str, Template]:
        """The template, and the version that it is."""
        prompt = self._prompt(directory, prompt_id) if _ID.fullmatch(prompt_id) else None
        if prompt is None:
            raise BadRequest(f"Prompt with id '{prompt_id[:64]}' not found.", param="prompt.id", code="prompt_not_found")
        wanted = version or prompt.current
        template = prompt.versions.get(wanted)
        if template is None:
            message = f"Version '{str(version)[:64]}' of prompt '{prompt_id}' not found."
            raise BadRequest(message, param="prompt.version", code="prompt_version_not_found")
        return wanted, template

    def _prompt(self, directory: Path, prompt_id: str) -> Prompt | None:
        """The prompt as its file is now. One that is no longer readable stays as it was."""
        for path in (directory / f"{prompt_id}{suffix}" for suffix in _SUFFIXES):
            before = self._read.get(path)
            try:
                stamp = _stamp(path)
                if before is None or before.stamp != stamp:
                    self._read[path] = before = _Read(stamp, _prompt(path))
            except FileNotFoundError:
                self._read.pop(path, None)
                continue
            except (OSError, UnfitPrompt) as error:
                logger.warning("a prompt cannot be read: %s", error)
            if before is not None:
                return before.prompt
        return None


def _stamp(path: Path) -> tuple[int, int, int]:
    """A look at a file's dates is quicker than a thread that would do it."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _prompt(path: Path) -> Prompt:
    """What the file says. Raises ``UnfitPrompt``, or ``OSError`` where it cannot be read."""
    with path.open("rb") as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise UnfitPrompt(f"{path}: larger than {LARGEST_FILE} bytes")
    try:
        decoded = tomllib.loads(data.decode()) if path.suffix == ".toml" else orjson.loads(data)
        return _versions(decoded)
    except BadRequest as error:
        raise UnfitPrompt(f"{path}: {error.message}") from None
    except ValueError as error:  # of either decoder
        raise UnfitPrompt(f"{path}: {error}") from None


def _versions(decoded: Any) -> Prompt:
    file = checks.mapping(decoded, "the prompt")
    if "versions" not in file:
        return Prompt({"1": _parsed(file, "the prompt")}, "1")
    listed = checks.mapping(file["versions"], "versions")
    if not listed:
        checks.missing("versions")
    versions = {name: _parsed(version, f"versions.{name}") for name, version in listed.items()}
    current = file.get("current", next(iter(versions)) if len(versions) == 1 else None)
    if current is None:
        checks.missing("current")
    return Prompt(versions, checks.one_of(current, "current", versions.keys()))


def _parsed(value: Any, path: str) -> Template:
    version = checks.mapping(value, path)
    for name in sorted(version.keys() & _NOT_DEFAULTS):
        checks.unsupported(f"{path}.{name}", "it is the request's own.")
    instructions = version.pop("instructions", None)
    if instructions is not None:
        checks.string(instructions, f"{path}.instructions")
    return Template(instructions, parse_input(version.pop("input", []), f"{path}.input"), version)
