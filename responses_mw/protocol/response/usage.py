"""Token counts: convert the many shapes of chat upstreams to that of the Responses API."""

from __future__ import annotations

from typing import Any

_MAX_COUNT = 2**53 - 1
"""Larger values are not counts, and not every client can read them."""


def _count(holder: Any, *names: str) -> int:
    """The first of ``names`` that ``holder`` has as a number, otherwise 0. Servers leave out what they do not know."""
    if isinstance(holder, dict):
        for name in names:
            value = holder.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT:
                return value
    return 0


def from_chat(usage: dict[str, Any]) -> dict[str, Any]:
    """Convert a chat ``usage`` to a ``ResponseUsage``. All of its details are required, so unknown ones are 0."""
    prompt, completion = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    of_prompt, of_completion = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": _count(of_prompt, "cached_tokens"),
            "cache_write_tokens": _count(of_prompt, "cache_write_tokens", "created_cache_tokens"),
        },
        "output_tokens": completion,
        "output_tokens_details": {
            # SGLang reports them beside the counts, other servers in the details.
            "reasoning_tokens": _count(of_completion, "reasoning_tokens") or _count(usage, "reasoning_tokens"),
        },
        "total_tokens": _count(usage, "total_tokens") or prompt + completion,
    }


def with_tools(usage: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Add the tokens of tool results to the usage of a turn that follows the turn ``before``.

    As in vLLM, they are the growth of the prompt minus the previous answer.
    """
    grown = usage["input_tokens"] - before["input_tokens"] - before["output_tokens"]
    return {**usage, "output_tokens_details": {**usage["output_tokens_details"], "tool_output_tokens": max(grown, 0)}}


def add(total: dict[str, Any] | None, usage: dict[str, Any]) -> dict[str, Any]:
    """Add up the usage of the turns of a run, member by member. Of members that are not counts, the last wins."""
    if total is None:
        return usage
    merged = {**total, **usage}
    for name, value in usage.items():
        before = total.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            merged[name] = add(before, value)
        elif type(value) is int and type(before) is int:
            merged[name] = before + value
    return merged
