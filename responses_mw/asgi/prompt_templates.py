"""Prompt templates from `server.prompts_dir`. Each prompt is a TOML or JSON file named after the prompt's id.

For example, `support.toml` contains:

    current = "2"                       # the version for requests that name none; required if there are several versions

    [versions.2]
    instructions = "You answer questions about {{product}}."
    temperature = 0.2
    input = [{role = "developer", content = "Be brief."}]

A request selects version 2 with `"prompt": {"id": "support", "version": "2", "variables": {"product": "Widget"}}`.

A file without `versions` is itself version `1`. A version may set any parameter of a request except those in `_NOT_DEFAULTS`.
A changed file is read again, because the directory may be a mounted ConfigMap.

The `prompt` of a request is expanded as follows (OpenAI guide, "Prompting"):

1. A template provides `instructions`, `input` and defaults for other parameters. Values in the request take precedence. The
   template's input precedes the request's own.
2. `{{name}}` in the instructions and in the texts of the template's messages is replaced by the variable of that name.
   Values are not expanded again, so placeholders in a user's text have no effect.
3. A variable is a string or a text part. In a message, it may also be an image or a file, which splits the text around it.
4. Placeholders without variables and variables without placeholders are errors.
"""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from ..errors import BadRequest, NotSupported, StartupError
from ..protocol import checks
from ..protocol.request.items import parse_input, user_message
from ..protocol.types import Item, Part

logger = logging.getLogger(__name__)

_PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_.-]{0,63})\s*\}\}")
_PATH = "prompt.variables"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SUFFIXES = (".toml", ".json")
_check_prompt = checks.closed_object({"id": checks.string}, version=checks.string, variables=checks.as_it_is)
_NOT_DEFAULTS = frozenset(
    {"prompt", "previous_response_id", "conversation", "background", "background_options", "stream", "store"}
)

_Variables = Mapping[str, str | Part]


@dataclass(frozen=True, slots=True)
class _Template:
    """One version of a prompt. `defaults` are its request parameters other than `instructions` and `input`."""

    instructions: str | None = None
    input: list[Item] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Placeholder names."""
        parts = (part for item in self.input for part in item.get("content", []))
        texts = [self.instructions or "", *(part["text"] for part in parts if "text" in part)]
        return frozenset(name for text in texts for name in _PLACEHOLDER.findall(text))


class _Prompt(NamedTuple):
    """One prompt: a template for each version. `current` is the version to use if a request names none."""

    versions: Mapping[str, _Template]
    current: str


class InvalidPrompt(StartupError, ValueError):
    """A prompt file is invalid, or the prompts cannot be read."""


class Prompts:
    """The prompt templates in `directory`. If `directory` is None, there are no templates.

    The constructor reads all `.toml` and `.json` files whose names are valid ids. It raises `InvalidPrompt` if a file is
    invalid, or if a file or the directory cannot be read.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = Path(directory) if directory is not None else None
        self._files: dict[Path, tuple[tuple[int, int, int], _Prompt]] = {}
        """The modification time, inode, size and prompt of each file."""
        if self._directory is not None:
            try:
                for path in sorted(self._directory.iterdir()):
                    if path.suffix in _SUFFIXES and _ID.fullmatch(path.stem):
                        self._load(path)
            except OSError as error:
                raise InvalidPrompt(f"server.prompts_dir: {error.strerror}: {error.filename}") from None

    def resolve(self, body: Any) -> Any:
        """Return the request `body` with its prompt template applied. A body without a `prompt` is returned unchanged.

        The result contains the `prompt` with the version used, because the response shows the prompt.

        Raises `BadRequest` if the `prompt` is invalid, its id or version is unknown, or its variables do not match the
        template's placeholders. Raises `NotSupported` if no directory is set.
        """
        if not isinstance(body, dict) or body.get("prompt") is None:
            return body
        if self._directory is None:
            raise NotSupported("'prompt' is not supported: this server has no prompt templates.", param="prompt")
        asked = _check_prompt(body["prompt"], "prompt")
        prompt = self._find(self._directory, asked["id"])
        version = asked.get("version") or prompt.current
        template = prompt.versions.get(version)
        if template is None:
            message = f"Version '{version[:64]}' of prompt '{asked['id']}' not found."
            raise BadRequest(message, param="prompt.version", code="prompt_version_not_found")
        variables = checks.mapping(asked.get("variables", {}), _PATH)
        values = {name: _variable(value, f"{_PATH}.{name}") for name, value in variables.items()}
        return {**_filled(body, template, values), "prompt": {**asked, "version": version}}

    def _find(self, directory: Path, prompt_id: str) -> _Prompt:
        """Return the prompt, or its last valid state if its file has become invalid or unreadable."""
        for suffix in _SUFFIXES if _ID.fullmatch(prompt_id) else ():
            path = directory / f"{prompt_id}{suffix}"
            try:
                self._load(path)
            except FileNotFoundError:
                self._files.pop(path, None)
            except (OSError, InvalidPrompt) as error:
                logger.warning("cannot read a prompt template: %s", error)
            if path in self._files:
                return self._files[path][1]
        raise BadRequest(f"Prompt with id '{prompt_id[:64]}' not found.", param="prompt.id", code="prompt_not_found")

    def _load(self, path: Path) -> None:
        """Read a file if it is new or has changed. Raises `InvalidPrompt` if it is invalid, or `OSError` on a read error."""
        stat = path.stat()  # blocks, but for less time than starting a thread takes
        stamp = stat.st_mtime_ns, stat.st_ino, stat.st_size
        if path not in self._files or self._files[path][0] != stamp:
            self._files[path] = stamp, _prompt(path)


def _prompt(path: Path) -> _Prompt:
    data = path.read_bytes()
    try:
        return _versions(tomllib.loads(data.decode()) if path.suffix == ".toml" else orjson.loads(data))
    except BadRequest as error:
        raise InvalidPrompt(f"{path}: {error.message}") from None
    except ValueError as error:  # from either decoder
        raise InvalidPrompt(f"{path}: {error}") from None


def _versions(decoded: Any) -> _Prompt:
    file = checks.mapping(decoded, "the prompt")
    if "versions" not in file:
        return _Prompt({"1": _parse_version(file, "the prompt")}, "1")
    listed = checks.mapping(file["versions"], "versions")
    if not listed:
        checks.missing("versions")
    versions = {name: _parse_version(version, f"versions.{name}") for name, version in listed.items()}
    current = file.get("current", next(iter(versions)) if len(versions) == 1 else None)
    if current is None:
        checks.missing("current")
    return _Prompt(versions, checks.one_of(current, "current", versions.keys()))


def _parse_version(value: Any, path: str) -> _Template:
    version = checks.mapping(value, path)
    for name in sorted(version.keys() & _NOT_DEFAULTS):
        checks.unsupported(f"{path}.{name}", "only the request itself can set it.")
    instructions = version.pop("instructions", None)
    if instructions is not None:
        checks.string(instructions, f"{path}.instructions")
    return _Template(instructions, parse_input(version.pop("input", []), f"{path}.input"), version)


_part = checks.by_type(
    {"input_text": checks.fields({"text": checks.string}), **dict.fromkeys(("input_image", "input_file"), checks.as_it_is)}
)


def _variable(value: Any, path: str) -> str | Part:
    """Return a checked variable. A text part becomes a string."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        checks.wrong_type(path, "a string or an object", value)
    part: Part = _part(value, path)
    return str(part["text"]) if part["type"] == "input_text" else part


def _filled(body: dict[str, Any], template: _Template, values: _Variables) -> dict[str, Any]:
    """Return the template, filled with `values`, merged with `body`. The members of `body` take precedence."""
    for name in sorted(template.names - values.keys()):
        checks.missing(f"{_PATH}.{name}")
    for name in sorted(values.keys() - template.names):
        checks.unknown(f"{_PATH}.{name}")
    merged: dict[str, Any] = dict(template.defaults)
    if template.instructions is not None:
        merged["instructions"] = _PLACEHOLDER.sub(lambda match: _text(match[1], values), template.instructions)
    merged |= {name: value for name, value in body.items() if value is not None and name != "prompt"}
    if template.input:
        own = checks.string_or_array(merged.get("input", []), "input")
        merged["input"] = [_filled_item(item, values) for item in template.input]
        merged["input"] += [user_message(own)] if isinstance(own, str) else own
    return merged


def _text(name: str, values: _Variables) -> str:
    value = values[name]
    if not isinstance(value, str):
        checks.invalid(f"{_PATH}.{name}", "images and files cannot be used in the prompt's instructions.")
    return value


def _filled_item(item: Item, values: _Variables) -> Item:
    if "content" not in item:
        return item
    return {**item, "content": [filled for part in item["content"] for filled in _filled_part(part, values)]}


def _filled_part(part: Part, values: _Variables) -> list[Part]:
    """Return `part` with its placeholders replaced. An image or a file splits the text around it."""
    if "text" not in part:
        return [part]
    filled: list[Part] = [{**part, "text": ""}]
    for place, piece in enumerate(_PLACEHOLDER.split(part["text"])):  # alternating texts and names
        value = values[piece] if place % 2 else piece
        if isinstance(value, str):
            filled[-1]["text"] += value
        else:
            filled += [value, {**part, "text": ""}]
    return [one for one in filled if one.get("text") != ""] or filled
