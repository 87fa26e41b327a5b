"""The deployment behind us: one Chat Completions server, over the network or in this process."""

from .caller import Caller, Standing
from .client import Upstream

__all__ = ["Caller", "Standing", "Upstream"]
