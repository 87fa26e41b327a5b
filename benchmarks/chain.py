"""What a long chain costs on an embedded Valkey: to read 10 and 500 turns of 2 kB, and to fork (python -m benchmarks.chain)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from responses_mw.ids import RunIds, random_part
from responses_mw.state import Chain, State
from responses_mw.state.embedded import embedded

OWNER = "benchmark"
TURNS, SHORT, FORKS, REPEATS = 500, 10, 20, 50
TEXT = "".join(f"{number:x} " for number in range(460))[:1900]  # some 2 kB a turn, of the kind that compresses


def _message(ids: RunIds, role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "id": ids.item("msg"), "role": role, "content": [{"type": "output_text", "text": text}]}


async def _turn(state: State, parent: str | None) -> str:
    """Stores one response on top of ``parent``; returns its id."""
    chain = await state.responses.chain(parent, OWNER) if parent else Chain.new()
    ids = RunIds(chain.tag)
    given = [_message(ids, "user", "Go on.")]
    document = {"id": ids.response, "status": "completed", "output": [_message(ids, "assistant", TEXT)]}
    await state.responses.commit(chain, document, given, OWNER, random_part())
    return ids.response


async def _median_ms(call: Callable[[], Awaitable[object]]) -> float:
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        await call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1000


async def main() -> None:
    async with embedded() as client:
        state = State(client)
        tips: list[str] = []
        for _ in range(TURNS):
            tips.append(await _turn(state, tips[-1] if tips else None))
        short = await _median_ms(lambda: state.responses.chain(tips[SHORT - 1], OWNER))
        long = await _median_ms(lambda: state.responses.chain(tips[-1], OWNER))
        before = (await state.check()).used_memory
        for _ in range(FORKS):
            await _turn(state, tips[TURNS // 2])
        forks = ((await state.check()).used_memory - before) / FORKS
        print(f"a chain of {SHORT} turns is read in  {short:.2f} ms (median of {REPEATS})")
        print(f"a chain of {TURNS} turns is read in {long:.2f} ms: {long - short:.2f} more (at most 1)")
        print(f"a fork of it costs {forks / 1000:.1f} kB of Redis's memory, its own turn of {len(TEXT) / 1000:.1f} kB included")


if __name__ == "__main__":
    uvloop.run(main())
