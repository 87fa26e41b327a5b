"""Owners take turns."""

from __future__ import annotations

import asyncio

import pytest

from responses_mw.files.fair_slots import FairSlots


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Visitors:
    """Tasks that hold a slot until they are told to leave."""

    def __init__(self, slots: int) -> None:
        self.slots = FairSlots(slots)
        self.inside: list[str] = []
        self.leaves: dict[str, asyncio.Event] = {}

    def enter(self, name: str) -> asyncio.Task[None]:
        self.leaves[name] = asyncio.Event()
        return asyncio.create_task(self._visit(name))

    async def _visit(self, name: str) -> None:
        async with self.slots.slot(name[0]):
            self.inside.append(name)
            await self.leaves[name].wait()
            self.inside.remove(name)

    async def leave(self, name: str) -> None:
        self.leaves[name].set()
        await _settle()


@pytest.mark.anyio
async def test_an_owner_with_many_tasks_does_not_delay_others() -> None:
    visitors = Visitors(2)
    tasks = [visitors.enter(name) for name in ("a1", "a2", "a3", "a4", "b1", "c1")]
    await _settle()
    assert visitors.inside == ["a1", "a2"]
    await visitors.leave("a1")
    assert visitors.inside == ["a2", "a3"]
    await visitors.leave("a2")
    assert visitors.inside == ["a3", "b1"]
    await visitors.leave("a3")
    assert visitors.inside == ["b1", "c1"]
    await visitors.leave("c1")
    assert visitors.inside == ["b1", "a4"]
    for name in ("a4", "b1"):
        await visitors.leave(name)
    await asyncio.gather(*tasks)


@pytest.mark.anyio
async def test_a_cancelled_task_loses_no_slot() -> None:
    visitors = Visitors(1)
    tasks = {name: visitors.enter(name) for name in ("a1", "b1", "c1", "d1")}
    await _settle()
    tasks["b1"].cancel()
    await _settle()
    visitors.leaves["a1"].set()
    while not tasks["a1"].done():
        await asyncio.sleep(0)
    tasks["c1"].cancel()  # when it has just got the slot, or already uses it
    await _settle()
    assert visitors.inside == ["d1"]
    await visitors.leave("d1")
    last = visitors.enter("e1")
    await _settle()
    assert visitors.inside == ["e1"]
    await visitors.leave("e1")
    await last
