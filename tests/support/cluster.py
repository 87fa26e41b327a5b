"""A Valkey cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.processes import free_port
from tests.support.servers import PATIENCE
from tests.support.valkey import SURVIVES_A_KILL, Server

if TYPE_CHECKING:
    import pytest

SLOTS = 16384


@contextmanager
def running_cluster(tmp_path_factory: pytest.TempPathFactory, size: int = 3) -> Iterator[list[Server]]:
    """Start nodes that share the slots equally."""
    nodes = [_start_node(tmp_path_factory, number) for number in range(size)]
    try:
        for number, node in enumerate(nodes):
            with node.client() as client:
                first, after = SLOTS * number // size, SLOTS * (number + 1) // size
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, after - 1)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        wait_until_whole(nodes)
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def _start_node(tmp_path_factory: pytest.TempPathFactory, number: int) -> Server:
    # On a busy machine, nodes that are late must not take each other for failed: they would refuse all commands.
    clustered = ["--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "15000"]
    node = Server(tmp_path_factory.mktemp(f"node{number}"), *clustered, *SURVIVES_A_KILL)
    node.start()
    return node


def wait_until_whole(nodes: list[Server]) -> None:
    deadline = time.monotonic() + PATIENCE
    greeted = 0.0
    while not all(is_whole(node, len(nodes)) for node in nodes):
        assert time.monotonic() < deadline
        if time.monotonic() - greeted > 2:  # on a busy machine, CLUSTER MEET may be abandoned
            greeted = time.monotonic()
            for node in nodes[1:]:
                with node.client() as client:
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, nodes[0].options[3])
        time.sleep(0.05)


def is_whole(node: Server, size: int) -> bool:
    with node.client() as client:
        info = raw_info(client)
    return b"cluster_state:ok" in info and b"cluster_known_nodes:%d" % size in info


def raw_info(client: Any) -> bytes:
    answer = client.execute_command("CLUSTER INFO")
    if isinstance(answer, dict):
        return "\n".join(f"{name}:{value}" for name, value in answer.items()).encode()
    return bytes(answer)


def cluster_url(nodes: list[Server]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
