"""The tests that the scripts select exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# Options that choose tests; everything else of a call is about how they run.
_CHOICES = re.compile(r"(?:^|[\s(])(-k\s+\w+|-m\s+(?!pytest\b)(?:\w+|'[^']*')|tests/[\w/.]+(?:::\w+)*(?!\$))(?=[\s)\]]|$)")


def selections() -> list[tuple[str, str]]:
    """Return each script that runs tests, and its selections."""
    found = []
    for script in sorted((ROOT / "scripts").iterdir()):
        if script.is_file() and script.suffix != ".txt":
            lines = [line for line in script.read_text().splitlines() if not line.startswith("#") and "tests/helm" not in line]
            code = "\n".join(lines)
            selection = " ".join(match[1] for match in _CHOICES.finditer(code))
            if selection and ("pytest" in code or "./test " in code):
                found.append((script.name, selection))
    return found


@pytest.mark.parametrize(("script", "selection"), selections())
def test_a_script_selects_existing_tests(script: str, selection: str) -> None:
    for path in re.findall(r"tests/[\w/.]+", selection):
        assert Path(ROOT, path).exists(), f"{script}: {path}"
    if not re.search("-[km] ", selection):
        return  # whole files: collecting them takes 4 s of CPU
    within = [] if "tests/" in selection else ["tests/upstream"]  # the whole suite takes 10 s of CPU to collect
    chosen = [*shlex.split(selection), *within]
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", *chosen]
    collected = subprocess.run(collect, capture_output=True, text=True, check=False, cwd=ROOT)
    assert collected.returncode == 0, collected.stdout[-2000:]


def test_the_selections_of_scripts_are_found() -> None:
    found = dict(selections())
    assert found["fuzz-requests"] == "tests/server/test_framing.py -k any_request_reaches"
    assert {"e2e", "fuzz-requests", "smoke", "test-deep"} <= set(found)
