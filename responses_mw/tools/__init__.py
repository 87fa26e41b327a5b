"""Tools that are carried out on the server's side of a response."""

from .toolbox import Toolbox, Tools

__all__ = ["Toolbox", "Tools"]
