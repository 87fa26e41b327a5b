"""`responses-mw cache`: statistics and purges."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.cache.asking import ALICE, BOB, ask, key

if TYPE_CHECKING:
    from responses_mw.cache import Cache
    from tests.cache.conftest import RunCommand
    from tests.support.valkey import Server


async def test_the_command_prints_statistics_and_purges_one_owner_or_all(
    run: RunCommand, cache: Cache, plain_server: Server
) -> None:
    for owner in (ALICE, BOB):
        await ask(cache, key(cache, owner=owner), answer="Paris.")
    redis = f"--redis={plain_server.url}"
    status, printed = await run("stats", redis)
    assert (status, "2 entries of 2 owners, in 2 partitions" in printed) == (0, True)
    status, printed = await run("purge", redis, f"--owner={ALICE}")
    assert (status, "1 entries removed" in printed) == (0, True)
    assert await ask(cache, key(cache, owner=ALICE)) == "nothing"
    assert await ask(cache, key(cache, owner=BOB)) == "told again: Paris."
    await run("purge", redis)
    assert await ask(cache, key(cache, owner=BOB)) == "nothing"


async def test_a_semantic_cache_without_numpy_stops_the_server_with_an_install_hint() -> None:
    arguments = ["serve", "--upstream=http://127.0.0.1:1", "--port=0", "--cache.mode=semantic", "--cache.embedding-model=e"]
    program = f"import sys; sys.modules['numpy'] = None\nfrom responses_mw.cli import main; main({arguments})"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    printed, _ = await process.communicate()
    assert process.returncode == 3
    assert b"install responses-mw with the extra 'cache'" in printed
    assert b"Traceback" not in printed


async def test_the_command_reports_its_errors(run: RunCommand) -> None:
    for arguments, said in (
        (["stats"], "--redis"),
        (["stats", "--redis=redis://127.0.0.1:1"], "unavailable"),
        (["dump", "--redis=redis://127.0.0.1:1"], "'stats', 'purge', 'explain' or 'eval'"),
        (["purge", "--redis=redis://127.0.0.1:1", "--owner=A{b}"], "lower-case"),
    ):
        status, printed = await run(*arguments)
        assert (status, printed.count(said)) == (1, 1), printed
