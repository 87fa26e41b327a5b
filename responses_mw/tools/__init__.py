"""Tools that are carried out on the server's side of a response."""

from .tool import ToolConfig
from .toolbox import ForwardedTools, Toolbox, Tools

__all__ = ["ForwardedTools", "ToolConfig", "Toolbox", "Tools"]
