"""Requests over the network: HTTP/1.1 beneath httpx's interface, made for streams of many small reads."""

from .transport import NetworkTransport

__all__ = ["NetworkTransport"]
