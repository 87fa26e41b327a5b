"""Causes faults in the deployment."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

import redis

from responses_mw.state.schema import response_address

from .deployment import LEASE, Deployment, Process, Target, Upstream
from .jobs import Jobs

SETTLE = 3.0
"""Seconds after a fault during which its effects are accepted."""
WEIGHTS = {
    "kill": 2,
    "stall": 2,
    "drain": 3,
    "restart_valkey": 1,
    "stall_valkey": 1,
    "upstream_down": 1,
    "upstream_overloaded": 1,
    "damage_job": 1,
    "damage_queue": 1,
}


class Faults:
    """Causes random faults, each at a target that it applies to."""

    def __init__(self, deployment: Deployment, jobs: Jobs, names: list[str]) -> None:
        self._deployment = deployment
        self._jobs = jobs
        self._names = names

    async def cause(self, seconds: float) -> None:
        """Cause faults for `seconds` seconds."""
        loop, draw = asyncio.get_running_loop(), self._deployment.draw("faults")
        end, weights = loop.time() + seconds, [WEIGHTS[name] for name in self._names]
        async with asyncio.TaskGroup() as group:
            while loop.time() < end:
                name, number, amount = draw.choices(self._names, weights)[0], draw.randrange(3), draw.random()
                await asyncio.sleep(draw.uniform(0.3, 1.2))
                target = self._target(name, number)
                if not target.busy.locked():
                    group.create_task(self._cause(name, target, amount))

    def _target(self, name: str, number: int) -> Target:
        if name.startswith("upstream"):
            return self._deployment.upstream
        return self._deployment.replicas[number] if name in ("kill", "stall", "drain") else self._deployment.valkey

    async def _cause(self, name: str, target: Target, amount: float) -> None:
        async with target.busy:
            target.begun[name] += 1
            await getattr(self, name)(target, amount)
        await asyncio.sleep(SETTLE)
        target.ended[name] += 1

    async def kill(self, replica: Process, _: float) -> None:
        await replica.end()
        await replica.start()

    async def drain(self, replica: Process, _: float) -> None:
        replica.drained = asyncio.get_running_loop().time()
        status = await replica.end(signal.SIGTERM)
        if status:
            self._deployment.problems.append(f"{replica.log.name}: exit status {status} after SIGTERM")
        await replica.start()

    async def stall(self, process: Process, amount: float) -> None:
        process.send(signal.SIGSTOP)
        await asyncio.sleep(0.5 + amount * (2 * LEASE - 0.5))
        process.send(signal.SIGCONT)

    async def stall_valkey(self, valkey: Process, amount: float) -> None:
        valkey.send(signal.SIGSTOP)
        await asyncio.sleep(1.5 + amount)  # the replicas wait for 2 seconds
        valkey.send(signal.SIGCONT)

    async def restart_valkey(self, valkey: Process, amount: float) -> None:
        await valkey.end()
        await asyncio.sleep(amount)
        await valkey.start()

    async def upstream_down(self, upstream: Upstream, amount: float) -> None:
        await upstream.end()
        await asyncio.sleep(1 + 3 * amount)
        upstream.start()

    async def upstream_overloaded(self, upstream: Upstream, amount: float) -> None:
        upstream.overload = 429 if amount < 0.5 else 503
        await asyncio.sleep(1 + 3 * amount)
        upstream.overload = None

    async def damage_job(self, _: Process, amount: float) -> None:
        """Store a value of the wrong type at a key of one of the latest jobs."""
        sound = [job for job in self._jobs.jobs[-10:] if not (job.damaged or job.deleted)]
        if sound:
            job = sound[int(amount * len(sound))]
            address = response_address(job.response_id)
            keys = [address.record, address.log, address.compressed_log, address.record.replace(":r:", ":k:")]
            key = keys[int(amount * 1000) % len(keys)]
            job.damaged = key
            both = self._deployment.redis.pipeline()
            both.delete(key)
            both.rpush(key, "damage")  # none of them is a list
            both.execute()

    async def damage_queue(self, _: Process, amount: float) -> None:
        """Replace a key of a partition with a value of the wrong type for 2 seconds."""
        client = self._deployment.redis
        keys = sorted(key for key in client.scan_iter("rmw:{q1p?}:*", count=1000) if not key.endswith(b":clock"))
        if keys:
            key, kept = keys[int(amount * len(keys))], b"kept"
            with suppress(redis.ResponseError):  # the key has just been removed
                client.rename(key, kept)
            client.set(key, "damage")
            await asyncio.sleep(2)
            client.delete(key)
            with suppress(redis.ResponseError):
                client.rename(kept, key)
