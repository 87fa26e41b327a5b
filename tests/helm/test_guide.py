"""What the guides tell to type: the chart takes it, and what it names is there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from responses_mw.cli import COMMANDS
from tests.helm.rendering import CHART, KUBERNETES, REQUIRED, Rendered, render, run_helm
from tests.support.paths import ROOT

GUIDES = [ROOT / "docs" / name for name in ("kubernetes.md", "operations.md")]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"])
# What stands beside the chart in a cluster, or is the reader's own.
OF_OTHERS = {"responses-secrets", "responses-api-keys", "valkey"}


def lines(guide: Path) -> Iterator[str]:
    """The commands, each on one line, without what they are given on standard input."""
    for block in re.findall(r"^```sh\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL):
        joined = re.sub(r"\\\n\s*", "", re.sub(r"<<'(\w+)'\n.*?^\1$", "", block, flags=re.MULTILINE | re.DOTALL))
        yield from (line.partition("  #")[0].strip() for line in joined.splitlines() if line.strip())


def words(line: str) -> list[str]:
    return shlex.split(re.sub(r"\$\([^()]*\)", "COMPUTED", line.removesuffix("&")))


def charts(guide: Path) -> Iterator[list[str]]:
    """For each command that installs or upgrades: what `helm template` is given to render what is in the cluster then."""
    before: list[str] = []
    for line in lines(guide):
        command = words(line)
        if command[0] != "helm" or not {"install", "upgrade"} & set(command):
            continue
        given = [word for at, word in enumerate(command) if at and (word == "--set" or command[at - 1] == "--set")]
        before = [*before, *given] if "--reuse-values" in command else given
        yield before


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_every_installation_and_upgrade_of_a_guide_renders(guide: Path) -> None:
    template = ["template", "responses", str(CHART), "--namespace", "llm", "--kube-version", KUBERNETES]
    rendered = [
        list(yaml.safe_load_all(run_helm([*template, *given], {} if given else REQUIRED)))  # or the reader's own file
        for given in charts(guide)
    ]
    assert rendered
    for objects in rendered:
        assert "Deployment" in {one["kind"] for one in objects if one}


def test_manifests_in_the_guides_are_valid_and_admitted_by_the_restricted_profile() -> None:
    found = [text for guide in GUIDES for text in re.findall(r"(?ms)<<'YAML'\n(.*?)^YAML$", guide.read_text())]
    objects: list[dict[str, Any]] = [one for text in found for one in yaml.safe_load_all(text)]
    assert {one["kind"] for one in objects} >= {"Deployment", "Service"}
    for one in objects:
        kubernetes_validate.validate(one, "1.31", strict=True)
    for pod in [one["spec"]["template"]["spec"] for one in objects if one["kind"] == "Deployment"]:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert all(one["securityContext"]["capabilities"] == {"drop": ["ALL"]} for one in pod["containers"])


def everything() -> Rendered:
    return render(REQUIRED, {"worker": {"enabled": True}, "sandbox": {"enabled": True}})


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_what_a_guide_asks_the_cluster_for_is_what_the_chart_makes(guide: Path) -> None:
    text, rendered = guide.read_text(), everything()
    names = {(one["kind"].lower(), one["metadata"]["name"]) for one in rendered.objects}
    asked = set(re.findall(r"\b(deployment|service)/([\w-]+)", text)) | set(re.findall(r"get (secret) ([\w-]+)", text))
    assert {(kind, name) for kind, name in asked if name not in OF_OTHERS} <= names
    labels = [one["metadata"]["labels"] for one in [*rendered.pods().values(), *rendered.objects]]
    for key, value in re.findall(r"-l ([\w./-]+)=([\w-]+)", text):
        assert any(of.get(key) == value for of in labels), f"{key}={value}"


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_files_and_flags_that_a_guide_names_are_there(guide: Path) -> None:
    for line in lines(guide):
        for word in words(line):
            if word.startswith(("deploy/", "helm/", "./helm/", "scripts/")):
                assert (ROOT / word).exists() or word.startswith("deploy/.env"), line  # which the reader makes
        if "deploy/load.py" in line:
            flags = {word for word in words(line) if word.startswith("--")}
            assert flags <= set(re.findall(r"\"(--[a-z-]+)\"", (ROOT / "deploy" / "load.py").read_text())), line
    for name in re.findall(r"\]\(\.\./([\w./-]+)\)", guide.read_text()):
        assert (ROOT / name).exists(), name


def test_flags_of_the_command_in_all_pages_are_flags_that_it_has() -> None:
    found = 0
    for page in PAGES:
        for name, rest in re.findall(rf"responses-mw ({'|'.join(COMMANDS)})\b([^`\n]*(?:\\\n[^`\n]*)*)", page.read_text()):
            known = {field.replace("_", "-") for field in COMMANDS[name].model_fields}
            flags = set(re.findall(r"(?<=\s)--([a-z-]+)", rest)) - {"help"}
            assert flags <= known | {f"no-{flag}" for flag in known}, f"{page.name}: {name}{rest}"
            found += len(flags)
    assert found > 5
