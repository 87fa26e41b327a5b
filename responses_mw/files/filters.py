"""Filters on the attributes of files: comparisons (`eq`, `ne`, `gt`, `gte`, `lt`, `lte`, `in`, `nin`), `and` and `or`.

A file without the attribute passes only `ne` and `nin`. A text and a number are never equal, and have no order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ..protocol import checks

Attributes: TypeAlias = Mapping[str, str | float | bool]
Filter: TypeAlias = Callable[[Attributes], bool]

MAX_DEPTH = 8
MAX_PARTS = 128
"""Maximum number of comparisons and compounds in a filter. All of them are evaluated for every file."""
MAX_VALUES = 256
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}
_COMPARISONS = frozenset({"eq", "ne", "in", "nin", *_ORDERS})
_COMPOUNDS: dict[str, Callable[[Any], bool]] = {"and": all, "or": any}


def parse_filter(value: Any, path: str) -> Filter:
    """Return the filter that the JSON `value` describes. Raises `BadRequest` if it is invalid, too deep or too large."""
    return _Parser().parse(value, path, 1)


class _Parser:
    def __init__(self) -> None:
        self._parts = 0

    def parse(self, value: Any, path: str, depth: int) -> Filter:
        if depth > MAX_DEPTH:
            checks.invalid(path, f"filters are nested more than {MAX_DEPTH} deep.")
        self._parts += 1
        if self._parts > MAX_PARTS:
            checks.invalid(path, f"there are more than {MAX_PARTS} comparisons and compounds.")
        holder = checks.mapping(value, path)
        kind = checks.required(holder, "type", path, checks.string)
        checks.one_of(kind, f"{path}.type", _COMPARISONS | _COMPOUNDS.keys())
        if kind in _COMPOUNDS:
            members = checks.required(holder, "filters", path, checks.array)
            parts = [self.parse(one, f"{path}.filters[{index}]", depth + 1) for index, one in enumerate(members)]
            combine = _COMPOUNDS[kind]
            return lambda attributes: combine(part(attributes) for part in parts)
        return _comparison(kind, holder, path)


def _comparison(kind: str, holder: dict[str, Any], path: str) -> Filter:
    key = checks.required(holder, "key", path, checks.string)
    if "value" not in holder:
        checks.missing(f"{path}.value")
    wanted, where = holder["value"], f"{path}.value"
    if kind in ("in", "nin"):
        values = [_scalar(one, f"{where}[{n}]") for n, one in enumerate(checks.array(wanted, where, max_length=MAX_VALUES))]
        known = {_distinct(one) for one in values}
        return lambda attributes: (_distinct(attributes.get(key)) in known) == (kind == "in")
    _scalar(wanted, where)
    if kind in ("eq", "ne"):
        same = _distinct(wanted)
        return lambda attributes: (_distinct(attributes.get(key)) == same) == (kind == "eq")
    if isinstance(wanted, bool):
        checks.wrong_type(where, "a number or a string", wanted)
    order = _ORDERS[kind]
    return lambda attributes: _is_text(attributes.get(key)) is _is_text(wanted) and order(attributes[key], wanted)


def _scalar(value: Any, path: str) -> str | float | bool:
    if not isinstance(value, str | int | float):  # a boolean is an int
        checks.wrong_type(path, "a string, a number or a boolean", value)
    return value


def _distinct(value: Any) -> tuple[bool, Any]:
    """Return a key by which JSON values compare equal. In Python, `True == 1`, but they are different JSON values."""
    return isinstance(value, bool), value


def _is_text(value: Any) -> bool | None:
    """Return True for text, False for a number, and None for a value that has no order."""
    return None if value is None or isinstance(value, bool) else isinstance(value, str)
