"""WebSocket mode: `GET /v1/responses` with an upgrade."""

from .upgrade import WebSockets

__all__ = ["WebSockets"]
