"""The embedded store, and what `serve --check` reports about the configured one."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.asgi.stored.test_conversations import asked, respond_in, texts_of
from tests.asgi.stored.test_responses import items_before, respond
from tests.support import oracle
from tests.support.cluster import cluster_url
from tests.support.configured import flag
from tests.support.echo import said, text_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.asgi.stored.conftest import StartProcess, StartServer
    from tests.support.echo import Echo
    from tests.support.forkserver import ForkServer
    from tests.support.servers import Start
    from tests.support.valkey import Server

    Check = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def check(fork_server: ForkServer, upstream_url: str) -> Check:
    """Run `responses-mw serve --check` with flags and settings."""

    def check(*flags: str, **settings: str) -> subprocess.CompletedProcess[str]:
        flags += tuple(part for name, value in settings.items() for part in (flag(name), value))
        return fork_server.run("serve", "--check", "--port=0", "--upstream", upstream_url, *flags)

    return check


# -- embedded ------------------------------------------------------------------------------------------------------------


async def test_without_a_redis_url_the_server_starts_an_embedded_store(start_at: Start, upstream: Echo) -> None:
    ours = start_at("proxy", redis__url=None)
    first = await respond(ours.client, "one")
    await respond(ours.client, "two", first.id)
    assert said(upstream.messages) == ["one", "one!", "two"]
    conversation = await ours.client.conversations.create(items=asked("zero"))
    await respond_in(ours.client, "one", conversation.id)
    assert await texts_of(ours.client, conversation.id) == ["zero", "one", "one!"]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_a_data_directory_preserves_the_state_across_restarts(
    start_process: StartProcess,
    upstream_url: str,
    upstream: Echo,
    tmp_path: Path,
    end: signal.Signals,
) -> None:
    ours, process = start_process(upstream_url, redis__data_dir=str(tmp_path / "data"))
    first = await oracle.whole(ours, input="one")
    conversation = (await ours.http.post("/v1/conversations", json={"items": asked("zero")})).json()["id"]
    await ours.aclose()
    os.kill(process.pid, end)
    process.wait(60)
    ours, _ = start_process(upstream_url, redis__data_dir=str(tmp_path / "data"))
    assert (await ours.http.get(f"/v1/responses/{first['id']}")).json() == first
    await oracle.whole(ours, input="two", previous_response_id=first["id"])
    assert said(upstream.messages) == ["one", "one!", "two"]
    assert (await ours.http.get(f"/v1/conversations/{conversation}/items")).json()["data"][0]["content"][0]["text"] == "zero"
    await ours.aclose()


def test_a_data_directory_in_use_is_refused(
    start_process: StartProcess, upstream_url: str, check: Check, tmp_path: Path
) -> None:
    start_process(upstream_url, redis__data_dir=str(tmp_path))
    checked = check(redis__data_dir=str(tmp_path))
    assert checked.returncode == 1
    assert "in use" in checked.stderr
    assert "Traceback" not in checked.stderr


# -- readiness -----------------------------------------------------------------------------------------------------------


def test_check_reports_the_store_and_its_missing_persistence(start_valkey: StartServer, check: Check) -> None:
    valkey = start_valkey("--maxmemory", "100mb")
    checked = check(redis__url=valkey.url)
    assert checked.returncode == 0, checked.stderr
    assert "state:    Valkey" in checked.stdout
    assert "noeviction" in checked.stdout
    assert "of 104857600 bytes used" in checked.stdout
    assert "appendonly is off" in checked.stdout


def test_check_reports_an_embedded_store(check: Check) -> None:
    checked = check()
    assert checked.returncode == 0, checked.stderr
    assert "(embedded)" in checked.stdout


def test_check_fails_if_the_store_is_unavailable(start_valkey: StartServer, check: Check) -> None:
    valkey = start_valkey()
    valkey.kill()
    checked = check(redis__url=valkey.url)
    assert checked.returncode == 1
    assert "state:    The state store is unavailable" in checked.stderr


def test_a_store_with_an_eviction_policy_is_refused_unless_allow_eviction_is_set(
    start_valkey: StartServer, fork_server: ForkServer, upstream_url: str, check: Check
) -> None:
    valkey = start_valkey("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    refused = check(redis__url=valkey.url)
    assert refused.returncode == 1
    assert "allkeys-lru" in refused.stderr
    assert "allow_eviction" in refused.stderr
    served = fork_server.run("serve", "--upstream", upstream_url, "--port", "0", "--redis", valkey.url)
    assert served.returncode != 0
    assert "allkeys-lru" in served.stderr
    allowed = check("--redis.allow-eviction", redis__url=valkey.url)
    assert allowed.returncode == 0, allowed.stderr


# -- cluster -------------------------------------------------------------------------------------------------------------


async def test_two_replicas_share_a_cluster_of_three_nodes(
    start_at: Start,
    cluster: list[Server],
    upstream: Echo,
) -> None:
    url = cluster_url(cluster)
    a, b = start_at("proxy", redis__url=url).client, start_at("mounted", redis__url=url).client
    for number in range(12):
        root = await respond(a, f"root {number}")
        left, right = await respond(b, "left", root.id), await respond(a, "right", root.id)
        await b.responses.delete(root.id)
        await respond(a, "leaf", left.id)
        assert said(upstream.messages) == [f"root {number}", f"root {number}!", "left", "left!", "leaf"]
        assert await items_before(b, right.id) == [f"root {number}", f"root {number}!", "right"]
        conversation = await a.conversations.create(items=asked("zero"))
        await respond_in(b, "one", conversation.id)
        assert await texts_of(a, conversation.id) == ["zero", "one", "one!"]
    nodes = []
    for node in cluster:
        with node.client() as client:
            nodes.append(client.dbsize())
    assert all(nodes)


async def test_every_route_is_served_in_a_cluster(
    start_at: Start,
    cluster: list[Server],
    upstream: Echo,
) -> None:
    url = cluster_url(cluster)
    keys = ("k" * 32,)
    a, b = (start_at(how, redis__url=url, auth__secret_keys=keys).client for how in ("proxy", "mounted"))
    for _ in range(4):
        conversation = await a.conversations.create(items=asked("zero"), metadata={"k": "v"})
        assert (await b.conversations.update(conversation.id, metadata={"k": "w"})).metadata == {"k": "w"}
        (one,) = (await b.conversations.items.create(conversation.id, items=asked("one"))).data
        assert one.id is not None
        assert await a.conversations.items.retrieve(one.id, conversation_id=conversation.id) == one
        reference: list[Any] = [{"type": "item_reference", "id": one.id}]
        queued = await a.responses.create(model="tiny", input=reference, background=True)
        async with await b.responses.retrieve(queued.id, stream=True) as stream:
            assert [event.type async for event in stream][-1] == "response.completed"
        assert text_of((await a.responses.retrieve(queued.id)).output[0]) == "one!"
        assert (await b.responses.cancel(queued.id)).status == "completed"
        assert (await b.responses.input_tokens.count(model="tiny", input="x", previous_response_id=queued.id)).input_tokens > 0
        await b.conversations.items.delete(one.id, conversation_id=conversation.id)
        assert await texts_of(a, conversation.id) == ["zero"]
        await a.conversations.delete(conversation.id)
        await b.responses.delete(queued.id)
        with pytest.raises(openai.NotFoundError):
            await a.responses.retrieve(queued.id)
