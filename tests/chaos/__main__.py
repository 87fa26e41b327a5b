"""Create responses while processes are killed, stalled or drained and keys are damaged, then check what clients saw.

    scripts/chaos                                    100 jobs and 50 foreground requests, 60 seconds of faults
    scripts/chaos --seed 7 --faults drain stall_valkey
    scripts/chaos --jobs 24 --seconds 8              the short form, which is one of the tests

Three replicas and a Valkey with an append-only file run as real processes. The chat server runs in this process, and aborts its
connections to simulate a crash. The seed determines the sequence of faults and of requests, but not their timing.

Each job is followed by a client that continues at a random replica whenever its stream is interrupted. Another client cancels
or deletes some of the jobs. Foreground requests alternate between streams and JSON, and take longer than the drain timeout of a
replica.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import httpx
import redis

from responses_mw.state.schema import response_address

from .clients import Foreground, Jobs
from .deployment import LEASE, Deployment, Process, Target, Upstream

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
    """Causes random faults, each in a suitable target."""

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
        """Replace the value of a recent job's key with a value of the wrong type."""
        sound = [job for job in self._jobs.jobs[-10:] if not (job.damaged or job.deleted)]
        if sound:
            job = sound[int(amount * len(sound))]
            address = response_address(job.response_id)
            keys = [address.record, address.log, address.record.replace(":r:", ":k:")]
            key = keys[int(amount * 1000) % len(keys)]
            job.damaged = key
            both = self._deployment.redis.pipeline()
            both.delete(key)
            both.rpush(key, "damage")  # no key of a job is a list
            both.execute()

    async def damage_queue(self, _: Process, amount: float) -> None:
        """Replace a key of the queue with a value of the wrong type for 2 seconds."""
        client = self._deployment.redis
        keys = sorted(key for key in client.scan_iter("rmw:{q2}:*", count=1000) if not key.endswith(b":clock"))
        if keys:
            key, kept = keys[int(amount * len(keys))], b"kept"
            with suppress(redis.ResponseError):  # the key has just been removed
                client.rename(key, kept)
            client.set(key, "damage")
            await asyncio.sleep(2)
            client.delete(key)
            with suppress(redis.ResponseError):
                client.rename(kept, key)


async def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the jobs, requests, faults and checks. Return the exit status."""
    deployment, loop = Deployment(folder, arguments.seed), asyncio.get_running_loop()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # an idle connection may be closed at any moment
    try:
        async with asyncio.timeout(60):
            await deployment.start()
        began = loop.time()
        async with httpx.AsyncClient(timeout=30, limits=limits, trust_env=False) as client:
            jobs, foreground = Jobs(deployment, client), Foreground(deployment, client)
            faults = Faults(deployment, jobs, arguments.faults)
            await _play(jobs, foreground, faults, arguments)
            await jobs.check()
            await foreground.check()
        deployment.check_logs()
    finally:
        await deployment.end()
    print(f"seed {arguments.seed}, {loop.time() - began:.0f} s")
    print(f"injected: {dict(deployment.injected)}")
    print(f"checked:  {dict(deployment.checked)}; outcomes of jobs: {dict(jobs.ends)}")
    print(f"answers continued: {deployment.upstream.continued}")
    print(f"problems: {len(deployment.problems)}", *deployment.problems, sep="\n  ")
    return 1 if deployment.problems else 0


async def _play(jobs: Jobs, foreground: Foreground, faults: Faults, arguments: argparse.Namespace) -> None:
    with suppress(TimeoutError):  # unfinished responses are reported later
        async with asyncio.timeout(arguments.seconds + arguments.patience), asyncio.TaskGroup() as group:
            group.create_task(faults.cause(arguments.seconds))
            for number in range(arguments.jobs):
                group.create_task(jobs.create(number))
                if number % 2:
                    group.create_task(foreground.ask(number // 2))
                await asyncio.sleep(0.8 * arguments.seconds / arguments.jobs)
    with suppress(TimeoutError):
        async with asyncio.timeout(arguments.patience):
            while jobs.unfinished():
                await asyncio.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100, help="background responses; half as many foreground requests")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds during which faults are caused")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds after which all responses must have ended")
    parser.add_argument("--faults", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="default: all")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--keep", action="store_true", help="keep the processes' logs, and print their directory")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    if arguments.keep:
        print(f"logs: {folder}", flush=True)
    try:
        sys.exit(asyncio.run(run(arguments, folder)))
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
