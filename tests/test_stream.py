from __future__ import annotations

from typing import TYPE_CHECKING

from oracle import stream
from scripted import HELLO

if TYPE_CHECKING:
    from conftest import Ours
    from scripted import ScriptedUpstream


async def test_text_is_streamed_as_it_comes(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    streamed = await stream(ours)
    assert streamed.deltas == ["Hel", "lo"]
    assert streamed.terminal == "response.completed"
    assert streamed.response["usage"]["total_tokens"] == 5
