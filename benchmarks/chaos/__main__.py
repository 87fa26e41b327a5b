"""Creates responses while processes are killed, stalled or drained and keys are damaged, then checks what clients saw.

    scripts/chaos                                    100 jobs and 50 foreground requests, 60 seconds of faults
    scripts/chaos --seed 7 --faults drain stall_valkey
    scripts/chaos --jobs 24 --seconds 8              the short form, which is one of the tests

It runs real processes: three replicas and a Valkey with an append-only file. The chat server runs in this process, and closes
its connections like a process that ends. The seed determines the sequence of faults and of requests, but not their timing.

Each job is followed by a client that continues at another replica whenever its stream is interrupted. Another client cancels or
deletes some of the jobs. Foreground requests alternate between streams and JSON, and take longer than a replica drains.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import httpx

from .deployment import Deployment
from .faults import WEIGHTS, Faults
from .foreground import Foreground
from .jobs import Jobs


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
            while jobs.unfinished():  # noqa: ASYNC110 (what it waits for is in other processes)
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
