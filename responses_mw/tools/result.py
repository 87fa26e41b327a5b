"""What a call of a tool comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..protocol.types import Part


@dataclass(frozen=True, slots=True)
class Result:
    """The answer of one call. A fault of a tool is a result too: the model sees it, and the run goes on."""

    content: str | list[Part]
    """What the model reads: a text, or parts of type ``input_text`` and ``input_image``."""
    members: dict[str, Any] = field(default_factory=dict)
    """What the call's item shows: ``output``, ``error``, ``outputs``, ``action`` and the like."""
    failed: bool = False

    @property
    def size(self) -> int:
        """Characters of what the model reads."""
        if isinstance(self.content, str):
            return len(self.content)
        return sum(len(part.get("text") or part.get("image_url") or "") for part in self.content)
