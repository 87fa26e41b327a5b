"""The tools that the server executes."""

from .tool import ToolConfig
from .toolbox import ForwardedTools, Toolbox, Tools

__all__ = ["ForwardedTools", "ToolConfig", "Toolbox", "Tools"]
