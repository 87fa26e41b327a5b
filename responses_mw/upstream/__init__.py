"""The deployment behind us: one Chat Completions server, over the network or in this process."""

from .caller import Caller, Standing
from .client import Upstream
from .stream import ChatStream

__all__ = ["Caller", "ChatStream", "Standing", "Upstream"]
