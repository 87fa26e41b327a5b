"""Fixtures shared by the tests of tools."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest


@pytest.fixture
def free_url() -> Iterator[str]:
    """A URL on which no server listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/mcp"
