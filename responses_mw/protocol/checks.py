"""Check decoded JSON from clients.

A check is a function of a value and its path. It returns the checked value, or raises `BadRequest` with OpenAI's message and
code. The path is in OpenAI's notation (`input[3].content[0].type`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType, NoneType
from typing import Any, NoReturn

from ..errors import BadRequest, NotSupported

Check = Callable[[Any, str], Any]
ObjectCheck = Callable[[Any, str], dict[str, Any]]
_NOTHING: Mapping[str, Check] = MappingProxyType({})

# -- errors --------------------------------------------------------------------------------------------------------------

_KINDS = {
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    str: "a string",
    list: "an array",
    dict: "an object",
    NoneType: "null",
}


def kind_of(value: Any) -> str:
    """Return OpenAI's name for the type of a decoded JSON value."""
    return _KINDS[type(value)]


def invalid(path: str, why: str, code: str = "invalid_value") -> NoReturn:
    raise BadRequest(f"Invalid '{path}': {why}", param=path, code=code)


def wrong_type(path: str, expected: str, value: Any) -> NoReturn:
    message = f"Invalid type for '{path}': expected {expected}, but got {kind_of(value)} instead."
    raise BadRequest(message, param=path, code="invalid_type")


def wrong_value(path: str, value: Any, supported: Collection[str]) -> NoReturn:
    values = ", ".join(f"'{one}'" for one in sorted(supported))
    message = f"Invalid value for '{path}': '{str(value)[:64]}'. Supported values are: {values}."
    raise BadRequest(message, param=path, code="invalid_value")


def missing(path: str) -> NoReturn:
    raise BadRequest(f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter")


def unknown(path: str) -> NoReturn:
    raise BadRequest(f"Unknown parameter: '{path}'.", param=path, code="unknown_parameter")


def unsupported(path: str, why: str) -> NoReturn:
    raise NotSupported(f"'{path}' is not supported: {why}", param=path)


def chat_name(path: str, instead: str) -> NoReturn:
    """Raise `NotSupported` because clients of Chat Completions use this name or form. `instead` completes "use ... instead"."""
    unsupported(path, f"this is its form in Chat Completions; use {instead} instead.")


def _too_long(path: str, kind: str, length: int, maximum: int) -> NoReturn:
    name = kind.split()[1]
    expected = f"Expected {kind} with maximum length {maximum}, but got {kind} with length {length} instead."
    invalid(path, f"{name} too long. {expected}", f"{name}_above_max_length")


def foreign_envelope(path: str, param: str) -> NoReturn:
    message = f"The encrypted content '{path}' could not be verified: it was not made by this server, or its key was removed."
    raise BadRequest(message, param=param, code="invalid_encrypted_content")


# -- checks of values ----------------------------------------------------------------------------------------------------


def as_it_is(value: Any, _path: str) -> Any:
    return value


def string(value: Any, path: str, *, max_length: int | None = None, pattern: str | None = None) -> str:
    if not isinstance(value, str):
        wrong_type(path, "a string", value)
    if max_length is not None and len(value) > max_length:
        _too_long(path, "a string", len(value), max_length)
    if pattern is not None and not re.fullmatch(pattern, value):
        invalid(path, f"string does not match pattern. Expected a string that matches the pattern '{pattern}'.")
    return value


def array(value: Any, path: str, *, max_length: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        wrong_type(path, "an array", value)
    if max_length is not None and len(value) > max_length:
        _too_long(path, "an array", len(value), max_length)
    return value


def string_or_array(value: Any, path: str) -> str | list[Any]:
    if not isinstance(value, str | list):
        wrong_type(path, "a string or an array of objects", value)
    return value


def boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        wrong_type(path, "a boolean", value)
    return value


def integer(value: Any, path: str, *, minimum: int | None = None, maximum: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        wrong_type(path, "an integer", value)
    _check_bounds(value, path, "integer", minimum, maximum)
    return value


def number(value: Any, path: str, *, minimum: float | None = None, maximum: float | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        wrong_type(path, "a decimal", value)
    _check_bounds(value, path, "decimal", minimum, maximum)
    return value


def _check_bounds(value: float, path: str, kind: str, minimum: float | None, maximum: float | None) -> None:
    if minimum is not None and value < minimum:
        expected = f"Expected a value >= {minimum}, but got {value} instead."
        invalid(path, f"{kind} below minimum value. {expected}", f"{kind}_below_min_value")
    if maximum is not None and value > maximum:
        expected = f"Expected a value <= {maximum}, but got {value} instead."
        invalid(path, f"{kind} above maximum value. {expected}", f"{kind}_above_max_value")


def json_object(value: Any, path: str) -> dict[str, Any]:
    """Check that `value` is an object. Null members are kept, because they have a meaning in JSON Schemas and calls."""
    if not isinstance(value, dict):
        wrong_type(path, "an object", value)
    return value


def mapping(value: Any, path: str) -> dict[str, Any]:
    """Check that `value` is an object, and return a copy without null members, because null means absent."""
    return {name: member for name, member in json_object(value, path).items() if member is not None}


def body(value: Any) -> dict[str, Any]:
    """Check that the body of a request is a JSON object, and return a copy without null members."""
    if not isinstance(value, dict):
        raise BadRequest(f"The request body must be a JSON object, but is {kind_of(value)}.", code="invalid_type")
    return mapping(value, "")


def one_of(value: Any, path: str, supported: Collection[str]) -> str:
    if string(value, path) not in supported:
        wrong_value(path, value, supported)
    return str(value)


def required(holder: dict[str, Any], name: str, path: str, check: Check) -> Any:
    """Check the member `name` of the object `holder` at `path`. A missing or null member is an error."""
    if holder.get(name) is None:
        missing(f"{path}.{name}")
    return check(holder[name], f"{path}.{name}")


# -- checks made from other checks ---------------------------------------------------------------------------------------


def among(*supported: str) -> Check:
    return partial(one_of, supported=frozenset(supported))


def each(check: Check, *, max_length: int | None = None) -> Callable[[Any, str], list[Any]]:
    """Return a check for an array of at most `max_length` elements, each of which must pass `check`."""
    return lambda value, path: [
        check(one, f"{path}[{index}]") for index, one in enumerate(array(value, path, max_length=max_length))
    ]


strings = each(string)


def fields(required: Mapping[str, Check] = _NOTHING, **optional: Check) -> ObjectCheck:
    """Return a check that checks and replaces members of an object in place. No `required` member may be missing or null."""
    members = [(name, f".{name}", check, name in required) for name, check in {**required, **optional}.items()]

    def check(holder: dict[str, Any], path: str) -> dict[str, Any]:
        for name, suffix, member, is_required in members:
            value = holder.get(name)
            if value is not None:
                holder[name] = member(value, path + suffix)
            elif is_required:
                missing(path + suffix)
        return holder

    return check


def open_object(required: Mapping[str, Check] = _NOTHING, **optional: Check) -> ObjectCheck:
    """Return a check for an object. The members in `required` must be present. Unknown members are allowed.

    The check returns a copy without null members.
    """
    check = fields(required, **optional)
    return lambda value, path: check(mapping(value, path), path)


def closed_object(required: Mapping[str, Check] = _NOTHING, **optional: Check) -> ObjectCheck:
    """Return a check for an object. The members in `required` must be present. Unknown members are errors.

    The check returns a copy without null members.
    """
    check = fields(required, **optional)

    def closed(value: Any, path: str) -> dict[str, Any]:
        holder = mapping(value, path)
        for name in holder:
            if name not in required and name not in optional:
                unknown(f"{path}.{name}")
        return check(holder, path)

    return closed


def by_type(kinds: Mapping[str, Check]) -> Check:
    """Return a check for objects whose `type` selects the check from `kinds`."""

    def check(value: Any, path: str) -> Any:
        holder = mapping(value, path)
        kind = required(holder, "type", path, string)
        if kind not in kinds:
            wrong_value(f"{path}.type", kind, kinds.keys())
        return kinds[kind](holder, path)

    return check


def chain(*steps: Check) -> Check:
    """Return a check that applies `steps` in order, each to the result of the previous step."""

    def check(value: Any, path: str) -> Any:
        for step in steps:
            value = step(value, path)
        return value

    return check
