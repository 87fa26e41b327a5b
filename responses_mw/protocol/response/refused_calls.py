"""Answer calls of unknown functions, and describe calls that the request does not allow."""

from __future__ import annotations

from collections.abc import Sequence

from ..types import Item

_MAX_LISTED = 64  # maximum number of names in a text
_MAX_NAME = 64  # maximum number of characters of the name that the model wrote
_MAX_ARGUMENTS = 16 * 1024  # maximum number of characters of arguments that the model sees again, in each further turn


def refused_call(call_id: str, name: str, arguments: str, offered: Sequence[str]) -> tuple[Item, Item]:
    """Return the items that show the model its call of a function that is not in `offered`, and the error."""
    tools = f"The available tools are: {_listing(offered)}." if offered else "No tools are available. Answer without tools."
    output = f"There is no tool named {_quoted(name)}. {tools}"
    shown = arguments if 0 < len(arguments) <= _MAX_ARGUMENTS else "{}"
    call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": shown, "status": "completed"}
    return call, {"type": "function_call_output", "call_id": call_id, "output": output, "status": "completed"}


def nothing_called(names: Sequence[str]) -> str:
    """Return a text that informs the client that the model's calls of the functions `names` were not executed."""
    return f"No tool was called. The model called {_listing(list(map(_quoted, names)))}, which the request does not allow."


def _listing(names: Sequence[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _quoted(name: str) -> str:
    return f"'{name[:_MAX_NAME]}'"
