"""JSON Schemas of request bodies, derived from their checks. A schema allows whatever cannot be derived from a check."""

from __future__ import annotations

from functools import partial
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from . import checks
from .create import METADATA_KEY, METADATA_PAIRS, METADATA_VALUE, PARAMETERS, CreateResponse, check_metadata

__all__ = ["METADATA", "create_schema"]

Schema = dict[str, Any]

METADATA: Schema = {
    "type": ["object", "null"],
    "maxProperties": METADATA_PAIRS,
    "propertyNames": {"maxLength": METADATA_KEY},
    "additionalProperties": {"type": ["string", "null"], "maxLength": METADATA_VALUE},
}
_TYPES = {
    checks.boolean: "boolean",
    checks.integer: "integer",
    checks.number: "number",
    checks.string: "string",
    checks.one_of: "string",
    checks.mapping: "object",
    checks.json_object: "object",
}
_KEYWORDS = {"minimum": "minimum", "maximum": "maximum", "max_length": "maxLength"}
_CONTAINERS = {list: "array", frozenset: "array", dict: "object"}


def create_schema(*, closed: bool) -> Schema:
    """Return the schema of the body of ``POST /v1/responses``. Unless it is ``closed``, the body may have other members."""
    hints = get_type_hints(CreateResponse)
    members = {name: _member(check, hints[name]) for name, check in PARAMETERS.items()}
    members["input"] = {"type": ["string", "array", "null"], "items": {"type": "object"}}
    members["previous_input_messages"] = {"type": ["array", "null"], "items": {"type": "object"}}
    members["tools"] = {"type": ["array", "null"], "items": {"type": "object", "required": ["type"]}}
    members["tool_choice"] = {"type": ["string", "object", "null"]}
    members["conversation"] = {"type": ["string", "object", "null"]}
    members |= {"client_metadata": {}, "request_id": {}}  # accepted and ignored
    histories = [{"required": [name]} for name in ("input", "previous_response_id", "conversation")]
    return {
        "type": "object",
        "properties": dict(sorted(members.items())),
        "anyOf": histories,
        **({"additionalProperties": False} if closed else {}),
    }


def _member(check: checks.Check, hint: Any) -> Schema:
    """Return the schema of a parameter with the type ``hint``. Every parameter may be null, which means absent."""
    if check is check_metadata:
        return METADATA
    known = check.func if isinstance(check, partial) else check
    options = check.keywords if isinstance(check, partial) else {}
    kind = _TYPES.get(known) or _container(hint)
    if kind is None:
        return {}
    schema: Schema = {"type": [kind, "null"]}
    schema |= {keyword: options[option] for option, keyword in _KEYWORDS.items() if option in options}
    if "supported" in options:
        schema["enum"] = [*sorted(options["supported"]), None]
    return schema


def _container(hint: Any) -> str | None:
    """Return the JSON type of a parameter that is stored as a list, a set or a dictionary; None for any other."""
    kinds = [get_origin(one) for one in (get_args(hint) if isinstance(hint, UnionType) else (hint,))]
    return next((_CONTAINERS[kind] for kind in kinds if kind in _CONTAINERS), None)
