"""WebSocket mode (``GET /v1/responses`` with an upgrade): one more reader of the runner's events."""

from .upgrade import WebSockets

__all__ = ["WebSockets"]
