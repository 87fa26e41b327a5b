"""`scripts/pin-images` requests the digests of tags from a registry, and writes them into the files."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from tests.support.servers import Serve

FILES = ("deploy/Dockerfile", "deploy/vllm/Dockerfile", "deploy/compose.yaml", "helm/responses-mw/values.yaml")
INDEX = "application/vnd.oci.image.index.v1+json"


class Registry:
    """A registry that requires a token, as Docker's does, and has every image."""

    def __init__(self) -> None:
        self.kind = INDEX
        self.damaged = False
        self.asked: list[str] = []
        self.app = Starlette(routes=[Route("/token", self.token), Route("/v2/{path:path}", self.manifest)])

    async def token(self, request: Request) -> Response:
        return JSONResponse({"token": f"for {request.query_params['scope']}"})

    async def manifest(self, request: Request) -> Response:
        name = request.path_params["path"].partition("/manifests/")[0]
        scope = f"repository:{name}:pull"
        if request.headers.get("authorization") != f"Bearer for {scope}":
            challenge = f'Bearer realm="{request.base_url}token",service="registry",scope="{scope}"'
            return Response(status_code=401, headers={"www-authenticate": challenge})
        assert INDEX in request.headers["accept"]
        self.asked.append(request.path_params["path"])
        digest = digest_of("another" if self.damaged else request.path_params["path"])
        return Response(request.path_params["path"], headers={"content-type": self.kind, "docker-content-digest": digest})


def digest_of(content: str) -> str:
    return f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def pin(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "pin-images"), f"--root={root}", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_tags_are_kept_and_get_the_digests_of_the_registry(root: Path, serve: Serve) -> None:
    registry = Registry()
    options = f"--registry={serve(registry.app)}"
    assert pin(root, options).returncode == 0
    dockerfile, compose = (root / "deploy/Dockerfile").read_text(), (root / "deploy/compose.yaml").read_text()
    python = digest_of("library/python/manifests/3.13-slim-trixie")
    assert f"ARG PYTHON=python:3.13-slim-trixie@{python}\n" in dockerfile
    assert f"image: prom/prometheus:v3.5.0@{digest_of('prom/prometheus/manifests/v3.5.0')}\n" in compose
    assert "image: responses-mw:local\n" in compose  # ours is built
    assert pin(root, "--check").returncode == 0
    before = {name: (root / name).read_text() for name in FILES}
    assert pin(root, options).returncode == 0  # a tag that is pinned is asked for again
    assert {name: (root / name).read_text() for name in FILES} == before
    assert len(registry.asked) == 2 * len(set(registry.asked))


def test_check_lists_images_that_are_not_pinned(root: Path) -> None:
    path = root / "deploy/Dockerfile"
    path.write_text("ARG PYTHON=python:3.13-slim-trixie\n")
    done = pin(root, "--check")
    assert (done.returncode, f"{path}: ARG PYTHON=python:3.13-slim-trixie" in done.stdout) == (1, True)


@pytest.mark.parametrize("fault", ["platform", "damaged", "away"])
def test_no_file_is_changed_if_a_digest_is_unavailable(root: Path, serve: Serve, fault: str) -> None:
    registry = Registry()
    registry.kind = "application/vnd.oci.image.manifest.v1+json" if fault == "platform" else INDEX
    registry.damaged = fault == "damaged"
    before = {name: (root / name).read_text() for name in FILES}
    done = pin(root, f"--registry={'http://127.0.0.1:1' if fault == 'away' else serve(registry.app)}")
    assert done.returncode == 1
    assert done.stderr.startswith("scripts/pin-images: ")
    assert "Traceback" not in done.stderr
    assert {name: (root / name).read_text() for name in FILES} == before
