"""Show the request of a response as code: for curl, and for the official clients in Python and JavaScript."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from .report import ResponseReport

_MEMBERS = (
    "instructions",
    "previous_response_id",
    "max_output_tokens",
    "temperature",
    "top_p",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning",
    "text",
    "truncation",
    "background",
    "store",
)
_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "truncation": "disabled",
    "background": False,
    "store": True,
    "text": {"format": {"type": "text"}},
}
_PARAMETERS = frozenset(
    {
        *_MEMBERS,
        "conversation",
        "include",
        "input",
        "max_tool_calls",
        "metadata",
        "model",
        "prompt",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "stream",
        "stream_options",
        "top_logprobs",
        "user",
    }
)
"""The request members for which the Python client has parameters."""
_MAX = 50_000  # maximum length of the code in characters


class Snippet(NamedTuple):
    language: str
    code: str


def request_of(report: ResponseReport) -> dict[str, Any]:
    """Return a request that would make a response like this one, without nulls and defaults."""
    document = report.document or {}
    given = [{name: value for name, value in item.items() if name not in ("id", "status")} for item in report.input]
    known = {name: _without_nulls(document.get(name)) for name in _MEMBERS}
    members = {name: value for name, value in known.items() if value not in (None, [], {}) and value != _DEFAULTS.get(name)}
    if isinstance(conversation := document.get("conversation"), dict):
        members["conversation"] = conversation["id"]
    return {"model": document.get("model"), "input": given, **members}


def _without_nulls(value: Any) -> Any:
    return {name: member for name, member in value.items() if member is not None} if isinstance(value, dict) else value


def snippets(body: dict[str, Any]) -> Iterator[Snippet]:
    """Yield the code of a request in each language. Yield nothing if the request is longer than `_MAX`."""
    body = {name: value for name, value in body.items() if name not in _DEFAULTS or value != _DEFAULTS[name]}
    text = json.dumps(body, ensure_ascii=False, indent=2)
    if len(text) > _MAX:
        return
    streams = body.get("stream") is True
    quoted = text.replace("'", "'\\''")
    lines = (
        f'curl {"-N " if streams else ""}"$OPENAI_BASE_URL/responses"',
        '-H "Authorization: Bearer $OPENAI_API_KEY"',
        "-H 'Content-Type: application/json'",
        f"-d '{quoted}'",
    )
    yield Snippet("curl", " \\\n  ".join(lines))
    end = "for event in response:\n    print(event)" if streams else "print(response.output_text)"
    yield Snippet("Python", f"from openai import OpenAI\n\nresponse = OpenAI().responses.create(\n{_arguments(body)})\n{end}")
    end = "for await (const event of response) console.log(event);" if streams else "console.log(response.output_text);"
    script = f"const response = await new OpenAI().responses.create({text});\n{end}"
    yield Snippet("JavaScript", f'import OpenAI from "openai";\n\n{script}')


def _arguments(body: dict[str, Any]) -> str:
    """Return the arguments for the Python client's method. Members without a parameter of their own go to `extra_body`."""
    arguments = {name: value for name, value in body.items() if name in _PARAMETERS}
    if others := {name: value for name, value in body.items() if name not in _PARAMETERS}:
        arguments["extra_body"] = others
    return "".join(f"    {name}={value!r},\n" for name, value in arguments.items())
