"""Options and installations of the end-to-end tests. `scripts/e2e` runs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("e2e", "end-to-end tests")
    group.addoption("--upstream", metavar="URL", help="kill, continuation: a real chat completions server")
    group.addoption("--url", metavar="URL", help="compliance: another server's API, with /v1")
    group.addoption("--model", help="kill, continuation, compliance: the model of that server")
    group.addoption("--codex", type=Path, help="codex: the Codex to run, in place of the pinned one")
    group.addoption("--pairs", type=int, default=1000, help="chain: number of pairs of responses")


@pytest.fixture(scope="session")
def cache() -> Path:
    """Return the directory for installations, which are kept apart from this project's environment."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "responses-mw"
    path.mkdir(parents=True, exist_ok=True)
    return path
