"""Background responses while a node of a Redis Cluster hangs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import pytest
from redis.crc import key_slot

from responses_mw.jobs.event_log import ClaimedJob, EventLogWriter
from responses_mw.protocol.types import Event
from responses_mw.state import Job, Jobs, State, connect
from tests.jobs.test_background import create as create_response
from tests.jobs.test_background import ended
from tests.jobs.test_records import LEASE, create, numbers, taken
from tests.jobs.test_replicas import record
from tests.support.cluster import SLOTS, cluster_url, wait_until_whole
from tests.support.scripted import Signal, finish, text
from tests.support.servers import PATIENCE

if TYPE_CHECKING:
    from tests.jobs.conftest import Replica
    from tests.support.scripted import ScriptedUpstream
    from tests.support.valkey import Server


@pytest.fixture
async def nodes(cluster: list[Server]) -> AsyncIterator[list[Server]]:
    """The nodes. Each serves its slots while others are down. All run again when the test ends."""
    for node in cluster:
        with node.client() as client:
            client.config_set("cluster-require-full-coverage", "no")
    yield cluster
    for node in cluster:
        node.signal(signal.SIGCONT)
    await asyncio.to_thread(wait_until_whole, cluster)


def home(response_id: str) -> int:
    """Return the number of the node that stores the keys of a response."""
    return key_slot(response_id[5:30].encode()) * 3 // SLOTS


async def test_jobs_on_other_nodes_are_logged_and_renewed_while_a_node_hangs(nodes: list[Server]) -> None:
    state = State(connect(cluster_url(nodes)))
    writer = EventLogWriter(state.jobs, LEASE)
    running = asyncio.create_task(writer.run())
    hung, sound = [ClaimedJob(job, 0.0) for job in await jobs_of_two_nodes(state)]
    nodes[home(hung.job.response_id)].signal(signal.SIGSTOP)
    for number in (2, 3):
        for claimed in (hung, sound):
            writer.write(claimed, [Event("e", {"sequence_number": number})])
        await asyncio.wait_for(writer.wait_until_written(sound), 60)
    assert await numbers(state, sound.job.response_id) == [(0, 1), (2, 2), (3, 3)]
    assert (hung.is_behind, hung.stopped, sound.stopped) == (True, None, None)
    holds = [(claimed.job.response_id, claimed.job.token) for claimed in (hung, sound)]
    assert await state.jobs.renew(holds, LEASE) == [None, True]
    nodes[home(hung.job.response_id)].signal(signal.SIGCONT)
    await asyncio.wait_for(writer.wait_until_written(hung), 60)
    assert await numbers(state, hung.job.response_id) == [(0, 1), (2, 2), (3, 3)]
    running.cancel()
    await state.aclose()


async def jobs_of_two_nodes(state: State) -> list[Job]:
    found: dict[int, Job] = {}
    while len(found) < 2:
        job = await taken(state, await create(state))
        found[home(job.response_id)] = job
    return list(found.values())


async def test_a_worker_keeps_its_jobs_on_other_nodes_while_a_node_hangs(
    nodes: list[Server], replica: Replica, upstream: ScriptedUpstream
) -> None:
    # Renewals that fail together would be noticed after 8 s. Then a busy machine has another 8 s before the worker gives up.
    ours = replica(redis__url=cluster_url(nodes), redis__timeout=3.0, jobs__lease=24.0)
    go, running = Signal(), list[str]()
    while len({home(response_id) for response_id in running}) < 3:
        answer = upstream.stream(text("Hel"), go, text("lo"), finish())
        running.append((await create_response(ours))["id"])
        await asyncio.wait_for(answer.asked.wait(), 60)
    hung = (key_slot(b"q2") * 3 // SLOTS + 1) % 3  # the queue is on another node
    sound = [response_id for response_id in running if home(response_id) != hung]
    nodes[hung].signal(signal.SIGSTOP)
    for _ in range(2):
        await renewed(nodes, sound)
    assert len(upstream.requests) == len(running)
    go.set()
    for response_id in sound:
        assert (await ended(ours, response_id))["output_text"] == "Hello"
    assert len(upstream.requests) == len(running)


async def renewed(nodes: list[Server], response_ids: list[str]) -> None:
    """Wait until the leases of all these jobs have been renewed."""

    def leases() -> list[int]:
        ends = []
        for response_id in response_ids:
            with nodes[home(response_id)].client() as client:
                ends.append(int(client.hget(record(response_id), "lease_until")))
        return ends

    before = leases()
    async with asyncio.timeout(PATIENCE):
        while not all(now > then for now, then in zip(leases(), before, strict=True)):
            await asyncio.sleep(0.05)


async def test_a_job_survives_one_renewal_that_finds_its_node_unavailable(
    monkeypatch: pytest.MonkeyPatch, replica: Replica, upstream: ScriptedUpstream
) -> None:
    renew, renewals = Jobs.renew, list[list[bool | None]]()

    async def renew_late(jobs: Jobs, holds: Sequence[tuple[str, str]], lease: float) -> list[bool | None]:
        renewals.append(await renew(jobs, holds, lease) if renewals else [None])
        return renewals[-1]

    monkeypatch.setattr(Jobs, "renew", renew_late)
    ours, go = replica(jobs__lease=6.0), Signal()
    upstream.stream(text("Hel"), go, text("lo"), finish())
    response_id = (await create_response(ours))["id"]
    async with asyncio.timeout(60):
        while len(renewals) < 2:
            await asyncio.sleep(0.05)
    go.set()
    assert (await ended(ours, response_id))["output_text"] == "Hello"
    assert (renewals[:2], len(upstream.requests)) == ([[None], [True]], 1)
