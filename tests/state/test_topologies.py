"""The state on a Redis Cluster, with Sentinel, TLS, an ACL user and a unix socket, and in fakeredis."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import ssl
import subprocess
import time
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from benchmarks.processes import free_port
from responses_mw.ids import RunIds, new_tag
from responses_mw.state import (
    Batch,
    Chain,
    Client,
    Conversation,
    Missing,
    OverQuota,
    State,
    StateOptions,
    StateUnavailable,
    TakeReason,
    connect,
)
from responses_mw.state.blocks import StoredBlock
from responses_mw.state.files import File, new_file_id
from responses_mw.state.schema import stop_channel
from responses_mw.state.store_file_records import NewFile
from responses_mw.state.store_files import new_batch_id, new_generation
from responses_mw.state.store_keys import Range
from responses_mw.state.vector_stores import FileCounts, VectorStore, new_store_id
from tests.state.hearing import assert_heard, subscriber_tasks
from tests.state.test_failures import assert_failures_leave_nothing
from tests.support.cluster import SLOTS, cluster_url, running_cluster, wait_until_whole
from tests.support.ipv6 import needs_ipv6
from tests.support.paths import ROOT
from tests.support.stored import ALICE, BOB, address, continued, history, message, respond, texts, used
from tests.support.valkey import Server, wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from tests.support.valkey import OpenState


DOCS = (ROOT / "docs" / "operation" / "state.md").read_text()


def documented_acl(password: str, *, cluster: bool = False) -> list[str]:
    """Return the ACL command of the docs, for a cluster with the additional permissions that they name."""
    (line,) = [line.strip() for line in DOCS.splitlines() if line.strip().startswith("ACL SETUSER")]
    of_cluster = re.search(r"also needs (.*?)\.", " ".join(DOCS.split()))
    assert of_cluster is not None
    also = re.findall(r"`(\+[^`]+)`", of_cluster[1]) if cluster else []
    return [*line.replace("responses-mw", "app").replace(">password", f"reset on >{password}").split(), *also]


async def assert_works(state: State) -> None:
    """Assert that responses can be forked and deleted, and conversations extended, in many slots."""
    for number in range(12):
        root = await respond(state, Chain.new(), f"root {number}")
        left, right = await continued(state, root, "left"), await continued(state, root, "right")
        assert await history(state, left) == [f"root {number}", f"root {number}!", "left", "left!"]
        assert texts((await state.responses.input_items(right, ALICE, order="asc")).items)[2:] == ["right"]
        for response in (root, left):
            await state.responses.delete(response, ALICE)
            with pytest.raises(Missing):
                await state.responses.get(response, ALICE)
        with pytest.raises(Missing):
            await state.responses.get(right, BOB)
        await assert_conversation_works(state, number)
    for owner in ("a1", "b2", "c3"):
        await assert_vector_stores_work(state, owner)
    for owners in (await state.vector_stores.owners(), await state.files.owners()):  # other tests may use the same server
        assert {"a1", "b2", "c3"} <= set(owners)


async def assert_conversation_works(state: State, number: int) -> None:
    tag = new_tag()
    conversation = Conversation(f"conv_{tag}", 1, {"n": str(number)})
    await state.conversations.create(conversation, [message(f"msg_{tag}{tag}0", "user", "hello")], ALICE)
    response = await respond(state, await state.conversations.chain(conversation.id, ALICE), "in it")
    listed = (await state.conversations.items(conversation.id, ALICE, order="asc")).items
    assert texts(listed) == ["hello", "in it", "in it!"]
    assert list(await state.responses.resolve([item["id"] for item in listed], ALICE)) == [i["id"] for i in listed]
    assert await history(state, await continued(state, response, "on")) == [*texts(listed), "on", "on!"]
    await state.conversations.delete_item(conversation.id, listed[0]["id"], ALICE)
    assert await state.conversations.update(conversation.id, {}, ALICE) == Conversation(conversation.id, 1, {})
    await state.conversations.delete(conversation.id, ALICE)


async def assert_vector_stores_work(state: State, owner: str) -> None:
    """Assert that files can be added to a vector store and to a batch, published, read, described, cancelled and removed."""
    store, batch, stored = VectorStore(new_store_id(), "handbook", 1, 1), new_batch_id(), state.store_files
    await state.vector_stores.create(store, owner)
    ids = [new_file_id() for _ in range(3)]
    for file_id in ids:
        await state.files.create(File(file_id, "a.txt", "assistants", 1, 1, None, ""), owner)
    await stored.attach(store.id, owner, [NewFile(one, "a.txt", {}, {}) for one in ids], new_generation(), batch)
    files = [await stored.get(store.id, owner, file_id) for file_id in ids]
    assert await stored.publish(files[0], owner, StoredBlock("builtin", 2, ["a"], [0], bytes(4)))
    assert await stored.fail(files[1], owner, "server_error", "x")
    await stored.cancel(store.id, owner, batch)
    assert (await stored.batch(store.id, owner, batch)).counts == FileCounts(0, 1, 1, 1)
    await stored.describe(store.id, owner, ids[0], {"a": 1})
    page = await stored.page(store.id, owner, Range(order="asc"), "completed")
    assert [(file.id, file.attributes) for file in page.files] == [(ids[0], {"a": 1})]
    assert (await stored.read_block(page.files[0])).texts == ["a"]
    await stored.begin_again(store.id, owner, page.files, new_generation())
    for file_id in ids[:2]:
        await stored.detach_everywhere(file_id, owner)
    await state.vector_stores.update(store.id, owner, {"name": "rules"})
    found = await state.vector_stores.get(store.id, owner)
    assert (found.name, found.counts, found.size) == ("rules", FileCounts(cancelled=1), 0)
    assert await state.vector_stores.expire(store.id, owner) == 0
    await state.store_erasures.schedule(await state.store_erasures.due(10), None)


async def assert_jobs_work(state: State) -> None:
    """Assert that background responses can be queued, run, logged, announced, stopped and stored, in many slots."""
    for _ in range(6):
        ids = RunIds()
        document = {"id": ids.response, "status": "queued", "background": True, "output": []}
        start = Batch(0, 1, b"data: 0\n\ndata: 1\n\n")
        events, told = await asyncio.gather(
            heard(state, address(ids.response).events, partial(run_job, state, document, start)),
            heard(state, stop_channel("w"), partial(state.jobs.tell, "w", ids.response)),
        )
        assert b"data: 2" in events
        assert told == ids.response.encode()
        assert (await state.responses.get(ids.response, ALICE)).document["status"] == "completed"


async def run_job(state: State, document: dict[str, Any], start: Batch) -> None:
    response_id = document["id"]
    await state.queue.reserve(response_id, ALICE, 5)
    await state.jobs.create(document, {"model": "m"}, [], ALICE, "sealed", start)
    await state.queue.ready(response_id)
    assert await state.queue.claim(5, sweep=True) == response_id
    await state.queue.renew([response_id], 5)
    job = (await state.jobs.take(response_id, TakeReason.RUN, worker="w", lease=5, max_attempts=2)).job
    assert job is not None
    assert await state.jobs.append([(response_id, job.token, Batch(2, 2, b"data: 2\n\n"))], 5) == [True]
    assert await state.jobs.renew([(response_id, job.token)], 5) == [True]
    assert [batch.last for batch in await state.jobs.log(response_id, -1)] == [1, 2]
    done, last = {**document, "status": "completed"}, Batch(3, 3, b"data: 3\n\n", final=True)
    await state.responses.commit(Chain.new(), done, [], ALICE, job.token, last=last)
    await state.queue.drop(response_id)


async def heard(state: State, channel: str, act: Callable[[], Coroutine[Any, Any, None]]) -> bytes:
    """Subscribe to the channel, run `act`, and return the message that it causes."""
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    with state.wakeups.on(channel, messages.put_nowait):
        async with asyncio.timeout(60):
            assert await messages.get() == b""  # it is subscribed
            async with asyncio.TaskGroup() as group:
                group.create_task(act())
                found = b""
                while b"data: 2" not in found and not found.startswith(b"resp_"):
                    found = await messages.get()
            return found


# -- cluster -------------------------------------------------------------------------------------------------------------


async def test_everything_works_in_a_cluster_of_three_nodes(open_state: OpenState, cluster: list[Server]) -> None:
    state = open_state(cluster_url(cluster))
    await assert_works(state)


async def test_failed_scripts_in_a_cluster_leave_nothing_to_the_garbage_collector(
    open_state: OpenState, cluster: list[Server]
) -> None:
    await assert_failures_leave_nothing(open_state(cluster_url(cluster)).client)


async def test_storage_quotas_work_in_a_cluster(open_state: OpenState, cluster: list[Server]) -> None:
    state = open_state(cluster_url(cluster), owner_bytes=10**9)
    before = await used(state)
    response = await respond(state, Chain.new(), "x" * 10_000)
    on = await continued(state, response, "y" * 10_000)
    assert await used(state) > before + 40_000
    for one in (response, on):
        await state.responses.delete(one, ALICE)
    assert await used(state) < before + 1_000
    await assert_works(state)
    await assert_jobs_work(state)
    strict = open_state(cluster_url(cluster), owner_bytes=1)
    with pytest.raises(OverQuota):
        await respond(strict, Chain.new(), "x")


async def test_the_keys_of_a_history_share_a_slot_and_histories_spread_over_all_nodes(
    open_state: OpenState, cluster: list[Server]
) -> None:
    state = open_state(cluster_url(cluster))
    for number in range(30):
        root = await respond(state, Chain.new(), str(number))
        await continued(state, root, "left")
        await continued(state, root, "right")
    slots: dict[str, set[int]] = {}
    for node in cluster:
        with node.client() as client:
            keys = client.keys("*")
            assert len(keys) > 0
            for key in keys:
                slots.setdefault(key.decode().split("}")[0], set()).add(key_slot(key))
    assert all(len(found) == 1 for found in slots.values())


async def test_the_health_of_a_cluster_is_reported(open_state: OpenState, cluster: list[Server]) -> None:
    state = open_state(cluster_url(cluster))
    health = await state.check()
    assert (health.policy, health.errors) == ("noeviction", ())
    assert not await state.nearly_full()


async def test_the_health_of_a_cluster_with_one_node_is_reported(
    open_state: OpenState, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with running_cluster(tmp_path_factory, size=1) as nodes:
        state = open_state(cluster_url(nodes))
        await respond(state, Chain.new(), "x")
        health = await state.check()
        assert (health.policy, health.errors) == ("noeviction", ())
        assert health.server.startswith("Valkey ")
        assert not await state.nearly_full()


@needs_ipv6
async def test_cluster_nodes_can_have_ipv6_addresses(open_state: OpenState, start: Callable[..., Server]) -> None:
    node = start("--bind", "127.0.0.1", "::1", "--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with node.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
    state = open_state(f"redis+cluster://[::1]:{free_port()},[::1]:{node.port}", patience=20)
    await respond(state, Chain.new(), "x")


async def test_the_documented_acl_user_has_the_permissions_needed_in_a_cluster(
    open_state: OpenState, cluster: list[Server]
) -> None:
    for node in cluster:
        with node.client() as admin:
            admin.execute_command(*documented_acl("p", cluster=True))
    own = open_state(cluster_url(cluster).replace("//", "//app:p@"))
    await assert_works(own)
    await assert_jobs_work(own)
    assert (await own.check()).errors == ()


async def test_a_cluster_node_with_a_plain_url_is_an_error_naming_the_required_scheme(
    open_state: OpenState, cluster: list[Server]
) -> None:
    state = open_state(cluster[0].url)
    errors = (await state.check()).errors
    assert errors == ("The server is a node of a cluster: its URL must begin with redis+cluster://.",)
    answers = await asyncio.gather(*(respond(state, Chain.new(), "x") for _ in range(30)), return_exceptions=True)
    refused = [answer.reason for answer in answers if isinstance(answer, StateUnavailable)]
    assert set(refused) == {"it is a cluster (use redis+cluster://)"}


async def test_a_cluster_recovers_when_a_killed_node_restarts(open_state: OpenState, cluster: list[Server]) -> None:
    state = open_state(cluster_url(cluster), timeout=1, patience=0)
    responses = [await respond(state, Chain.new(), str(number)) for number in range(20)]
    leaving = State(connect(cluster_url(cluster), timeout=1))
    for known in responses:
        await leaving.responses.get(known, ALICE)
    cluster[1].kill()
    await asyncio.gather(*(leaving.responses.get(known, ALICE) for known in responses), return_exceptions=True)
    answers = await asyncio.gather(*(state.responses.get(known, ALICE) for known in responses), return_exceptions=True)
    assert any(isinstance(answer, StateUnavailable) for answer in answers)
    assert not any(isinstance(answer, Exception) for answer in answers if not isinstance(answer, StateUnavailable))
    await leaving.aclose()
    del leaving
    gc.collect()  # to report connections that were left open
    cluster[1].start()
    await asyncio.to_thread(wait_until_whole, cluster)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(StateUnavailable):
            for known in responses:
                assert len(await history(state, await continued(state, known, "on"))) == 4
            break
        await asyncio.sleep(0.1)
    else:
        pytest.fail("the cluster was not served again")


@pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"use_uvloop": loop}) for loop in (False, True)], ids=["asyncio", "uvloop"]
)
async def test_commands_on_a_connection_closed_by_another_task_are_unavailable(cluster: list[Server]) -> None:
    client = connect(cluster_url(cluster))
    failures: list[BaseException] = []
    for steps in range(60):
        asking = [asyncio.create_task(client.command("GET", f"key {number}")) for number in range(50)]
        for _ in range(steps % 20):
            await asyncio.sleep(0)
        await client.redis.aclose()  # like redis-py when a node fails
        replies = await asyncio.gather(*asking, return_exceptions=True)
        failures += [reply for reply in replies if isinstance(reply, BaseException)]
    await client.aclose()
    assert {type(failure) for failure in failures} <= {StateUnavailable}


async def test_a_bug_in_a_round_trip_is_not_reported_as_an_unavailable_redis(cluster: list[Server]) -> None:
    async def ask() -> None:
        raise AttributeError

    client = connect(cluster_url(cluster))
    with pytest.raises(AttributeError):
        await client.round_trip(ask, "GET")
    assert client.failures == 0
    await client.aclose()


async def test_requests_wait_for_a_free_connection_in_a_cluster(open_state: OpenState, cluster: list[Server]) -> None:
    state = open_state(cluster_url(cluster), max_connections=2)
    await asyncio.gather(*(respond(state, Chain.new(), str(number)) for number in range(60)))


async def test_a_subscription_follows_its_slot_to_another_node(open_state: OpenState, cluster: list[Server]) -> None:
    state = open_state(cluster_url(cluster))
    channel, other = stop_channel("moving"), stop_channel("staying")
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    slot = key_slot(channel.encode())
    home = slot * len(cluster) // SLOTS
    with state.wakeups.on(channel, messages.put_nowait), state.wakeups.on(other, lambda _: None):
        await assert_heard(state, messages, "moving", "resp_0")
        for number in (home + 1, home + 2, home):
            await asyncio.to_thread(give_slot, cluster, slot, cluster[number % len(cluster)])
            await assert_heard(state, messages, "moving", f"resp_{number}")
        assert subscriber_tasks() <= 2  # none for earlier nodes of the slot


async def test_a_new_subscription_finds_the_new_node_of_a_moved_slot(open_state: OpenState, cluster: list[Server]) -> None:
    state = open_state(cluster_url(cluster))
    channel = stop_channel("moved")
    slot = key_slot(channel.encode())
    home = slot * len(cluster) // SLOTS
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    with state.wakeups.on(channel, messages.put_nowait):  # starts a subscriber for the node
        await assert_heard(state, messages, "moved", "resp_0")
    await asyncio.to_thread(give_slot, cluster, slot, cluster[(home + 1) % len(cluster)])
    with state.wakeups.on(channel, messages.put_nowait):
        await assert_heard(state, messages, "moved", "resp_1")
    await asyncio.to_thread(give_slot, cluster, slot, cluster[home])


def give_slot(nodes: list[Server], slot: int, owner: Server) -> None:
    """Assign an empty slot to another node."""
    with owner.client() as client:
        name = client.execute_command("CLUSTER", "MYID")
        source = next(parts[0] for parts in shards(client) if any(holds(part, slot) for part in parts[8:]))
        client.execute_command(
            "CLUSTER", "SETSLOT", slot, "IMPORTING", source
        )  # otherwise, its epoch is not newer, and it may lose the slot again
    for node in sorted(nodes, key=lambda node: node is not owner):
        with node.client() as client:
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", name)


def shards(client: Any) -> list[list[str]]:
    """Return the lines of CLUSTER NODES, each split into words."""
    nodes = client.execute_command("CLUSTER", "NODES")
    return [line.split() for line in nodes.decode().splitlines()]


def holds(slots: str, slot: int) -> bool:
    """Return whether a range of slots, such as `5461-10922`, includes the slot."""
    first, _, last = slots.partition("-")
    return first.isdigit() and int(first) <= slot <= int(last or first)


# -- Sentinel ------------------------------------------------------------------------------------------------------------


async def test_sentinel_provides_the_new_master_after_a_failover(
    open_state: OpenState, start: Callable[..., Server], tmp_path: Path
) -> None:
    master = start()
    replica = start("--replicaof", "127.0.0.1", str(master.port))
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"sentinel monitor main 127.0.0.1 {master.port} 1\n"
        "sentinel down-after-milliseconds main 400\nsentinel failover-timeout main 3000\n"
    )
    sentinel = Sentinel(tmp_path, config)
    try:
        sentinel.start()
        await asyncio.to_thread(wait_until_replicating, replica, sentinel)
        url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}/main/0"
        state = open_state(url, timeout=1, patience=20)
        await assert_works(state)
        await assert_jobs_work(state)
        known = await respond(state, Chain.new(), "before")
        with master.client() as client:
            assert client.wait(1, 5000) == 1
        messages: asyncio.Queue[bytes] = asyncio.Queue()
        with state.wakeups.on(stop_channel("w"), messages.put_nowait):
            await assert_heard(state, messages, "w", "resp_0")
            master.kill()
            after = await respond(state, await chain_when_back(state, known), "after")
            await assert_heard(state, messages, "w", "resp_1")
        assert await history(state, after) == ["before", "before!", "after", "after!"]
    finally:
        sentinel.kill()


async def test_a_sentinel_without_a_port_has_the_default_port() -> None:
    client = connect("redis+sentinel://a,b:1/main")
    assert isinstance(client.redis, Redis)
    pool: Any = client.redis.connection_pool
    asked = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"]) for each in asked] == [("a", 26379), ("b", 1)]
    await client.aclose()


async def chain_when_back(state: State, response: str) -> Chain:
    deadline = time.monotonic() + 60
    while True:
        try:
            return await state.responses.chain(response, ALICE)
        except StateUnavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


class Sentinel(Server):
    """The same binary, started as a Sentinel."""

    def __init__(self, folder: Path, config: Path) -> None:
        super().__init__(folder)
        self.config = config

    def start(self) -> None:
        command = [self.binary, str(self.config), "--sentinel", "--port", str(self.port), "--bind", "127.0.0.1"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=self.folder)
        self.wait_until_ready()


def wait_until_replicating(replica: Server, sentinel: Server) -> None:
    deadline = time.monotonic() + 60
    with replica.client() as client, sentinel.client() as asked:
        while client.info("replication")["master_link_status"] != "up" or asked.sentinel_masters()["main"]["num-slaves"] < 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)


# -- TLS, ACL, sockets and fakeredis ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key in the same file."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    subprocess.run([*command, "-keyout", str(path), "-out", f"{path}.crt"], check=True, capture_output=True)
    path.write_text(path.read_text() + path.with_suffix(".pem.crt").read_text())
    return path


async def test_everything_works_over_tls(open_state: OpenState, valkey: Server, certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    async with wire(valkey.port, context) as line:
        state = open_state(f"{line.url}?ssl_ca_certs={certificate}")
        await assert_works(state)


async def test_sentinels_and_the_master_can_use_certificates_of_a_private_authority(
    open_state: OpenState, valkey: Server, certificate: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    async with wire(valkey.port, context) as line, sentinel_of(line.url, context) as port:
        state = open_state(f"rediss+sentinel://127.0.0.1:{port}/main/0?ssl_ca_certs={certificate}", patience=0)
        await assert_works(state)
        await assert_jobs_work(state)


@asynccontextmanager
async def sentinel_of(master_url: str, context: ssl.SSLContext) -> AsyncIterator[int]:
    """Run a fake Sentinel with TLS, and return its port. The Valkey of the tests has no TLS, so a real one could not monitor it."""
    host, port = str(urlsplit(master_url).hostname), str(urlsplit(master_url).port)
    facts = ["name", "main", "ip", host, "port", port, "flags", "master", "num-other-sentinels", "0"]
    masters = f"*1\r\n*{len(facts)}\r\n" + "".join(f"${len(fact)}\r\n{fact}\r\n" for fact in facts)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            words = [await reader.readline() for _ in range(2 * int(head[1:]))][1::2]
            writer.write(masters.encode() if words[0] == b"SENTINEL\r\n" else b"+OK\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_an_untrusted_certificate_is_rejected(open_state: OpenState, valkey: Server, certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    async with wire(valkey.port, context) as line:
        state = open_state(line.url, patience=0)
        with pytest.raises(StateUnavailable):
            await respond(state, Chain.new(), "x")


async def test_the_documented_acl_user_has_the_permissions_needed(open_state: OpenState, valkey: Server, state: State) -> None:
    del state
    with valkey.client() as admin:
        admin.execute_command(*documented_acl("p@ss"))
        own = open_state(f"redis://app:p%40ss@127.0.0.1:{valkey.port}/0")
        await assert_works(own)
        await assert_jobs_work(own)
        assert (await own.check()).errors == ()
        admin.execute_command("ACL", "DELUSER", "app")


async def test_wrong_credentials_are_unavailable_with_that_reason(open_state: OpenState, valkey: Server) -> None:
    state = open_state(f"redis://nobody:wrong@127.0.0.1:{valkey.port}", patience=10)
    with pytest.raises(StateUnavailable) as refused:
        await respond(state, Chain.new(), "x")
    assert refused.value.reason == "it refused our credentials"


async def test_everything_works_over_a_unix_socket(open_state: OpenState, start: Callable[..., Server], tmp_path: Path) -> None:
    start("--unixsocket", str(tmp_path / "socket"))
    state = open_state(f"unix://{tmp_path / 'socket'}")
    await assert_works(state)


async def test_everything_works_in_fakeredis() -> None:
    from fakeredis import FakeAsyncRedis

    state = State(Client(FakeAsyncRedis(), timeout=2, max_connections=10), StateOptions(owner_bytes=10**9))
    await assert_works(state)
    assert await used(state) > 0
    assert (await state.check()).server == "unknown"
    await state.aclose()


@pytest.mark.parametrize("url", ["redis+ring://127.0.0.1", "http://127.0.0.1", "redis+sentinel://127.0.0.1:26379", "nonsense"])
def test_an_invalid_url_is_refused_when_it_is_parsed(url: str) -> None:
    with pytest.raises(ValueError, match="redis"):
        connect(url)


async def test_only_calls_to_a_cluster_node_that_hangs_fail_and_they_fail_immediately(
    open_state: OpenState, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with running_cluster(tmp_path_factory) as nodes:
        for node in nodes:
            with node.client() as client:
                client.config_set("cluster-require-full-coverage", "no")
        state = open_state(cluster_url(nodes), timeout=2.0)
        responses = [await respond(state, Chain.new(), str(number)) for number in range(20)]
        hung = nodes[0]
        there = {one: state.client.node_of(address(one).record.encode()).endswith(f":{hung.port}") for one in responses}
        assert set(there.values()) == {True, False}
        hung.signal(signal.SIGSTOP)
        on_hung = next(one for one in responses if there[one])
        with pytest.raises(StateUnavailable):
            await state.responses.get(on_hung, ALICE)
        async with asyncio.timeout(60):
            for one in responses:
                while not there[one] and not await is_served(state, one):
                    """The client looks up the nodes, perhaps at the one that hangs."""
        before = time.monotonic()
        assert [await is_served(state, one) for one in responses] == [not there[one] for one in responses]
        together = [[("EXISTS", address(one).record), ("EXISTS", address(one).tombstone)] for one in responses if there[one]]
        assert not any([await is_answered(state.client.pipeline(commands)) for commands in together])
        assert time.monotonic() - before < 10  # instead of 2 s for each call
        hung.signal(signal.SIGCONT)
        async with asyncio.timeout(60):
            while not await is_served(state, on_hung):
                await asyncio.sleep(0.05)


async def is_served(state: State, response_id: str) -> bool:
    return await is_answered(state.responses.get(response_id, ALICE))


async def is_answered(asking: Coroutine[Any, Any, object]) -> bool:
    try:
        await asking
    except StateUnavailable:
        return False
    return True


# -- reasons --------------------------------------------------------------------------------------------------------------


async def reason(url: str) -> str:
    state = State(connect(url, timeout=20.0))
    try:
        with pytest.raises(StateUnavailable) as error:
            await state.check()
    finally:
        await state.aclose()
    return error.value.reason


async def test_wrong_credentials_and_kinds_of_servers_are_named(start: Callable[..., Server], cluster: list[Server]) -> None:
    address = cluster_url(cluster[:1]).removeprefix("redis+cluster://")
    assert await reason(f"redis+cluster://:wrong@{address}") == "it refused our credentials"
    single = start()
    assert await reason(f"redis+cluster://127.0.0.1:{single.port}") == "it is not a cluster (use redis://)"
    alone = start("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    assert await reason(f"redis+cluster://127.0.0.1:{alone.port}") == "the cluster does not serve all slots"
    assert await reason(f"{single.url}/99") == "it has no database with the number in redis.url"


async def test_the_fault_of_a_sentinel_is_reported(start: Callable[..., Server], tmp_path: Path) -> None:
    master, sentinel = start(), Server(tmp_path)
    config = tmp_path / "sentinel.conf"
    config.write_text(f"port {sentinel.port}\nsentinel monitor main 127.0.0.1 {master.port} 1\nrequirepass secret\n")
    sentinel.run(str(config), "--sentinel")
    try:
        await asyncio.to_thread(sentinel.wait_until_listening)
        address = f"127.0.0.1:{sentinel.port}"
        for query in ("", "?sentinel_password=wrong"):
            assert await reason(f"redis+sentinel://{address}/main/0{query}") == "the Sentinels refused our credentials"
        unknown = await reason(f"redis+sentinel://{address}/other/0?sentinel_password=secret")
        assert unknown == "the Sentinels have no healthy master of this name"
        assert await reason("redis+sentinel://127.0.0.1:1/main/0") == "no Sentinel can be reached"
    finally:
        sentinel.kill()


@pytest.mark.parametrize(
    ("option", "fault"),
    [
        ("ssl_ca_certs=/missing/ca.pem", "the CA file /missing/ca.pem cannot be read: No such file or directory"),
        ("ssl_ca_certs=/etc/passwd", "the CA file /etc/passwd is not a valid PEM file"),
        (
            "ssl_certfile=/missing/cert.pem",
            "the client certificate /missing/cert.pem cannot be read: No such file or directory",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["rediss://127.0.0.1/", "rediss+cluster://127.0.0.1/", "rediss+sentinel://127.0.0.1/main/0"])
def test_an_unreadable_tls_file_is_reported_at_once(kind: str, option: str, fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        connect(f"{kind}?{option}")
