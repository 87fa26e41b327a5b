"""The 404 of an upstream that does not know a path is explained. Its other answers are passed on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from tests.support.scripted import json_answer

from .test_errors import fault
from .test_passable import BEARER, KEYS

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start


@pytest.fixture
def ours(start: Start) -> Ours:
    """Our server, which leaves files to the upstream."""
    return start(files__enabled=False)


UNKNOWN = {"detail": "Not Found"}
"""The scripted upstream's 404 for unknown paths."""
EXPLAINED = [
    ("/v1/files", "input_file"),
    ("/v1/files/", "input_file"),
    ("/v1/files/file-1", "input_file"),
    ("/v1/files/file-1/content?x=1", "input_file"),
    ("/v1/vector_stores", "vector stores"),
    ("/v1/vector_stores/vs_1/search", "vector stores"),
    ("/v1/v1/responses", "'/v1/responses'"),
    ("/v1/v1/responses/resp_1", "'/v1/responses'"),
    ("/v1/v1/v1/conversations", "'/v1/conversations'"),
    ("/v1/v1/models", "'/v1/models'"),
    ("/responses", "'/v1/responses'"),
    ("/responses/resp_1/cancel", "'/v1/responses'"),
    ("/conversations", "'/v1/conversations'"),
    ("/conversations/conv_1/items", "'/v1/conversations'"),
]


@pytest.mark.both_mounts
@pytest.mark.parametrize(("path", "named"), EXPLAINED)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_the_404_of_an_unknown_path_explains_the_mistake(ours: Ours, method: str, path: str, named: str) -> None:
    members = fault(await ours.http.request(method, path, json={"a": 1} if method == "POST" else None), 404)
    assert members["code"] == "unknown_url"
    assert named in members["message"]


@pytest.mark.both_mounts
@pytest.mark.parametrize("path", ["/v1/filesystem", "/v1/embeddings", "/files", "/responsesx", "/v1", "/v2/v1/responses"])
async def test_the_404_of_any_other_path_is_the_upstreams(ours: Ours, path: str) -> None:
    answer = await ours.http.post(path, json={"a": 1})
    assert (answer.status_code, answer.json()) == (404, UNKNOWN)


@pytest.mark.both_mounts
@pytest.mark.parametrize("path", ["/v1/files", "/v1/files/file-1", "/v1/v1/responses", "/responses"])
async def test_a_path_that_the_upstream_serves_is_passed_on(ours: Ours, upstream: ScriptedUpstream, path: str) -> None:
    upstream.pages[path] = {"served": True}
    assert (await ours.http.get(path)).json() == {"served": True}
    missing: dict[str, Any] = {"error": {"message": "No such object"}}
    upstream.pages[path] = json_answer(missing, 404, {"x-own": "yes"})
    answer = await ours.http.get(path)
    assert (answer.status_code, answer.json(), answer.headers["x-own"]) == (404, missing, "yes")


@pytest.mark.both_mounts
async def test_a_404_below_a_collection_that_the_upstream_serves_is_passed_on(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.pages["/v1/files"] = {"data": []}
    answer = await ours.http.get("/v1/files/file-1")
    assert (answer.status_code, answer.json()) == (404, UNKNOWN)
    upstream.pages["/v1/files"] = json_answer({"detail": "Method Not Allowed"}, 405)
    assert (await ours.http.delete("/v1/files/file-1")).json() == UNKNOWN


@pytest.mark.both_mounts
async def test_requests_to_the_upstream_about_a_path_have_the_callers_credential_and_no_body(
    ours: Ours, upstream: ScriptedUpstream
) -> None:
    content = b"x" * 100_000
    headers = {"authorization": "Bearer k", "content-type": "text/plain"}
    fault(await ours.http.post("/v1/files/a/b", content=content, headers=headers), 404)
    first, *others = upstream.visits[-3:]
    assert (first.method, first.path, first.body) == ("POST", "/v1/files/a/b", content)
    assert [(one.method, one.body, one.headers["authorization"]) for one in others] == [("GET", b"", "Bearer k")] * 2
    assert others[1].path == "/v1/files"
    assert not any("content-type" in one.headers for one in others)


@pytest.mark.both_mounts
async def test_a_large_404_is_passed_on(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.pages["/v1/files"] = json_answer(b"x" * 200_000, 404)
    assert (await ours.http.get("/v1/files")).content == b"x" * 200_000


async def test_paths_below_a_base_path_are_explained(start: Start) -> None:
    ours = start(server__base_path="/openai", files__enabled=False)
    assert "input_file" in fault(await ours.http.get("/openai/v1/files/x"), 404)["message"]
    assert "'/v1/responses'" in fault(await ours.http.post("/openai/responses", json={"a": 1}), 404)["message"]


async def test_a_path_that_is_not_passed_on_is_explained(start: Start) -> None:
    ours = start(**KEYS)
    answer = await ours.http.post("/responses", json={"a": 1}, headers=BEARER)
    assert "'/v1/responses'" in fault(answer, 404)["message"]
    assert (await ours.http.post("/responses", json={"a": 1})).status_code == 401


async def test_a_host_application_keeps_its_own_paths(start_at: Any) -> None:
    async def one(request: Request) -> Response:
        number = request.path_params["number"]
        return JSONResponse({"number": number}) if number == "1" else PlainTextResponse("There is no such survey.", 404)

    ours: Ours = start_at("mounted", upstream=Starlette(routes=[Route("/responses/{number}", one)]))
    assert (await ours.http.get("/responses/1")).json() == {"number": "1"}
    assert (await ours.http.get("/responses/2")).text == "There is no such survey."
    fault(await ours.http.post("/responses", json={"a": 1}), 404)
