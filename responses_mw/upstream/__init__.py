"""The deployment behind us: one Chat Completions server, over the network or in this process."""

from .client import Caller, Upstream
from .stream import ChatStream

__all__ = ["Caller", "ChatStream", "Upstream"]
