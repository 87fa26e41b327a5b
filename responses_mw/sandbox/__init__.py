"""``responses-mw sandbox``: a service that runs Python code in containers, for the code interpreter tool."""

from .app import create_app, serve
from .settings import SandboxSettings

__all__ = ["SandboxSettings", "create_app", "serve"]
