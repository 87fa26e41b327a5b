"""OpenAI's Responses API in front of a Chat Completions deployment: an ASGI middleware and a reverse proxy."""

from .app import ResponsesMiddleware, create_app
from .settings import Settings

__all__ = ["ResponsesMiddleware", "Settings", "create_app"]
