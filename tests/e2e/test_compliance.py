"""The compliance suite of the Open Responses specification, with the demo models behind responses-mw.

`--url URL --model NAME` runs it against another server, whose key is in `$OPENRESPONSES_API_KEY`. The suite is cloned from
GitHub at a pinned commit into a cache, and npm puts what it needs beside it; `$OPENRESPONSES` is a checkout of it to use.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.processes import running
from responses_mw.demo.request import MODELS
from responses_mw.demo.upstream import demo_upstream

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

REPOSITORY = "https://github.com/openresponses/openresponses"
COMMIT = "92c12d96d7b61d6d15e2214daa5e9c6000ab6e1c"  # of July 2026; the specification of 2026-04-24, 17 tests
PACKAGES = ("bun@1.4.5", "zod@3.25.76")  # what it runs on, and all that the tests import
OURS = {"RESPONSES_MW_SERVER_REASONING_EVENTS": "open_responses"}  # the names by which the suite knows what demo-thinker thinks


@pytest.fixture(scope="module")
def suite(cache: Path) -> Path:
    """The checkout of the suite."""
    if given := os.environ.get("OPENRESPONSES"):
        return Path(given).resolve()
    if missing := [program for program in ("git", "npm") if not shutil.which(program)]:
        pytest.skip(f"there is no {' and no '.join(missing)} here")
    folder = cache / f"openresponses-{COMMIT[:12]}"
    path = folder / "suite"
    if not (folder / "ready").exists():
        path.mkdir(parents=True, exist_ok=True)
        for step in (["init", "-q"], ["fetch", "-q", "--depth=1", REPOSITORY, COMMIT], ["checkout", "-q", COMMIT]):
            subprocess.run(["git", *step], cwd=path, check=True)
        install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *PACKAGES]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
        (folder / "ready").touch()
    return path


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of the API that is tested."""
    if given := request.config.getoption("--url"):
        yield given
        return
    with demo_upstream(0) as upstream, running("responses_mw", "serve", f"--upstream={upstream}", environment=OURS) as ours:
        yield f"{ours.url}/v1"


def bun(path: Path) -> str:
    """Return the Bun that npm has installed for the suite, otherwise the one on the path."""
    places = [parent / "node_modules" / ".bin" / "bun" for parent in (path, path.parent)]
    return next((str(place) for place in places if place.exists()), "bun")


@pytest.mark.parametrize("model", MODELS)
def test_the_compliance_suite_passes(model: str, suite: Path, url: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--url"):
        if model != MODELS[0]:
            pytest.skip("the other server has one model")
        model = request.config.getoption("--model") or ""
    command = [bun(suite), "run", "bin/compliance-test.ts", "--base-url", url, "--model", model]
    environment = {"OPENRESPONSES_API_KEY": "none", **os.environ}
    done = subprocess.run(command, cwd=suite, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
