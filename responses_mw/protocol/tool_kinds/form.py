"""Describe a kind of tool: its definition, its items, and the function that represents it to the chat model.

The chat model sees every tool as a function. The client sees items and events that differ by kind (OpenAI reference,
"Streaming events"). To add a kind, define a `ToolKind` and list it in `registry`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

import orjson

from ...errors import TooLarge
from .. import checks, json_limits
from ..types import Item, Part, Tool

# Name of a function, a custom tool or a namespace. Names too long for the upstream are shortened in the chat request.
NAME = r"[a-zA-Z0-9_-]{1,128}"
MAX_NAME = 64  # maximum length of a function's name in Chat Completions
MAX_CALL_ID = 64  # maximum length of a call_id
MAX_NESTING = 128  # maximum depth of arguments that are sent as an object, because JSON encoders limit the depth
USUAL_STATUSES = frozenset({"in_progress", "completed", "incomplete"})

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
_HASH_LENGTH = 8


@dataclass(frozen=True, slots=True)
class CallForm:
    """The items and events that represent the calls of one function in the response."""

    item: str  # type of the item
    # Members that the item has from the start besides id, call_id, type and status, such as name, namespace and server_label.
    members: Mapping[str, Any] = field(default_factory=dict)
    argument: str | None = None  # argument that becomes the item's text, or None if all arguments do, as JSON
    made: Callable[[str], dict[str, Any]] | None = None  # builds members of the item from the complete arguments
    begins: tuple[str, ...] = ()  # events (response.<...>) after output_item.added
    runs: tuple[str, ...] = ()  # events when execution starts
    ends: tuple[str, ...] = ()  # events when execution ends: one for success, and one for failure if it differs
    served: bool = False  # whether the server executes the call. Other calls have a call_id


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A function that the model may call, and the form of its calls in the response."""

    function: Tool
    form: CallForm

    @property
    def name(self) -> str:
        return str(self.function["name"])


class Role(Enum):
    """The role of an item in the chat."""

    MESSAGE = auto()
    ASSISTANT_MESSAGE = auto()  # a message that the model wrote. The type of its item has the role `MESSAGE`
    REASONING = auto()
    COMPACTION = auto()
    CALL = auto()  # executed by the client
    OUTPUT = auto()
    SERVED_CALL = auto()  # executed by the server
    APPROVAL_REQUEST = auto()
    NOTHING = auto()  # becomes no chat message


def _arguments(item: Item) -> str:
    return item.get("arguments") or "{}"


def _output(item: Item) -> str | list[Part]:
    output: str | list[Part] = item.get("output", "")
    return output


@dataclass(frozen=True, slots=True)
class ItemKind:
    """How one type of input item is checked, and how the chat model sees it."""

    prefix: str  # prefix of the item's id
    check: checks.Check
    role: Role = Role.NOTHING
    arguments: Callable[[Item], str] = _arguments  # the arguments of a call, as the model would write them
    output: Callable[[Item], str | list[Part]] = _output  # the result of a call, as the model sees it
    function: str | None = None  # name of the function that the item calls, or None if the item has a name
    statuses: frozenset[str] = USUAL_STATUSES


@dataclass(frozen=True, slots=True)
class ToolKind:
    """The definitions and items of a kind of tool. `types` are the types of its definitions. `items` is keyed by item type."""

    types: tuple[str, ...]
    items: Mapping[str, ItemKind]
    check: checks.Check = checks.as_it_is  # checks a definition; responses_mw.tools checks those of server-side tools
    # Makes the function for a definition and its namespace, if any. None for tools that the server executes.
    offer: Callable[[Tool, str | None], OfferedFunction] | None = None
    chosen_by: tuple[str, ...] = ()  # members of a tool_choice of this type. The first one is required


# -- parts of descriptions ---------------------------------------------------------------------------------------------

check_call_id = partial(checks.string, max_length=MAX_CALL_ID)


def call_kind(
    prefix: str, function: str | None = None, arguments: Callable[[Item], str] = _arguments, /, **required: checks.Check
) -> ItemKind:
    """Return an `ItemKind` for calls with a `call_id`, the `required` members and an optional `namespace`."""
    check = checks.fields({"call_id": check_call_id, **required}, namespace=checks.string)
    return ItemKind(prefix, check, Role.CALL, arguments, function=function)


def output_kind(prefix: str, check: checks.Check, output: Callable[[Item], str | list[Part]] = _output) -> ItemKind:
    """Return an `ItemKind` for outputs with a `call_id` and an `output`. `check` checks the `output`."""
    return ItemKind(prefix, checks.fields({"call_id": check_call_id, "output": check}), Role.OUTPUT, output=output)


def check_callers(value: Any, path: str) -> Any:
    """Check the `allowed_callers` of a tool. Only the model itself (`direct`) calls tools."""
    callers = checks.each(checks.among("direct", "programmatic"))(value, path)
    if callers and "direct" not in callers:
        checks.unsupported(path, "tools are called by the model only; add 'direct'.")
    return callers


def refuse_unsupported(tool: Tool, path: str) -> Tool:
    """Raise `NotSupported` if a tool sets a member that is not supported for any tool. Otherwise, return the tool unchanged."""
    if "allowed_callers" in tool:
        check_callers(tool["allowed_callers"], f"{path}.allowed_callers")
    for name in ("async", "output_schema"):
        if tool.get(name):
            checks.unsupported(f"{path}.{name}", "it is not supported.")
    return tool


def refuse_chat_form(value: dict[str, Any], path: str) -> dict[str, Any]:
    """Raise `NotSupported` if a function tool or its choice has the form of Chat Completions. Otherwise, return it."""
    if "name" not in value and isinstance(value.get("function"), dict):
        checks.chat_name(f"{path}.function", f"its members, such as 'name', in '{path}'")
    return value


def flat_name(namespace: str | None, name: str) -> str:
    """Return the function name of a tool: `<namespace>__<name>`, or `<name>` if `namespace` is None.

    Characters other than ASCII letters, digits, `_` and `-` become `_`. A name of more than 64 characters is shortened, and
    then ends with a hash.
    """
    whole = name if namespace is None else f"{namespace}__{name}"
    flat = _NOT_IN_NAMES.sub("_", whole) or "_"
    if len(flat) <= MAX_NAME:
        return flat
    digest = hashlib.sha256(f"{namespace or ''}\0{name}".encode()).hexdigest()[:_HASH_LENGTH]
    return f"{flat[: MAX_NAME - _HASH_LENGTH - 1]}_{digest}"


def as_function(name: str, description: str, properties: dict[str, Any], *required: str) -> Tool:
    """Return a function tool whose parameters are an object with these `properties`."""
    parameters = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {"type": "function", "name": name, "description": description, "parameters": parameters}


def paragraphs(*texts: str | None) -> str:
    return "\n\n".join(text for text in texts if text)


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Parse the arguments of a call, or return None if the arguments are not a JSON object."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def parse_shallow(arguments: str) -> dict[str, Any] | None:
    """Parse the arguments of a call, or return None if they are not a JSON object or too deep (`MAX_NESTING`)."""
    parsed = parse_arguments(arguments)
    try:
        json_limits.depth([parsed], MAX_NESTING)
    except TooLarge:
        return None
    return parsed


def as_text(value: Any) -> str:
    """Return a string unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()
