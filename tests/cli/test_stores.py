"""The commands `files` and `stores`."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from responses_mw.embeddings.static import StaticEmbedder
from responses_mw.ids import random_part
from responses_mw.state import State, connect
from responses_mw.state.blocks import StoredBlock
from responses_mw.state.files import File, new_file_id
from responses_mw.state.store_file_records import NewFile
from responses_mw.state.store_files import new_generation
from responses_mw.state.vector_stores import VectorStore, new_store_id

if TYPE_CHECKING:
    from tests.cli.conftest import Print

OWNERS = ("anonymous", "0123")
LEAVE = "Every employee has 28 days of annual leave.\x1b[2J"


@pytest.fixture
def stores(redis_url: str) -> list[str]:
    """The ids of two stores of different owners. Each has one file that was ingested, and one that waits."""
    return asyncio.run(_fill(redis_url))


async def _fill(redis_url: str) -> list[str]:
    state, now, ids = State(connect(redis_url, timeout=20)), int(time.time()), list[str]()
    embedder = StaticEmbedder()
    vectors = np.stack(await embedder.embed([LEAVE])).astype("<f2")
    block = StoredBlock(embedder.space, vectors.shape[1], [LEAVE], [0], vectors.tobytes())
    for owner in OWNERS:
        store, added = VectorStore(new_store_id(), "handbook", now, now), list[NewFile]()
        await state.vector_stores.create(store, owner)
        for name in ("a.txt", "b\x1b[2J.txt"):
            file = File(new_file_id(), name, "assistants", 5, now, None, "")
            await state.files.schedule(file.id, owner, now + 3600)
            await state.files.create(file, owner)
            added.append(NewFile(file.id, name, {}, {"tokens": 800, "overlap": 400}))
        await state.store_files.attach(store.id, owner, added, new_generation())
        await state.store_files.publish(await state.store_files.get(store.id, owner, added[0].file_id), owner, block)
        ids.append(store.id)
    await state.aclose()
    return ids


def test_files_are_listed(stores: list[str], printed: Print) -> None:
    lines = printed("files").splitlines()
    assert len(lines) == 4
    assert sum("owner anonymous  a.txt" in line for line in lines) == 1
    assert not any("\x1b" in line for line in lines)
    [first, _] = [json.loads(line) for line in printed("files", "--json", "--owner", "0123").splitlines()]
    assert (first["owner"], first["filename"], first["size"]) == ("0123", "a.txt", 5)


def test_stores_are_listed(stores: list[str], printed: Print) -> None:
    lines = printed("stores", "list").splitlines()
    assert [line for line in lines if line.startswith(stores[0]) and "1 in progress, 1 completed" in line]
    assert len(lines) == 2
    [store] = [json.loads(line) for line in printed("stores", "list", "--json", "--owner", "0123").splitlines()]
    assert (store["id"], store["name"], store["owner"]) == (stores[1], "handbook", "0123")


def test_a_store_is_searched(stores: list[str], printed: Print) -> None:
    text = printed("stores", "search", stores[1], "days of leave")
    assert "28 days of annual leave" in text
    assert "\x1b" not in text
    [found] = [json.loads(line) for line in printed("stores", "search", stores[1], "leave", "--json").splitlines()]
    assert (found["text"], found["filename"]) == (LEAVE, "a.txt")


def test_a_store_is_rebuilt(stores: list[str], printed: Print) -> None:
    assert "2 files wait" in printed("stores", "rebuild", stores[0])
    [store] = [json.loads(line) for line in printed("stores", "list", "--json", "--owner", OWNERS[0]).splitlines()]
    assert (store["counts"], store["space"]) == ([2, 0, 0, 0], "")


def test_an_unknown_store_is_reported(printed: Print) -> None:
    for action in (["search", "leave"], ["rebuild"]):
        command, *query = action
        assert "there is no vector store" in printed("stores", command, f"vs_{random_part()}", *query, status=1)


def test_a_store_is_selected_together_with_its_owner(stores: list[str], printed: Print) -> None:
    assert "28 days" in printed("stores", "search", stores[1], "days of leave", "--owner", OWNERS[1])
    for action in (["search", stores[1], "leave"], ["rebuild", stores[1]], ["index", stores[1]]):
        assert "there is no vector store" in printed("stores", *action, "--owner", OWNERS[0], status=1)
