"""The upstream: the server behind this one, reached over the network or in this process."""

from .caller import Caller, Standing
from .client import Upstream
from .operator_key import KeyCheck

__all__ = ["Caller", "KeyCheck", "Standing", "Upstream"]
