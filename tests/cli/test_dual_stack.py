"""`--host ::` accepts IPv4 and IPv6, with one process and several, and on the admin port."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import httpx
import pytest

from benchmarks.processes import free_port
from tests.support.ipv6 import needs_ipv6
from tests.support.servers import PATIENCE

if TYPE_CHECKING:
    from tests.cli.conftest import Launch


@needs_ipv6
@pytest.mark.parametrize("processes", [1, 2])
def test_all_addresses_of_both_families_are_served(launch: Launch, redis_url: str, processes: int) -> None:
    admin = free_port()
    server = launch(
        "serve",
        "--upstream=http://127.0.0.1:1",
        "--host=::",
        "--port=0",
        f"--processes={processes}",
        "--server.admin-host=::",
        f"--server.admin-port={admin}",
        f"--redis={redis_url}",
    )
    port = server.wait_for(r"listens on http://\[::\]:(\d+)/v1\n")[1]
    for host in ("127.0.0.1", "[::1]"):
        with httpx.Client(trust_env=False, timeout=PATIENCE) as http:
            assert http.get(f"http://{host}:{port}/v1/responses").status_code == 405
            assert http.get(f"http://{host}:{admin}/livez").status_code == 200
    assert server.end() == 0


@needs_ipv6
def test_a_port_in_use_is_an_error_without_a_traceback(launch: Launch, redis_url: str) -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        server = launch("serve", "--upstream=http://127.0.0.1:1", "--host=::", f"--port={port}", f"--redis={redis_url}")
        assert server.process.wait(PATIENCE) == 3
    assert f":::{port} cannot be opened: Address already in use" in server.output
    assert "Traceback" not in server.output
