"""``responses-mw sandbox``: a service that runs Python code in containers, for the code interpreter tool."""

from .settings import SandboxSettings

__all__ = ["SandboxSettings", "serve"]


def serve(settings: SandboxSettings) -> None:
    """Run the service until a signal stops it. Raises ``ModuleNotFoundError`` without the extra ``sandbox``."""
    from .app import serve as run  # the package mcp loads slowly

    run(settings)
