"""What Redis refuses is found before the first request, and named with its remedy."""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from responses_mw.ids import RunIds
from responses_mw.state import StateUnavailable, open_embedded
from responses_mw.state.store import State
from responses_mw.state_opening import check_fitness
from tests.state.test_topologies import documented_acl
from tests.support.cluster import cluster_url
from tests.support.configured import make_settings
from tests.support.paths import ROOT
from tests.support.stored import ALICE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.valkey import OpenState, Plain, Server

ALL = "+@all -@dangerous +info ~rmw:* &rmw:*"
OWN_COMMANDS = re.compile(r"redis\.p?call\('([A-Z]+)'|(?:command\(|\(\()\"([A-Z]{3,})[ \"]")


@contextmanager
def user(server: Server, permissions: str, name: str = "app") -> Iterator[str]:
    """Create a user with `permissions`, and yield a URL for it."""
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", name, "reset", "on", ">p", *permissions.split())
        try:
            yield f"redis://{name}:p@127.0.0.1:{server.port}"
        finally:
            admin.execute_command("ACL", "DELUSER", name)


async def test_the_permissions_of_the_docs_are_sufficient_and_leave_no_key(
    open_state: OpenState, valkey: Server, server: Plain
) -> None:
    server.execute_command(*documented_acl("p"))
    state = open_state(f"redis://app:p@127.0.0.1:{valkey.port}")
    assert await state.ability.check() == ""
    assert server.dbsize() == 0


@pytest.mark.parametrize(
    ("permissions", "refused", "remedy"),
    [
        (f"{ALL} -@write", "SET, INCR, INCRBY and ", "add +@write"),
        (f"{ALL} -@read", "EXISTS, TYPE, PTTL and ", "add +@read"),
        (f"{ALL} -@scripting", "EVAL", "add +@scripting"),
        (f"{ALL} -evalsha", "EVALSHA", "add +@scripting"),
        (f"{ALL} -time", "TIME", "add +time"),
        (f"{ALL} -spublish", "SPUBLISH", "add +@pubsub"),
        (f"{ALL} -ssubscribe", "SSUBSCRIBE", "add +@pubsub"),
        (f"{ALL} -del", "DEL", "add +@write"),
        (f"{ALL} -xadd", "XADD", "add +@write"),
        (f"{ALL} resetkeys ~other:*", "EVAL", "add ~rmw:*"),
        (f"{ALL} resetkeys %R~rmw:*", "EVAL", "add ~rmw:*"),
        (f"{ALL} resetchannels", "SPUBLISH", "add &rmw:*"),
    ],
)
async def test_a_missing_permission_is_reported_with_its_remedy(
    open_state: OpenState, valkey: Server, caplog: pytest.LogCaptureFixture, permissions: str, refused: str, remedy: str
) -> None:
    with user(valkey, permissions) as url:
        state = open_state(url)
        await check_fitness(state, make_settings(redis__url=url, redis__allow_eviction=True))
        [logged] = [record.message for record in caplog.records if record.message.startswith("Redis refuses")]
        fault = await state.ability.check()
        assert fault.startswith(f"Redis refuses {refused}")
        assert f"({remedy})." in fault
        assert fault in logged


async def test_a_granted_permission_is_noticed_and_a_withdrawn_one_after_the_next_failure(
    open_state: OpenState, valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with user(valkey, f"{ALL} -hset") as url, valkey.client() as admin:
        state = open_state(url)
        assert "HSET" in await state.ability.check()
        admin.execute_command("ACL", "SETUSER", "app", "+hset")
        assert await state.ability.check() == ""
        assert caplog.messages[-1] == "Redis accepts all commands again"
        calls = admin.info("commandstats")["cmdstat_eval"]["calls"]
        assert await state.ability.check() == ""
        assert admin.info("commandstats")["cmdstat_eval"]["calls"] == calls  # the result is remembered
        admin.execute_command("ACL", "SETUSER", "app", "-hset")
        caplog.clear()
        with pytest.raises(StateUnavailable):
            await state.queue.reserve(RunIds().response, ALICE, 5)
        assert caplog.messages == ["Redis refuses HSET: its ACL user lacks the permission (add +@read and +@write)."]
        assert "HSET" in await state.ability.check()


async def test_a_renamed_command_is_reported(open_state: OpenState, start: Callable[..., Server]) -> None:
    for command in ("EVAL", "EVALSHA", "XADD", "SSUBSCRIBE"):
        state = open_state(start("--rename-command", command, "").url)
        expected = f"Redis refuses {command}: the server does not know it (do not rename or disable it)."
        assert await state.ability.check() == expected


async def test_too_few_replicas_are_a_refusal(open_state: OpenState, start: Callable[..., Server]) -> None:
    server = start("--min-replicas-to-write", "1")
    fault = await open_state(server.url).ability.check()
    assert fault.startswith("Redis refuses SET, INCR, INCRBY and ")
    assert "fewer replicas than min-replicas-to-write" in fault


async def test_a_full_redis_is_no_refusal(open_state: OpenState, start: Callable[..., Server]) -> None:
    state = open_state(start("--maxmemory", "1").url)
    assert await state.ability.check() == ""


async def test_every_primary_of_a_cluster_is_tested(open_state: OpenState, cluster: list[Server]) -> None:
    assert await open_state(cluster_url(cluster)).ability.check() == ""
    for node in cluster:
        with node.client() as admin:
            admin.execute_command("ACL", "SETUSER", "default", "-ssubscribe")
            try:
                assert "SSUBSCRIBE" in await open_state(cluster_url(cluster)).ability.check()
            finally:
                admin.execute_command("ACL", "SETUSER", "default", "+ssubscribe")


async def test_embedded_stores_refuse_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_embedded() as client:
        assert await State(client).ability.check() == ""
    monkeypatch.setattr("responses_mw.state.embedded.find_valkey", lambda: None)
    async with open_embedded() as client:
        assert await State(client).ability.check() == ""


def test_the_script_runs_every_command_that_the_package_uses() -> None:
    package = ROOT / "responses_mw"
    sources = [*package.glob("*/lua/*.lua"), *package.glob("state/*.py"), *package.glob("cache/*.py")]
    used = {name for source in sources for found in OWN_COMMANDS.findall(source.read_text()) for name in found if name}
    script = (package / "state" / "lua" / "ability.lua").read_text()
    tested = set(re.findall(r"\{'([A-Z]+)'", script))
    assert {"HSET", "XADD", "ZREM", "LRANGE"} <= used
    # The first two are tested too, every reply to PING is good, and only indexes of vector stores need COMMAND.
    assert used - tested == {"EVAL", "SSUBSCRIBE", "PING", "COMMAND"}
