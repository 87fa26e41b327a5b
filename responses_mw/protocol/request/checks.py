"""Decode and check JSON from clients.

A check is a function of a value and its path. It returns the checked value, or raises `BadRequest` with OpenAI's message and
code. The path is in OpenAI's notation (`input[3].content[0].type`).
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType, NoneType
from typing import Any, NoReturn

import orjson

from ...errors import BadRequest, NotSupported, TooLarge, UpstreamError

Check = Callable[[Any, str], Any]
ObjectCheck = Callable[[Any, str], dict[str, Any]]
_NOTHING: Mapping[str, Check] = MappingProxyType({})

# -- decoding ------------------------------------------------------------------------------------------------------------

_CHUNK_SIZE = 1 << 20
_LARGE = 64 * 1024
_MEMBER, _HOLDER = 64, 136  # memory in bytes of a member, and additional memory of an array or object


# Limits on the contents of a request, so that checking and converting a request is never too expensive.
MAX_ITEMS = 10_000  # items in `input`, and also messages and resulting items in `previous_input_messages`
MAX_TOOLS = 1024  # tools, including namespaces, nested tools, and tools in input items
MAX_DEPTH = 64  # nesting levels below the outermost array or object
MAX_VALUES = 1_000_000  # object members and array elements


def decode(data: bytes, what: str = "the JSON body of your request") -> Any:
    """Decode JSON. Integers of more than 64 bits become floats. If the JSON is invalid, the error refers to it as `what`.

    Raises `BadRequest` for invalid JSON, including `NaN` and lone surrogates, and `TooLarge` for too many values or levels.
    """
    # Decoding cannot be interrupted, and the result can take forty times the memory of the text. Counting is 100 times faster.
    if has_more_values(data, MAX_VALUES):
        raise TooLarge(f"The request has more than {MAX_VALUES} values.", code="request_too_many_values")
    try:
        value = loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"We could not parse {what}: {error}.", code="invalid_json") from None
    if isinstance(value, dict | list):
        depth(value, MAX_DEPTH)
    return value


def loads(data: bytes) -> Any:
    """Decode JSON. The garbage collector is off while large `data` is decoded. Otherwise, it would take most of the time."""
    if len(data) <= _LARGE:
        return orjson.loads(data)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return orjson.loads(data)
    finally:
        if was_enabled:
            gc.enable()


def has_more_values(data: bytes, maximum: int) -> bool:
    """Return whether a JSON text has more than `maximum` values (see `count_values`)."""
    # The first two conditions are quick upper bounds. The exact count excludes brackets and commas in strings.
    return len(data) > maximum and _openings(data) > maximum and count_values(data) > maximum


def count_values(data: bytes) -> int:
    """Return the number of members and elements of a JSON text. An empty array or object counts as if it had one."""
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    count, in_string = 0, 0
    for begin in range(0, len(data), _CHUNK_SIZE):
        pieces = data[begin : begin + _CHUNK_SIZE].split(b'"')
        count += _openings(b"".join(pieces[in_string::2]))
        in_string ^= (len(pieces) - 1) & 1
    return count


def _openings(data: bytes) -> int:
    return len(data) - len(data.translate(None, b",[{"))  # twice as fast as three calls of `count`


def depth(value: Any, limit: int) -> None:
    """Raise `TooLarge` if an array or object is more than `limit` levels below `value`. Deep nesting breaks recursive code."""
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


def memory_bound(value: Any, text: bytes) -> int:
    """Return an upper bound on `memory(value, len(text))`.

    The bound is computed from the brackets and commas in `text`. If it exceeds four times the length of `text`, return the
    exact value instead.
    """
    bound = len(text) + (_HOLDER + _MEMBER) * _openings(text)
    return bound if bound <= 4 * len(text) else memory(value, len(text))  # brackets and commas may be in strings


def memory(value: Any, size: int) -> int:
    """Estimate the memory in bytes of `value`, an array or object decoded from `size` bytes of JSON."""
    level = [value]
    while level:
        members = [member for holder in level for member in (holder.values() if isinstance(holder, dict) else holder)]
        size += _HOLDER * len(level) + _MEMBER * len(members)
        level = [member for member in members if isinstance(member, dict | list)]
    return size


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


def _too_long(path: str, kind: str, length: int, maximum: int) -> NoReturn:
    name = kind.split()[1]
    expected = f"Expected {kind} with maximum length {maximum}, but got {kind} with length {length} instead."
    invalid(path, f"{name} too long. {expected}", f"{name}_above_max_length")


def foreign_envelope(path: str, param: str) -> NoReturn:
    message = f"The encrypted content '{path}' could not be verified: it was not made by this server, or its key was removed."
    raise BadRequest(message, param=param, code="invalid_encrypted_content")


def malformed(member: str) -> NoReturn:
    """Raise `UpstreamError` because `member` of the upstream's answer has an invalid type."""
    raise UpstreamError(f"The upstream sent a malformed answer: its '{member}' is of the wrong type.")


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
