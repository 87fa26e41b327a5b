"""The version of a release, and the interpreters that it is tested with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(script), *arguments], capture_output=True, text=True, check=False)


def versions(root: Path) -> tuple[str, str, str]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((root / "helm/responses-mw/Chart.yaml").read_text())
    return project["version"], chart["version"], chart["appVersion"]


def test_the_chart_has_the_version_of_the_project() -> None:
    version, chart, application = versions(ROOT)
    assert (application, re.sub(r"-(a|b|rc)\.", r"\1", chart)) == (version, version)
    assert run(ROOT / "scripts/version").stdout == f"{version}\n"


@pytest.mark.parametrize(("version", "chart"), [("1.2.3", "1.2.3"), ("1.2.3rc4", "1.2.3-rc.4")])
def test_setting_the_version_changes_the_project_and_the_chart(tmp_path: Path, version: str, chart: str) -> None:
    for name in ("scripts/version", "pyproject.toml", "helm/responses-mw/Chart.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    before = versions(tmp_path)
    assert run(tmp_path / "scripts/version", "1.2").returncode == 1
    assert versions(tmp_path) == before
    assert run(tmp_path / "scripts/version", version).stdout == f"{version}\n"
    assert versions(tmp_path) == (version, chart, version)


def test_of_several_patch_levels_the_lowest_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, patch in (("first", "99"), ("second", "0")):
        python = tmp_path / name / "python3.11"
        python.parent.mkdir()
        python.write_text(f"#!/bin/sh\necho {patch} {python}\n")
        python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'first'}:{tmp_path / 'second'}:{os.environ['PATH']}")
    assert run(ROOT / "scripts/pythons").stdout.split()[0] == str(tmp_path / "second/python3.11")


def test_supported_interpreters_are_listed_from_oldest_to_newest() -> None:
    paths = run(ROOT / "scripts/pythons").stdout.split()
    found = [
        subprocess.check_output([path, "-c", "import sys; print(*sys.version_info[:2])"], text=True).split() for path in paths
    ]
    minors = [(int(major), int(minor)) for major, minor in found]
    assert minors == sorted(set(minors))
    assert sys.version_info[:2] in minors or sys.version_info[:2] > minors[-1]
