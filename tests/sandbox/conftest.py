"""Fixtures: sandboxes for one test and sandboxes shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from tests.support.forkserver import ForkServer
from tests.support.sandbox import Launch, Sandbox, launcher, levels


@pytest.fixture(scope="package")
def sandbox_fork_server() -> Iterator[ForkServer]:
    with ForkServer("responses_mw.cli", "responses_mw.sandbox.app", "uvicorn") as server:
        yield server


@pytest.fixture
def launch(sandbox_fork_server: ForkServer) -> Iterator[Launch]:
    """Return a function that starts a sandbox at a level, with settings."""
    with ExitStack() as stack:
        yield launcher(stack, sandbox_fork_server)


@pytest.fixture(scope="package")
def shared() -> Iterator[Launch]:
    """Return a function that starts a sandbox, or returns it if it runs. All tests share it and must not damage it."""
    with ExitStack() as stack:
        yield cache(launcher(stack))


@pytest.fixture(scope="package", params=levels())
def sandbox(request: pytest.FixtureRequest, shared: Launch) -> Sandbox:
    """A sandbox at each level."""
    return shared(request.param)


@pytest.fixture(scope="package", params=levels())
def hasty(request: pytest.FixtureRequest, shared: Launch) -> Sandbox:
    """A sandbox with a call timeout of three seconds, for calls that do not end by themselves."""
    return shared(request.param, call_timeout=3)


@pytest.fixture(scope="package")
def restricted(shared: Launch) -> Sandbox:
    """A sandbox as in the default of the chart: containers share the user of the service, without namespaces."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to take rights away")
    return shared("restricted")


@pytest.fixture(scope="package")
def best(shared: Launch) -> Sandbox:
    """A sandbox at the strongest level, for tests that do not depend on the level."""
    return shared(levels()[0])
