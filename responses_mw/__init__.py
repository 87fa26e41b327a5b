"""OpenAI's Responses API in front of a Chat Completions deployment: an ASGI middleware and a reverse proxy."""

from .app import create_app
from .config import Settings
from .middleware import ResponsesMiddleware

__all__ = ["ResponsesMiddleware", "Settings", "create_app"]
