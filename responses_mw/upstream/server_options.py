"""Recognize errors that every such request gets, because the upstream was started without an option that it needs.

Servers answer them with a 400 as if the request were invalid. Only whole messages are recognized, so that no client can make
its own mistake look like one of them by a text that the upstream quotes.
"""

from __future__ import annotations

import re

_TOOLS = "start vLLM with --enable-auto-tool-choice and the model's --tool-call-parser"
_REMEDIES = tuple(
    (re.compile(message, re.DOTALL), remedy)
    for message, remedy in (
        (r'"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set', _TOOLS),
        (r"tool_choice=.{1,1000} requires --tool-call-parser to be set", _TOOLS),
        (  # vLLM and SGLang; transformers appends a hint
            r"As of transformers v[\d.]{1,10}, default chat template is no longer allowed, so you must provide .{0,200}",
            "serve a model with a chat template, or start the upstream with --chat-template",
        ),
        (r"(tools|tool_choice) param requires --jinja flag", "start llama-server with --jinja"),
    )
)
_MAX_LENGTH = 1200


def missing_option(message: str) -> str:
    """Return what to do about an error of the upstream with this `message`, or "" if it is not one of these errors."""
    if len(message) > _MAX_LENGTH:
        return ""
    return next((remedy for pattern, remedy in _REMEDIES if pattern.fullmatch(message)), "")
