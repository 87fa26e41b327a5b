"""The upstream: the server behind this one, reached over the network or in this process."""

from .caller import Caller, Standing
from .client import Upstream

__all__ = ["Caller", "Standing", "Upstream"]
