"""Checks for request bodies. Each takes a value and its path and raises OpenAI's 400 if the value is invalid.

Errors name the path in OpenAI's notation (``input[3].content[0].type``) in ``param`` and in the message. The codes are the
API's (``invalid_type``, ``missing_required_parameter``, ``invalid_value``, ``integer_below_min_value``, ...).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

from ...errors import BadRequest, NotSupported, TooLarge, UpstreamError

Check = Callable[[Any, str], Any]
ObjectCheck = Callable[[Any, str], dict[str, Any]]
NOTHING: Mapping[str, Check] = MappingProxyType({})

_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a decimal"),
    (str, "a string"),
    (list, "an array"),
    (dict, "an object"),
    (type(None), "null"),
)


def kind_of(value: Any) -> str:
    return next(name for kind, name in _KINDS if isinstance(value, kind))


def wrong_type(path: str, expected: str, value: Any) -> NoReturn:
    message = f"Invalid type for '{path}': expected {expected}, but got {kind_of(value)} instead."
    raise BadRequest(message, param=path, code="invalid_type")


def wrong_value(path: str, value: Any, supported: Collection[str]) -> NoReturn:
    values = ", ".join(f"'{one}'" for one in sorted(supported))
    shown = str(value)[:64]
    message = f"Invalid value for '{path}': '{shown}'. Supported values are: {values}."
    raise BadRequest(message, param=path, code="invalid_value")


def missing(path: str) -> NoReturn:
    raise BadRequest(f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter")


def malformed(member: str) -> NoReturn:
    """Report that ``member`` of the upstream's answer has an invalid type. This is the only check that is not for requests."""
    raise UpstreamError(f"The upstream sent a malformed answer: its '{member}' is of the wrong type.")


def unknown(path: str) -> NoReturn:
    raise BadRequest(f"Unknown parameter: '{path}'.", param=path, code="unknown_parameter")


def unsupported(path: str, why: str) -> NoReturn:
    raise NotSupported(f"'{path}' is not supported: {why}", param=path)


def foreign_envelope(path: str, param: str) -> NoReturn:
    message = f"The encrypted content '{path}' could not be verified: it was not made by this server, or its key was removed."
    raise BadRequest(message, param=param, code="invalid_encrypted_content")


def string(value: Any, path: str, *, max_length: int | None = None, pattern: str | None = None) -> str:
    if not isinstance(value, str):
        wrong_type(path, "a string", value)
    if max_length is not None and len(value) > max_length:
        message = (
            f"Invalid '{path}': string too long. Expected a string with maximum length {max_length}, "
            f"but got a string with length {len(value)} instead."
        )
        raise BadRequest(message, param=path, code="string_above_max_length")
    if pattern is not None and not re.fullmatch(pattern, value):
        message = f"Invalid '{path}': string does not match pattern. Expected a string that matches the pattern '{pattern}'."
        raise BadRequest(message, param=path, code="invalid_value")
    return value


def boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        wrong_type(path, "a boolean", value)
    return value


def integer(value: Any, path: str, *, minimum: int | None = None, maximum: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        wrong_type(path, "an integer", value)
    _within(value, path, "integer", minimum, maximum)
    return value


def number(value: Any, path: str, *, minimum: float | None = None, maximum: float | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        wrong_type(path, "a decimal", value)
    _within(value, path, "decimal", minimum, maximum)
    return value


def _within(value: float, path: str, kind: str, minimum: float | None, maximum: float | None) -> None:
    if minimum is not None and value < minimum:
        message = f"Invalid '{path}': {kind} below minimum value. Expected a value >= {minimum}, but got {value} instead."
        raise BadRequest(message, param=path, code=f"{kind}_below_min_value")
    if maximum is not None and value > maximum:
        message = f"Invalid '{path}': {kind} above maximum value. Expected a value <= {maximum}, but got {value} instead."
        raise BadRequest(message, param=path, code=f"{kind}_above_max_value")


def mapping(value: Any, path: str) -> dict[str, Any]:
    """Copy an object without its nulls: null means absent everywhere."""
    if not isinstance(value, dict):
        wrong_type(path, "an object", value)
    return {name: member for name, member in value.items() if member is not None}


def json_object(value: Any, path: str) -> dict[str, Any]:
    """Check an object whose nulls have a meaning, such as a JSON Schema or the arguments of a call. Return it unchanged."""
    if not isinstance(value, dict):
        wrong_type(path, "an object", value)
    return value


def array(value: Any, path: str, *, max_length: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        wrong_type(path, "an array", value)
    if max_length is not None and len(value) > max_length:
        message = (
            f"Invalid '{path}': array too long. Expected an array with maximum length {max_length}, "
            f"but got an array with length {len(value)} instead."
        )
        raise BadRequest(message, param=path, code="array_above_max_length")
    return value


def one_of(value: Any, path: str, supported: Collection[str]) -> str:
    if string(value, path) not in supported:
        wrong_value(path, value, supported)
    return str(value)


def required(holder: dict[str, Any], name: str, path: str, check: Check) -> Any:
    """Check the member ``name`` of the object at ``path``. It must not be missing or null."""
    if holder.get(name) is None:
        missing(f"{path}.{name}")
    return check(holder[name], f"{path}.{name}")


# -- checks made from other checks ---------------------------------------------------------------------------------------


def among(*supported: str) -> Check:
    """Return a check that the value is one of the ``supported`` strings."""
    return partial(one_of, supported=frozenset(supported))


def each(check: Check, *, max_length: int | None = None) -> Callable[[Any, str], list[Any]]:
    """Return a check for an array whose elements must all pass ``check``."""

    def elements(value: Any, path: str) -> list[Any]:
        return [check(one, f"{path}[{index}]") for index, one in enumerate(array(value, path, max_length=max_length))]

    return elements


strings = each(string)


def fields(required: Mapping[str, Check] = NOTHING, **optional: Check) -> ObjectCheck:
    """Return a check for the members of an object without nulls. It replaces each member in place with its checked value."""

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


def open_object(required: Mapping[str, Check] = NOTHING, **optional: Check) -> ObjectCheck:
    """Return a check for an object that may have other members too. It copies the object without nulls."""
    check = fields(required, **optional)
    return lambda value, path: check(mapping(value, path), path)


def closed_object(required: Mapping[str, Check] = NOTHING, **optional: Check) -> ObjectCheck:
    """Return a check for an object with no other members than these. It copies the object without nulls."""
    check = fields(required, **optional)
    known = required.keys() | optional.keys()

    def closed(value: Any, path: str) -> dict[str, Any]:
        holder = mapping(value, path)
        for name in holder:
            if name not in known:
                unknown(f"{path}.{name}")
        return check(holder, path)

    return closed


def by_type(kinds: Mapping[str, Check]) -> Check:
    """Return a check for objects that applies the check in ``kinds`` for their ``type``."""

    def check(value: Any, path: str) -> Any:
        holder = mapping(value, path)
        kind = required(holder, "type", path, string)
        if kind not in kinds:
            wrong_value(f"{path}.type", kind, kinds.keys())
        return kinds[kind](holder, path)

    return check


def chain(*steps: Check) -> Check:
    """Return a check that chains several checks."""

    def check(value: Any, path: str) -> Any:
        for step in steps:
            value = step(value, path)
        return value

    return check


def as_it_is(value: Any, _path: str) -> Any:
    """Accept any value."""
    return value


def depth(value: Any, limit: int) -> None:
    """Refuse a value nested deeper than ``limit``, because code here or in the upstream may recurse."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            member
            for holder in level
            for member in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(member, dict | list)
        ]
        if not level:
            return
    raise TooLarge(f"The request is nested deeper than {limit} levels.", code="request_too_deep")
