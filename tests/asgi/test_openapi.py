"""`/openapi.json` describes what the server does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
from fastapi.openapi.models import OpenAPI

from responses_mw.asgi.routes import ROUTES, DescriptionMiddleware, describe
from responses_mw.cli.serve import no_app
from responses_mw.settings.groups import ServerSettings
from tests.support.scripted import completion

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Start

DOCUMENT = describe()
SCHEMAS = DOCUMENT["components"]["schemas"]
OPERATIONS = [(method.upper(), path, one) for path, methods in DOCUMENT["paths"].items() for method, one in methods.items()]
INVALID = {"include": "nonsense", "stream": "perhaps", "starting_after": "x", "limit": "0", "order": "up"}
OF_TYPES: dict[str, Any] = {"boolean": True, "integer": 7, "string": "x", "array": [], "object": {}}
BODY = {"model": "tiny", "input": "Hi"}
MEMBERS = SCHEMAS["CreateResponse"]["properties"]


def concrete(path: str) -> str:
    ids = {"response_id": "resp_" + "a" * 50, "conversation_id": "conv_" + "a" * 25, "file_id": "file-" + "a" * 25}
    ids |= {"vector_store_id": "vs_" + "a" * 25, "batch_id": "vsfb_" + "a" * 25}
    return path.format(**ids, item_id="msg_x", upload_id="upload_x", action="parts")


@pytest.mark.parametrize("closed", [False, True])
def test_the_document_is_valid(*, closed: bool) -> None:
    document = describe("/llm", needs_key=True, closed=closed)
    parsed = OpenAPI.model_validate(document)
    assert parsed.openapi.startswith("3.1.")
    assert parsed.paths is not None
    assert parsed.paths.keys() == ROUTES.keys()
    assert ("additionalProperties" in document["components"]["schemas"]["CreateResponse"]) is closed
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    references = {part.split('"')[0] for part in str(document).replace("'", '"').split("#/components/schemas/")[1:]}
    assert references == schemas.keys()
    names = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(set(names)) == len(names)


def test_every_operation_has_a_summary() -> None:
    missing = [f"{method} {path}" for method, path, one in OPERATIONS if not one["summary"]]
    assert not missing, "write the summary in responses_mw/asgi/openapi.json"


async def test_the_document_is_served_with_a_root_path(start_at: Start) -> None:
    http = start_at("proxy", uvicorn={"root_path": "/api"}).http
    assert (await http.get("/openapi.json")).json() == describe()


async def test_the_document_is_served_if_the_path_lacks_the_root_path() -> None:
    document = DescriptionMiddleware(no_app, ServerSettings(), needs_key=False)
    transport = httpx.ASGITransport(document, root_path="/open")
    async with httpx.AsyncClient(transport=transport, base_url="http://ours") as http:
        assert (await http.get("/openapi.json")).json() == describe()


async def test_the_standalone_server_serves_the_document_and_proxies_other_methods(
    start_at: Start, upstream: ScriptedUpstream
) -> None:
    http = start_at("proxy", server__base_path="/llm").http
    document = (await http.get("/llm/openapi.json")).json()
    assert document == describe("/llm")
    assert document["servers"] == [{"url": "/llm"}]
    assert (await http.post("/llm/openapi.json")).status_code == 404
    assert (await http.get("/llm/docs")).status_code == 404
    assert [visit.path for visit in upstream.visits if visit.path != "/v1/models"] == ["/openapi.json", "/docs"]


async def test_a_mounted_middleware_leaves_the_document_to_the_host(start_at: Start, upstream: ScriptedUpstream) -> None:
    upstream.pages["/openapi.json"] = {"openapi": "the host's"}
    assert (await start_at("middleware").http.get("/openapi.json")).json() == {"openapi": "the host's"}


async def test_with_api_keys_the_document_needs_a_key(start_at: Start) -> None:
    http = start_at("proxy", auth__api_keys=["team:sha256:" + "0" * 64]).http
    assert (await http.get("/openapi.json")).status_code == 401


async def test_each_path_allows_exactly_the_described_methods(start_at: Start) -> None:
    http = start_at("proxy").http
    for path, methods in ROUTES.items():
        refused = await http.put(concrete(path))
        assert (refused.status_code, set(refused.headers["allow"].split(", "))) == (405, set(methods)), path


async def test_query_parameters_are_validated_as_described(start_at: Start) -> None:
    http = start_at("proxy").http
    for method, path, operation in OPERATIONS:
        for name, value in INVALID.items():
            answer = await request(http, method, path, name, value)
            is_refused = answer.status_code == 400 and answer.json()["error"]["param"] == name
            described = {one["name"] for one in operation["parameters"] if one["in"] == "query"}
            assert is_refused == (name in described), (method, path, name)
            if answer.status_code >= 400:
                check_error(answer)


async def request(http: httpx.AsyncClient, method: str, path: str, name: str, value: str) -> httpx.Response:
    body: dict[str, Any] | None = {"items": []} if method == "POST" else None
    return await http.request(method, concrete(path), params={name: value}, json=body)


def check_error(answer: httpx.Response) -> None:
    jsonschema.validate(answer.json(), SCHEMAS["Error"])


@pytest.mark.parametrize("name", [name for name, schema in MEMBERS.items() if schema])
async def test_members_of_a_create_are_validated_as_described(start_at: Start, name: str) -> None:
    http, schema = start_at("proxy").http, MEMBERS[name]
    others = [value for kind, value in OF_TYPES.items() if kind not in schema["type"]]
    wrong = [next(value for value in others if not (value == 7 and "number" in schema["type"]))]
    wrong += [schema["minimum"] - 1] if "minimum" in schema else []
    wrong += [schema["maximum"] + 1] if "maximum" in schema else []
    wrong += ["nonsense"] if "enum" in schema else []
    for value in wrong:
        answer = await http.post("/v1/responses", json={**BODY, name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), value
        assert not is_valid({**BODY, name: value})


async def test_accepted_bodies_are_valid_under_the_schema(start_at: Start, upstream: ScriptedUpstream) -> None:
    http = start_at("proxy").http
    full = {
        "input": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "name": "f", "parameters": None}],
        "context_management": [{"type": "compaction", "compact_threshold": 10000}],
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "temperature": 1,
        "top_k": 5,
        "text": {"format": {"type": "text"}},
        "truncation": None,
    }
    for body in (BODY, {**BODY, **full}):
        upstream.whole(completion({"content": "Hello"}))
        answer = await http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        assert is_valid(body)
        jsonschema.validate(answer.json(), SCHEMAS["Response"])
    assert not is_valid({"model": "tiny"})
    assert (await http.post("/v1/responses", json={"model": "tiny"})).status_code == 400


def is_valid(body: dict[str, Any]) -> bool:
    return bool(jsonschema.Draft202012Validator(SCHEMAS["CreateResponse"]).is_valid(body))


async def test_bodies_described_as_closed_refuse_unknown_members(start_at: Start) -> None:
    http = start_at("proxy").http
    in_json = [
        (path, one) for _, path, one in OPERATIONS if "application/json" in one.get("requestBody", {}).get("content", {})
    ]
    bodies = [(path, body_schema(one)) for path, one in in_json]
    closed = [(path, schema) for path, schema in bodies if "additionalProperties" in schema]
    assert len(closed) == 10
    for path, schema in closed:
        members = dict.fromkeys(schema.get("required", []), "x")
        answer = await http.post(concrete(path), json={**members, "frobnicate": 1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "frobnicate"), path
        for name in members:
            answer = await http.post(concrete(path), json={})
            assert answer.status_code in (400, 404), path
            assert answer.json()["error"]["param"] in (name, None), path


def body_schema(operation: dict[str, Any]) -> dict[str, Any]:
    reference: str = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema: dict[str, Any] = SCHEMAS[reference.rpartition("/")[2]]
    return schema
