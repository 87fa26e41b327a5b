"""Commands in the guides: the chart accepts them, and the objects, files and flags in them exist."""

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

GUIDES = [ROOT / "docs" / "operation" / name for name in ("kubernetes.md", "operations.md")]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
# What stands beside the chart in a cluster, or is the reader's own.
OF_OTHERS = {"responses-secrets", "responses-api-keys", "valkey"}


def lines(guide: Path) -> Iterator[str]:
    """Return the commands, each on one line, without their standard input."""
    for block in re.findall(r"^```sh\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL):
        joined = re.sub(r"\\\n\s*", "", re.sub(r"<<'(\w+)'\n.*?^\1$", "", block, flags=re.MULTILINE | re.DOTALL))
        yield from (line.partition("  #")[0].strip() for line in joined.splitlines() if line.strip())


def words(line: str) -> list[str]:
    return shlex.split(re.sub(r"\$\([^()]*\)", "COMPUTED", line.removesuffix("&")))


def charts(guide: Path) -> list[dict[str, Any]]:
    """The values of the reader's file after each of the guide's changes to it, or of any file if the guide shows none."""
    changes = re.findall(r"^```yaml\n# values.yaml\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL)
    found: list[dict[str, Any]] = []
    values: dict[str, Any] = {}
    for change in map(yaml.safe_load, changes):
        values = {name: _merged(values.get(name), change.get(name)) for name in {**values, **change}}
        found.append(values)
    return found or [REQUIRED]


def _merged(old: Any, new: Any) -> Any:
    return {**old, **new} if isinstance(old, dict) and isinstance(new, dict) else old if new is None else new


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_the_values_in_a_guide_render(guide: Path) -> None:
    for values in charts(guide):
        command = ["template", "responses", str(CHART), "--namespace", "llm", "--kube-version", KUBERNETES]
        objects = list(yaml.safe_load_all(run_helm(command, values)))
        assert "Deployment" in {one["kind"] for one in objects if one}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guide_passes_the_values_file_to_every_installation_and_upgrade(guide: Path) -> None:
    commands = [line for line in lines(guide) if re.match(r"helm (install|upgrade) ", line)]
    assert commands
    for command in commands:
        assert "-f values.yaml" in command
        assert not re.search("--set|--reuse-values", command)


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
def test_a_guide_queries_only_objects_that_the_chart_creates(guide: Path) -> None:
    text, rendered = guide.read_text(), everything()
    names = {(one["kind"].lower(), one["metadata"]["name"]) for one in rendered.objects}
    asked = set(re.findall(r"\b(deployment|service)/([\w-]+)", text)) | set(re.findall(r"get (secret) ([\w-]+)", text))
    assert {(kind, name) for kind, name in asked if name not in OF_OTHERS} <= names
    labels = [one["metadata"]["labels"] for one in [*rendered.pods().values(), *rendered.objects]]
    for key, value in re.findall(r"-l ([\w./-]+)=([\w-]+)", text):
        assert any(of.get(key) == value for of in labels), f"{key}={value}"


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_files_and_flags_in_a_guide_exist(guide: Path) -> None:
    for line in lines(guide):
        for word in words(line):
            if word.startswith(("deploy/", "helm/", "./helm/", "scripts/")):
                assert (ROOT / word).exists() or word.startswith("deploy/.env"), line  # which the reader makes
        if "deploy/load.py" in line:
            flags = {word for word in words(line) if word.startswith("--")}
            assert flags <= set(re.findall(r"\"(--[a-z-]+)\"", (ROOT / "deploy" / "load.py").read_text())), line
    for name in re.findall(r"\]\(\.\./\.\./([\w./-]+)\)", guide.read_text()):
        assert (ROOT / name).exists(), name


def test_flags_of_responses_mw_in_all_pages_exist() -> None:
    found = 0
    for page in PAGES:
        for name, rest in re.findall(rf"responses-mw ({'|'.join(COMMANDS)})\b([^`\n]*(?:\\\n[^`\n]*)*)", page.read_text()):
            known = {field.replace("_", "-") for field in COMMANDS[name].model_fields}
            flags = set(re.findall(r"(?<=\s)--([a-z-]+)", rest)) - {"help"}
            assert flags <= known | {f"no-{flag}" for flag in known}, f"{page.name}: {name}{rest}"
            found += len(flags)
    assert found > 5
