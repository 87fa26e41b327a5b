"""The image contains the locked requirements of the package, and does not run as root."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from uvicorn.main import main

from responses_mw import ResponsesMiddleware
from tests.support.configured import make_settings
from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def locked(name: str) -> dict[str, str]:
    """Return the packages and versions in a lock file."""
    text = (DEPLOY / name).read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


def asked(*extras: str) -> list[Requirement]:
    """Return the requirements of the package with some extras, including extras that they refer to."""
    lines = PROJECT["dependencies"] + [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    requirements = [Requirement(line) for line in lines]
    ours = [requirement for requirement in requirements if requirement.name == "responses-mw"]
    others = [requirement for requirement in requirements if requirement.name != "responses-mw"]
    return others + [one for requirement in ours for one in asked(*sorted(requirement.extras))]


def of_the_image() -> list[Requirement]:
    """Return the requirements of the image: the extra `all` without the embedded Valkey."""
    [everything] = PROJECT["optional-dependencies"]["all"]
    return asked(*sorted(Requirement(everything).extras - {"embedded"}))


@pytest.mark.parametrize(
    ("name", "asked"), [("../scripts/constraints.txt", asked("lint")), ("requirements.lock", of_the_image())]
)
def test_a_lock_satisfies_the_requirements_of_the_package(name: str, asked: list[Requirement]) -> None:
    lock = locked(name)
    for requirement in asked:
        version = lock.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} is not locked: run scripts/lock"
        assert requirement.specifier.contains(version, prereleases=True), (
            f"{requirement} is locked as {version}: run scripts/lock"
        )


def test_the_image_for_vllm_adds_missing_packages_in_required_versions() -> None:
    lock = locked("vllm/requirements.lock")
    asked_for = {str(canonicalize_name(one.name)): one.specifier for one in asked()}
    assert {"redis", "orjson"} <= lock.keys() & asked_for.keys()
    assert not lock.keys() & {"httpx", "pydantic-settings", "starlette", "torch", "vllm"}
    for name in lock.keys() & asked_for.keys():
        assert asked_for[name].contains(lock[name], prereleases=True), name


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-build.lock", "vllm/requirements.lock"])
def test_every_package_is_locked_with_hashes(name: str) -> None:
    entries = re.split(r"^(?=[a-z0-9-]+==)", (DEPLOY / name).read_text(), flags=re.MULTILINE)[1:]
    assert entries
    assert all("--hash=sha256:" in entry for entry in entries)


@pytest.mark.parametrize("name", ["Dockerfile", "vllm/Dockerfile"])
def test_an_image_is_built_in_stages_from_locked_packages(name: str) -> None:
    lines = (DEPLOY / name).read_text().splitlines()
    assert sum(line.startswith("FROM ") for line in lines) == 2
    installs = [line for line in lines if "pip" in line and " install " in line]
    assert installs
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)
    copied = {word for line in lines if line.startswith("COPY deploy/") for word in line.split() if word.endswith(".lock")}
    ignored = (DEPLOY / f"{name}.dockerignore").read_text().splitlines()
    assert {f"!{word}" for word in copied} <= set(ignored)


def test_the_image_does_not_run_as_root() -> None:
    assert "USER 65532:65532" in (DEPLOY / "Dockerfile").read_text().splitlines()


def test_the_demo_service_runs_a_module_of_the_package() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["demo"]
    module, _, factory = service["entrypoint"][-1].partition(":")
    assert callable(getattr(import_module(module), factory))
    main.make_context("uvicorn", [*service["entrypoint"][3:], *service["command"]])


def test_the_vllm_example_is_valid_and_names_our_middleware() -> None:
    objects: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "vllm" / "kubernetes.yaml").read_text()))
    for one in objects:
        kubernetes_validate.validate(one, "1.31", strict=True)
    [pod] = [one["spec"]["template"]["spec"] for one in objects if one["kind"] == "Deployment"]
    [named] = [one.partition("=")[2] for one in pod["containers"][0]["args"] if one.startswith("--middleware=")]
    module, _, name = named.rpartition(".")
    assert getattr(import_module(module), name) is ResponsesMiddleware
    assert pod["enableServiceLinks"] is False


def test_the_vllm_example_drains_like_the_chart() -> None:
    [pod] = [
        one["spec"]["template"]["spec"]
        for one in yaml.safe_load_all((DEPLOY / "vllm" / "kubernetes.yaml").read_text())
        if one["kind"] == "Deployment"
    ]
    [vllm] = pod["containers"]
    [streams] = [int(one.partition("=")[2]) for one in vllm["args"] if one.startswith("--shutdown-timeout=")]
    program, pause = vllm["lifecycle"]["preStop"]["exec"]["command"]
    jobs = make_settings().server.drain_timeout
    assert (program, streams) == ("sleep", jobs)
    assert pod["terminationGracePeriodSeconds"] == int(pause) + streams + jobs + 15
