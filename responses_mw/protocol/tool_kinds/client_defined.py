"""Tools that the client defines: `function`, `custom` and `tool_search`.

A call with malformed arguments still becomes a valid item. The `arguments` of a `function_call`, or the `input` of a
`custom_tool_call`, then contain the text that the model wrote. The `arguments` of a `tool_search_call` contain this text as
`{"malformed_arguments": <text>}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from .. import checks
from ..checks import Check, among, by_type, chain, fields
from ..parts import INPUT_PARTS
from ..types import Tool
from .form import (
    NAME,
    CallForm,
    ItemKind,
    OfferedFunction,
    Role,
    ToolKind,
    as_function,
    as_text,
    call_kind,
    check_call_id,
    flat_name,
    output_kind,
    paragraphs,
    parse_shallow,
    refuse_chat_form,
    refuse_unsupported,
)


def _definition(**optional: Check) -> Check:
    name = partial(checks.string, pattern=NAME)
    check = fields({"name": name}, description=checks.string, defer_loading=checks.boolean, **optional)
    return chain(check, refuse_unsupported)


def _text_or_parts(value: Any, path: str) -> Any:
    return value if isinstance(checks.string_or_array(value, path), str) else INPUT_PARTS(value, path)


def _names(name: str, namespace: str | None) -> dict[str, str]:
    return {"name": name} if namespace is None else {"name": name, "namespace": namespace}


# -- function ----------------------------------------------------------------------------------------------------------


def unoffered_function(name: str) -> OfferedFunction:
    """Return a function for calls of a `name` that was not offered. The client decides what to do with them."""
    return OfferedFunction({"type": "function", "name": name}, CallForm("function_call", {"name": name}))


def _offer_function(tool: Tool, namespace: str | None) -> OfferedFunction:
    form = CallForm("function_call", _names(tool["name"], namespace))
    return OfferedFunction({**tool, "name": flat_name(namespace, tool["name"])}, form)


FUNCTION = ToolKind(
    types=("function",),
    items={
        "function_call": call_kind("fc", name=checks.string, arguments=checks.string),
        "function_call_output": output_kind("fco", _text_or_parts),
    },
    check=chain(refuse_chat_form, _definition(parameters=checks.json_object, strict=checks.boolean)),
    offer=_offer_function,
    chosen_by=("name", "namespace"),
)

# -- custom: a function with one string, which is streamed to the client -------------------------------------------------

_grammar = fields({"syntax": among("lark", "regex"), "definition": checks.string})


def _offer_custom(tool: Tool, namespace: str | None) -> OfferedFunction:
    members = _names(tool["name"], namespace)
    form = CallForm("custom_tool_call", members, argument="input")
    wanted = tool.get("format", {})
    hint, constraint = "Pass the input as free text in the string 'input'.", {}
    if wanted.get("type") == "grammar":
        kind = {"lark": "Lark grammar", "regex": "regular expression"}[wanted["syntax"]]
        hint = f"Pass the input in the string 'input'. It must match this {kind}:\n{wanted['definition']}"
        pattern = as_pattern(wanted["definition"]) if wanted["syntax"] == "regex" else None
        constraint = {} if pattern is None else {"pattern": pattern}
    member = {"type": "string", "description": "The complete input, without quoting or escaping of its own.", **constraint}
    description = paragraphs(tool.get("description"), hint)
    function = as_function(flat_name(namespace, tool["name"]), description, {"input": member}, "input")
    return OfferedFunction({**function, "strict": True} if constraint else function, form)


CUSTOM = ToolKind(
    types=("custom",),
    items={
        "custom_tool_call": call_kind(
            "ctc", None, lambda item: as_text({"input": item.get("input", "")}), name=checks.string, input=checks.string
        ),
        "custom_tool_call_output": output_kind("ctco", _text_or_parts),
    },
    check=_definition(format=by_type({"text": checks.as_it_is, "grammar": _grammar})),
    offer=_offer_custom,
    chosen_by=("name", "namespace"),
)

# -- tool_search: the client looks for deferred tools ----------------------------------------------------------------------


def _client_search(value: Any, path: str) -> str:
    if checks.one_of(value, path, {"server", "client"}) == "server":
        checks.unsupported(path, "tools are searched by the client only; set it to 'client'.")
    return "client"


def _offer_tool_search(tool: Tool, _namespace: str | None) -> OfferedFunction:
    form = CallForm("tool_search_call", {"execution": "client"}, made=_make_search)
    given: Tool = {name: tool[name] for name in ("description", "parameters") if name in tool}
    about = "Search for more tools. You can call the tools that it finds afterwards."
    return OfferedFunction({**as_function("tool_search", about, {"query": {"type": "string"}}, "query"), **given}, form)


def _make_search(arguments: str) -> dict[str, Any]:
    parsed = parse_shallow(arguments or "{}")
    return {"arguments": {"malformed_arguments": arguments} if parsed is None else parsed}


_by_client = fields(execution=_client_search)
_tool_search = fields(execution=_client_search, description=checks.string, parameters=checks.json_object)

TOOL_SEARCH = ToolKind(
    types=("tool_search",),
    items={
        "tool_search_call": ItemKind(
            "tsc",
            chain(_by_client, fields({"call_id": check_call_id, "arguments": checks.json_object}, namespace=checks.string)),
            Role.CALL,
            lambda item: as_text(item.get("arguments", {})),
            function="tool_search",
        ),
        # `request.items` checks the item's `tools`, and `request.tools` makes its output.
        "tool_search_output": ItemKind(
            "tso", chain(_by_client, fields({"call_id": check_call_id}, namespace=checks.string)), Role.OUTPUT
        ),
    },
    check=lambda tool, path: _tool_search({"execution": "server", **tool}, path),
    offer=_offer_tool_search,
)

# -- patterns ------------------------------------------------------------------------------------------------------------
# Servers constrain the input of a custom tool with a JSON Schema `pattern`, made from the regular expression of its grammar.
# The expression matches everything that the pattern matches. Without a pattern, the input is not constrained, and the model
# only sees the expression in the tool's description.
#
# 1. A grammar matches the whole input, but a `pattern` may match a part. Therefore, the pattern is `^(...)$`.
# 2. Only constructs that all servers interpret alike are supported: characters, classes, groups, `|` and counts.
# 3. Constrained decoders usually match the JSON text. The pattern must not match characters that JSON escapes (`"`, `\`,
#    control characters), because the arguments would be invalid JSON. Therefore, `.` and `[^...]` are not supported, and
#    `\s` is a space. `\d` and `\w` are ASCII, as in ECMA-262.
# 4. Expressions come from clients. They are translated in linear time, and never compiled or matched here.

MAX_LENGTH = 2000
_MAX_DEPTH = 32
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": " "}
_TOKEN = re.compile(
    r"""
    (?P<open> \( (?: \?: | \?P?<[A-Za-z_]\w*> | (?!\?) ) )
  | (?P<close> \) )
  | (?P<count> (?: [*+?] | \{ (?P<low>[0-9]{1,4}) (?: , (?P<high>[0-9]{0,4}) )? \} ) (?![?+*{]) )
  | (?P<either> \| )
  | \[ (?!\^) (?P<members> (?: [^\[\]\\] | \\[^A-Za-z0-9] | \\[dws] )+ ) \]
  | \\ (?P<class> [dws] )
  | \\ (?P<escaped> [^A-Za-z0-9] )
  | (?P<plain> [^\\.*+?()\[\]{}|^$] )
  | (?P<unsupported> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_MEMBER = re.compile(r"\\(?P<class>[dws])|(?P<low>\\[^A-Za-z0-9]|[^\\])(?:-(?P<high>\\[^A-Za-z0-9]|[^\\]))?", re.DOTALL)


class _Unsupported(Exception):
    """The expression cannot be translated to a pattern."""


def as_pattern(expression: str) -> str | None:
    """Return a `pattern` for a full match of `expression`, or None if `expression` is unsupported or too long."""
    if len(expression) > MAX_LENGTH:
        return None
    expression = expression.removeprefix("^")  # outer anchors are implied
    bare = expression.removesuffix("$")
    if (len(bare) - len(bare.rstrip("\\"))) % 2 == 0:  # the dollar sign is not escaped
        expression = bare
    try:
        return f"^({''.join(_translate(expression))})$"
    except _Unsupported:
        return None


def _translate(expression: str) -> Iterator[str]:
    depth, before = 0, "open"
    for token in _TOKEN.finditer(expression):
        kind = str(token.lastgroup)
        depth += (kind == "open") - (kind == "close")
        if not 0 <= depth <= _MAX_DEPTH or (kind == "count" and before in ("open", "either", "count")):
            raise _Unsupported
        yield _piece(token, kind)
        before = kind
    if depth:
        raise _Unsupported


def _piece(token: re.Match[str], kind: str) -> str:
    if kind == "unsupported" or (token["high"] and int(token["low"]) > int(token["high"])):
        raise _Unsupported
    if kind == "open":
        return "("
    if kind == "members":
        return _class(token["members"])
    if kind == "class":
        members = _CLASSES[token["class"]]
        return f"[{members}]" if len(members) > 1 else members
    if kind in ("escaped", "plain"):
        _check_safe(token[kind], token[kind])
        return f"\\{token[kind]}" if token[kind] in ".*+?()[]{}|^$" else token[kind]
    return token.group()


def _class(members: str) -> str:
    # `^` and `-` move to the end of the class, because not all servers support escapes in a class.
    if any(operator in members for operator in ("--", "&&", "~~")):
        raise _Unsupported
    pieces: list[str] = []
    last: set[str] = set()
    for member in _MEMBER.finditer(members):
        if member["class"]:
            pieces.append(_CLASSES[member["class"]])
            continue
        low = member["low"][-1]
        high = (member["high"] or low)[-1]
        _check_safe(low, high)
        if low == high and low in "^-":
            last.add(low)
        else:
            pieces.append(_range(low, high))
    if "^" in last and not pieces:
        raise _Unsupported
    return f"[{''.join(dict.fromkeys(pieces))}{''.join(sorted(last, reverse=True))}]"


def _range(low: str, high: str) -> str:
    if {"^", "-"} & {low, high} or low > high:
        raise _Unsupported
    return "-".join(f"\\{bound}" if bound in "[]" else bound for bound in dict.fromkeys((low, high)))


def _check_safe(low: str, high: str) -> None:
    """Raise `_Unsupported` if the range from `low` to `high` includes a character that JSON escapes."""
    if low < " " or any(low <= unsafe <= high for unsafe in '"\\'):
        raise _Unsupported
