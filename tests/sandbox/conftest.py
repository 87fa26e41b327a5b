"""Sandboxes that run for one test, or for all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.sandbox import Launch, Sandbox, launcher, levels


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Starts a sandbox at a level, with the settings that are given."""
    with ExitStack() as stack:
        yield launcher(stack)


@pytest.fixture(scope="session", params=levels())
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox that all tests share: each must leave it well."""
    with ExitStack() as stack:
        yield launcher(stack)(request.param)


@pytest.fixture(scope="session", params=levels())
def hasty(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox whose calls end after three seconds: for those that would not end by themselves."""
    with ExitStack() as stack:
        yield launcher(stack)(request.param, call_timeout=3)


@pytest.fixture(scope="session")
def restricted() -> Iterator[Sandbox]:
    """The chart's default: all containers have the service's user, and there are no namespaces."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to take rights away")
    with ExitStack() as stack:
        yield launcher(stack)("restricted")


@pytest.fixture(scope="session")
def best() -> Iterator[Sandbox]:
    """A sandbox at the strongest level, for what does not depend on it."""
    with ExitStack() as stack:
        yield launcher(stack)(levels()[0])
