"""The gate: nothing has a side effect before its caller has been accepted.

A tool server contacted, code run, a text embedded, anything stored, queued or counted: what does such a thing takes the gate of
its request as an argument that has no default, and awaits it first. So none can be added that forgets it.

The gate of a request is ``Upstream.verify`` for its caller. It costs nothing where he has a key of ours, or once the upstream
has answered this very request; else it asks the upstream, and remembers what that says for a while. It raises ``Unauthorized``
for a caller who is refused, ``UpstreamError`` where nobody knows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

__all__ = ["Gate"]

Gate: TypeAlias = Callable[[], Awaitable[None]]
