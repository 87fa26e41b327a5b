"""Health checks of Redis, and their warnings and errors for the operator."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from responses_mw.errors import StartupError
from responses_mw.state_opening import check_fitness
from tests.support.configured import make_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.valkey import OpenState, Server


async def test_a_well_configured_redis_has_no_warnings_or_errors(open_state: OpenState, start: Callable[..., Server]) -> None:
    server = start("--appendonly", "yes", "--maxmemory", "100mb", "--maxmemory-policy", "noeviction")
    state = open_state(server.url)
    health = await state.check()
    assert health.server.startswith(("Valkey ", "Redis "))
    assert health.policy == "noeviction"
    assert 0 < health.used_memory < health.max_memory == 100 * 1024 * 1024
    assert (health.warnings, health.errors) == ((), ())


async def test_eviction_missing_persistence_and_a_missing_memory_limit_are_warnings(
    open_state: OpenState, start: Callable[..., Server]
) -> None:
    server = start("--maxmemory-policy", "allkeys-lru")
    state = open_state(server.url)
    health = await state.check()
    assert (health.policy, health.max_memory) == ("allkeys-lru", 0)
    assert [word for warning in health.warnings for word in warning.split()[:1]] == [
        "maxmemory-policy",
        "maxmemory",
        "appendonly",
    ]


async def test_a_failed_write_of_redis_to_its_disk_is_a_warning(open_state: OpenState, start: Callable[..., Server]) -> None:
    server = start("--appendonly", "yes", "--maxmemory", "100mb")
    state = open_state(server.url)
    with server.client() as client:
        (server.folder / "dump.rdb").mkdir()  # the snapshot cannot replace a directory
        client.bgsave()
        while client.info("persistence")["rdb_bgsave_in_progress"]:
            await asyncio.sleep(0.01)
    [warning] = (await state.check()).warnings
    assert warning.startswith("The server's last write to its disk failed")


async def test_a_changed_policy_and_a_restart_of_redis_are_logged_once(
    open_state: OpenState, start: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = start("--appendonly", "yes", "--maxmemory", "100mb")
    state = open_state(server.url)
    for _ in range(2):
        await state.inspect()
    assert caplog.messages == []
    server.kill()
    await asyncio.to_thread(server.start)
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    for _ in range(2):
        await state.inspect()
    policy, restart = caplog.messages
    assert "stored data may be evicted" in policy
    assert restart.startswith("Redis was restarted or replaced")


async def test_a_user_without_permission_for_info_is_a_warning_and_not_an_error(open_state: OpenState, valkey: Server) -> None:
    with valkey.client() as admin:
        admin.execute_command("ACL", "SETUSER", "mute", "reset", "on", ">p", "+@all", "-info", "~*")
        url = f"redis://mute:p@127.0.0.1:{valkey.port}"
        state = open_state(url)
        health = await state.check()
        assert (health.server, health.errors, len(health.warnings)) == ("unknown", (), 1)
        assert not await state.nearly_full()
        with pytest.raises(StartupError, match=r"maxmemory-policy is unknown: permit INFO, or set redis\.allow_eviction\.$"):
            await check_fitness(state, make_settings(redis__url=url))
        await check_fitness(state, make_settings(redis__url=url, redis__allow_eviction=True))
        admin.execute_command("ACL", "DELUSER", "mute")
