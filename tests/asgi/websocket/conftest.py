"""A server with WebSockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.websocket import UVICORN

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.servers import Ours, Start


@pytest.fixture
def start_ws(start: Start) -> Start:
    """Start a server with WebSockets at either mount."""
    return lambda **settings: start(uvicorn=UVICORN, **settings)


@pytest.fixture
def ws(start_ws: Start) -> Ours:
    return start_ws()


@pytest.fixture
def patient_ws(start_ws: Start) -> Ours:
    """A server whose status grace is long enough for a busy machine."""
    return start_ws(upstream__status_grace=60)


@pytest.fixture
def ws_proxy(start_at: Callable[..., Ours]) -> Ours:
    """A server for tests that do not depend on the mount."""
    return start_at("proxy", uvicorn=UVICORN)
