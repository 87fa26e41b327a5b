"""Wherever an answer is interrupted, no text is lost or repeated, and limits and usage equal those of the whole answer.

The suite plays a few hundred cuts. `CUTS=100000 scripts/test tests/engine/test_cuts.py --timeout 0` plays more, and `SEED` changes
the first one.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import AsyncExitStack
from random import Random

import pytest

from tests.engine import cuts

CUTS, SEED = int(os.environ.get("CUTS", "300")), int(os.environ.get("SEED", "0"))
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
async def test_an_interrupted_text_is_continued_without_loss_or_repetition(part: int) -> None:
    results: Counter[tuple[str, str]] = Counter()
    async with AsyncExitStack() as stack:
        servers = {name: cuts.CutServer(cuts.draw(Random(0))) for name in ("vllm", "llamacpp")}
        runners = {name: await stack.enter_async_context(cuts.running(server, name)) for name, server in servers.items()}
        for number in range(SEED + part, SEED + CUTS, PARTS):
            cut = cuts.draw(Random(number))
            name = "llamacpp" if cut.llamacpp else "vllm"
            try:
                status = await cuts.play(runners[name], servers[name], cut)
            except AssertionError as error:
                error.add_note(f"cut {number}: {cut}")
                raise
            results[cut.manner, status] += 1
    print(dict(results))
    assert results[cuts.CONTINUES, "completed"] > results.total() / 4
    assert not results[cuts.CONTINUES, "failed"]
