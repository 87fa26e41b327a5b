"""Measure long chains in a Valkey on loopback: reads of 10 and 500 turns of 2 kB, and forks (`python -m benchmarks.chain`).

The lower bound of a read is the time of the bare command that returns the same bytes, plus the time to decode their JSON in one
piece. The texts are made from a thousand random words with the lengths of English words. They compress
to a third of their size.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import uvloop

from responses_mw.ids import RANDOM_LENGTH, RunIds, random_part
from responses_mw.state import Chain, State, connect, open_embedded
from responses_mw.state.schema import response_address

from .processes import free_port

OWNER = "benchmark"
TURNS, SHORT, FORKS, REPEATS = 500, 10, 20, 100
WORDS = ["".join(random.choices("etaoinshrdlu", k=length)) for length in (1, 2, 3, 3, 4, 4, 5, 6, 7, 9) for _ in range(100)]


def _text() -> str:
    return " ".join(random.choices(WORDS, k=400))[:1650]  # 2 kB of JSON per turn, including ids and names


def _message(ids: RunIds, role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "id": ids.item("msg"), "role": role, "content": [{"type": "output_text", "text": text}]}


async def _turn(state: State, parent: str | None) -> str:
    """Store a response that continues `parent`, and return its id."""
    chain = await state.responses.chain(parent, OWNER) if parent else Chain.new()
    ids = RunIds(chain.tag)
    given = [_message(ids, "user", "Go on.")]
    document = {"id": ids.response, "status": "completed", "output": [_message(ids, "assistant", _text())]}
    await state.responses.commit(chain, document, given, OWNER, random_part())
    return ids.response


async def _ms(call: Callable[[], Awaitable[object]]) -> float:
    begun = time.perf_counter()
    await call()
    return (time.perf_counter() - begun) * 1000


async def _reads(state: State, tips: list[str]) -> dict[str, float]:
    """Return the median time of each kind of read in ms. The kinds alternate, so changes on the machine affect all equally."""
    address = response_address(tips[0])
    command = ("LRANGE", address.segment(address.random), 0, TURNS - 1)
    times: dict[str, list[float]] = {name: [] for name in ("short", "long", "bytes", "json")}
    for _ in range(REPEATS):
        times["short"].append(await _ms(lambda: state.responses.chain(tips[SHORT - 1], OWNER)))
        times["long"].append(await _ms(lambda: state.responses.chain(tips[-1], OWNER)))
        begun = time.perf_counter()
        (turns,) = await state.client.pipeline([command])
        fetched = time.perf_counter()
        times["bytes"].append((fetched - begun) * 1000)
        text = b"[%b]" % b",".join([turn[RANDOM_LENGTH + 1 :] for turn in turns])
        begun = time.perf_counter()
        orjson.loads(text)
        times["json"].append((time.perf_counter() - begun) * 1000)
    return {name: statistics.median(some) for name, some in times.items()}


async def _fork_bytes(state: State, parent: str) -> float:
    before = (await state.check()).used_memory
    for _ in range(FORKS):
        await _turn(state, parent)
    return ((await state.check()).used_memory - before) / FORKS


async def main() -> None:
    async with open_embedded() as own:
        port = free_port()
        await own.command("CONFIG", "SET", "port", port)
        client = connect(f"redis://127.0.0.1:{port}")
        state = State(client)
        tips: list[str] = []
        for _ in range(TURNS):
            tips.append(await _turn(state, tips[-1] if tips else None))
        ms = await _reads(state, tips)
        print(f"medians of {REPEATS} reads on loopback; each turn has 2 kB")
        print(f"{SHORT} turns: {ms['short']:.2f} ms")
        print(f"{TURNS} turns: {ms['long']:.2f} ms")
        floor = ms["bytes"] + ms["json"]
        print(f"  the bare command {ms['bytes']:.2f} ms, decoding in one piece {ms['json']:.2f} ms: lower bound {floor:.2f} ms")
        forks = await _fork_bytes(state, tips[TURNS // 2])
        print(f"a fork takes {forks / 1000:.1f} kB of Redis's memory, including its own turn of 2 kB")
        await state.aclose()


if __name__ == "__main__":
    uvloop.run(main())
