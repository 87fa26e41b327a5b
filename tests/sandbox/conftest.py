"""Sandboxes that run for one test, or for all of them."""

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
    """Starts a sandbox at a level, with the settings that are given."""
    with ExitStack() as stack:
        yield launcher(stack, sandbox_fork_server)


@pytest.fixture(scope="package")
def shared() -> Iterator[Launch]:
    """Starts a sandbox that all tests share, or gives it if it runs: each test must leave it well."""
    with ExitStack() as stack:
        yield cache(launcher(stack))


@pytest.fixture(scope="package", params=levels())
def sandbox(request: pytest.FixtureRequest, shared: Launch) -> Sandbox:
    """A sandbox at each level."""
    return shared(request.param)


@pytest.fixture(scope="package", params=levels())
def hasty(request: pytest.FixtureRequest, shared: Launch) -> Sandbox:
    """A sandbox whose calls end after three seconds: for those that would not end by themselves."""
    return shared(request.param, call_timeout=3)


@pytest.fixture(scope="package")
def restricted(shared: Launch) -> Sandbox:
    """The chart's default: all containers have the service's user, and there are no namespaces."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to take rights away")
    return shared("restricted")


@pytest.fixture(scope="package")
def best(shared: Launch) -> Sandbox:
    """A sandbox at the strongest level, for what does not depend on it."""
    return shared(levels()[0])
