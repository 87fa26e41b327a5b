"""``responses-mw sandbox``: a service that runs Python code in containers, for the code interpreter tool."""

from .settings import SandboxSettings

__all__ = ["SandboxSettings", "serve"]


def serve(settings: SandboxSettings) -> None:
    """Runs the service until it is told to stop. Raises ``ModuleNotFoundError`` without the extra ``sandbox``."""
    from .app import serve as run  # the package mcp takes its time to load

    run(settings)
