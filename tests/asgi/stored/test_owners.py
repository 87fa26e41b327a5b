"""Ownership: what belongs to one owner does not exist for any other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from responses_mw.ids import random_part
from tests.support.stored import everything

if TYPE_CHECKING:
    from tests.support.echo import Echo
    from tests.support.servers import Ours, Start
    from tests.support.valkey import Plain

Headers = dict[str, str]

ALICE, BOB = {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}
NOBODY: Headers = {}


async def post(ours: Ours, path: str, body: dict[str, Any], headers: Headers) -> dict[str, Any]:
    answer = await ours.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


async def things_of(ours: Ours, headers: Headers) -> dict[str, str]:
    """The ids of a response, a conversation with an item, and that item and an item of the response."""
    response = await post(ours, "/v1/responses", {"model": "tiny", "input": "secret"}, headers)
    items = [{"role": "user", "content": "secret"}]
    conversation = await post(ours, "/v1/conversations", {"items": items}, headers)
    listed = await ours.http.get(f"/v1/conversations/{conversation['id']}/items", headers=headers)
    return {
        "response": response["id"],
        "output": response["output"][0]["id"],
        "conversation": conversation["id"],
        "item": listed.json()["data"][0]["id"],
    }


def never_there() -> dict[str, str]:
    """Well-formed ids that were never issued."""
    tag = random_part()
    return {
        "response": f"resp_{tag}{random_part()}",
        "output": f"msg_{tag}{random_part()}1",
        "conversation": f"conv_{tag}",
        "item": f"msg_{tag}{random_part()}0",
    }


RESPOND = {"model": "tiny", "input": "Hi"}
MESSAGE = {"role": "user", "content": "Hi"}
REQUESTS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "/v1/responses/{response}", None),
    ("GET", "/v1/responses/{response}?stream=true", None),
    ("GET", "/v1/responses/{response}/input_items", None),
    ("GET", "/v1/responses/{response}/input_items?after={output}", None),
    ("POST", "/v1/responses/{response}/cancel", None),
    ("DELETE", "/v1/responses/{response}", None),
    ("GET", "/v1/conversations/{conversation}", None),
    ("POST", "/v1/conversations/{conversation}", {"metadata": {"k": "v"}}),
    ("GET", "/v1/conversations/{conversation}/items", None),
    ("GET", "/v1/conversations/{conversation}/items?after={item}", None),
    ("POST", "/v1/conversations/{conversation}/items", {"items": [MESSAGE]}),
    ("GET", "/v1/conversations/{conversation}/items/{item}", None),
    ("DELETE", "/v1/conversations/{conversation}/items/{item}", None),
    ("DELETE", "/v1/conversations/{conversation}", None),
    ("POST", "/v1/responses", {**RESPOND, "previous_response_id": "{response}"}),
    ("POST", "/v1/responses", {**RESPOND, "previous_response_id": "{response}", "stream": True}),
    ("POST", "/v1/responses", {**RESPOND, "previous_response_id": "{response}", "store": False}),
    ("POST", "/v1/responses", {**RESPOND, "conversation": "{conversation}"}),
    ("POST", "/v1/responses", {**RESPOND, "conversation": {"id": "{conversation}"}, "stream": True}),
    ("POST", "/v1/responses", {**RESPOND, "input": [{"type": "item_reference", "id": "{output}"}, MESSAGE]}),
    ("POST", "/v1/responses", {**RESPOND, "input": [{"type": "item_reference", "id": "{item}"}, MESSAGE]}),
    ("POST", "/v1/responses/input_tokens", {**RESPOND, "previous_response_id": "{response}"}),
    ("POST", "/v1/responses/input_tokens", {**RESPOND, "conversation": "{conversation}"}),
    ("POST", "/v1/responses/compact", {"model": "tiny", "previous_response_id": "{response}"}),
    ("POST", "/v1/conversations", {"items": [{"type": "item_reference", "id": "{output}"}]}),
    ("POST", "/v1/conversations", {"items": [{"type": "item_reference", "id": "{item}"}]}),
]


def filled(value: Any, ids: dict[str, str]) -> Any:
    """Fill the ids into the placeholders of `value`."""
    if isinstance(value, dict):
        return {name: filled(member, ids) for name, member in value.items()}
    if isinstance(value, list):
        return [filled(member, ids) for member in value]
    return value.format(**ids) if isinstance(value, str) else value


async def asked(
    ours: Ours, request: tuple[str, str, dict[str, Any] | None], ids: dict[str, str], headers: Headers
) -> httpx.Response:
    method, path, body = request
    return await ours.http.request(method, path.format(**ids), json=filled(body, ids), headers=headers)


VARYING = {"date", "content-length", "x-request-id"}
"""Headers that differ between two answers to the same request."""


def without_ids(answer: httpx.Response, ids: dict[str, str]) -> tuple[int, str, Headers]:
    """An answer, with names in place of its ids."""
    text = answer.text
    for name, value in ids.items():
        text = text.replace(value, name)
    headers = {name: value for name, value in answer.headers.items() if name not in VARYING}
    return answer.status_code, text, headers


@pytest.mark.parametrize("request_of", REQUESTS, ids=lambda request: f"{request[0]} {request[1]} {request[2] or ''}")
@pytest.mark.parametrize("stranger", [BOB, NOBODY], ids=["another", "anonymous"])
async def test_another_owners_object_is_answered_like_one_that_never_existed(
    a: Ours, b: Ours, keys: Plain, request_of: tuple[str, str, dict[str, Any] | None], stranger: Headers
) -> None:
    ids, nothing = await things_of(a, ALICE), never_there()
    before = everything(keys)
    foreign = await asked(b, request_of, ids, stranger)
    never = await asked(b, request_of, nothing, stranger)
    assert without_ids(foreign, ids) == without_ids(never, nothing)
    assert foreign.status_code in (400, 404)
    assert everything(keys) == before
    owned = await asked(b, request_of, ids, ALICE)
    assert owned.status_code == 200 or owned.json()["error"]["message"].split()[0] in ("Cannot", "Response", "Item")


async def test_objects_of_anonymous_callers_are_visible_to_anonymous_callers_only(a: Ours, b: Ours) -> None:
    ids = await things_of(a, NOBODY)
    assert (await b.http.get(f"/v1/responses/{ids['response']}")).status_code == 200
    assert (await b.http.get(f"/v1/responses/{ids['response']}", headers=ALICE)).status_code == 404


async def test_no_credential_is_stored(a: Ours, keys: Plain) -> None:
    await things_of(a, {"authorization": "Bearer sk-very-secret"})
    assert "sk-very-secret" not in repr(everything(keys))


async def test_the_tenant_header_determines_the_owner_regardless_of_the_credential(start_at: Start, keys: Plain) -> None:
    ours = start_at("proxy", auth__tenant_header="X-Tenant")
    one, other = {**ALICE, "x-tenant": "one"}, {**ALICE, "x-tenant": "two"}
    ids = await things_of(ours, one)
    path = f"/v1/responses/{ids['response']}"
    assert (await ours.http.get(path, headers={**BOB, "x-tenant": "one"})).status_code == 200
    for stranger in (other, {**ALICE, "x-tenant": "ONE"}):
        assert (await ours.http.get(path, headers=stranger)).status_code == 404


NO_TENANT = {
    "missing": [],
    "empty": [("x-tenant", "")],
    "two": [("x-tenant", "victim"), ("x-tenant", "mallory")],
    "two alike": [("x-tenant", "victim"), ("x-tenant", "victim")],
}


@pytest.mark.parametrize("sent", NO_TENANT.values(), ids=NO_TENANT.keys())
@pytest.mark.parametrize("limits", [{}, {"limits__requests_per_minute": 9, "limits__streams": 9}], ids=["", "limits"])
async def test_a_request_without_exactly_one_tenant_is_a_400(
    start_at: Start, keys: Plain, sent: list[tuple[str, str]], limits: dict[str, int]
) -> None:
    """A gateway that omits the header must not merge all owners, and one that appends to it must not let callers choose."""
    ours = start_at("proxy", auth__tenant_header="X-Tenant", **limits)
    ids = await things_of(ours, {"x-tenant": "victim"})
    before = everything(keys)
    for method, path, body in [REQUESTS[0], REQUESTS[9], ("POST", "/v1/responses", RESPOND), ("POST", "/v1/conversations", {})]:
        answer = await ours.http.request(
            method, path.format(**ids), json=body, headers=[*sent, ("authorization", "Bearer alice")]
        )
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("X-Tenant", "invalid_tenant_header")
        assert "'X-Tenant'" in error["message"]
    assert everything(keys) == before


async def test_the_case_and_spacing_of_the_scheme_do_not_change_the_owner(a: Ours, b: Ours) -> None:
    ids = await things_of(a, ALICE)
    for written in ("bearer alice", "BEARER alice", "Bearer  alice"):
        assert (await b.http.get(f"/v1/responses/{ids['response']}", headers={"authorization": written})).status_code == 200
    for other in ("Bearer Alice", "Basic alice", "alice"):
        assert (await b.http.get(f"/v1/responses/{ids['response']}", headers={"authorization": other})).status_code == 404


async def test_credentials_without_a_scheme_are_case_sensitive(a: Ours) -> None:
    ids = await things_of(a, {"authorization": "sk-Secret"})
    for other, status in (("sk-secret", 404), ("Sk-secret", 404), ("sk-Secret", 200)):
        answer = await a.http.get(f"/v1/responses/{ids['response']}", headers={"authorization": other})
        assert answer.status_code == status


async def test_a_tenant_named_like_a_credential_is_not_its_owner(start_at: Start, keys: Plain) -> None:
    by_key, by_tenant = start_at("proxy"), start_at("proxy", auth__tenant_header="x-tenant")
    ids = await things_of(by_key, ALICE)
    answer = await by_tenant.http.get(f"/v1/responses/{ids['response']}", headers={"x-tenant": ALICE["authorization"]})
    assert answer.status_code == 404


async def test_the_tenant_header_is_ignored_unless_it_is_configured(a: Ours) -> None:
    ids = await things_of(a, ALICE)
    answer = await a.http.get(f"/v1/responses/{ids['response']}", headers={**BOB, "x-tenant": "alice"})
    assert answer.status_code == 404


# -- credentials ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replica", ["proxy", "mounted"])
@pytest.mark.parametrize("request_of", REQUESTS, ids=lambda request: f"{request[0]} {request[1]} {request[2] or ''}")
async def test_a_credential_the_upstream_rejects_is_refused_on_every_route(
    start_at: Start, upstream: Echo, keys: Plain, replica: str, request_of: tuple[str, str, dict[str, Any] | None]
) -> None:
    upstream.keys = {"alice", "bob"}
    ours = start_at(replica)
    ids = await things_of(ours, ALICE)
    before = everything(keys)
    for headers in ({"authorization": "Bearer mallory"}, NOBODY):
        answer = await asked(ours, request_of, ids, headers)
        if request_of[1] in ("/v1/responses", "/v1/responses/compact"):  # these ask the upstream
            assert answer.status_code in (400, 401, 404)
        else:
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert everything(keys) == before


async def test_a_verified_credential_is_cached(a: Ours, upstream: Echo) -> None:
    ids = await things_of(a, ALICE)
    for headers in (ALICE, BOB):
        upstream.visited.clear()
        for _ in range(5):
            await a.http.get(f"/v1/responses/{ids['response']}", headers=headers)
            await a.http.get(f"/v1/conversations/{ids['conversation']}", headers=headers)
        assert len(upstream.visited) <= 1


async def test_a_rejected_credential_is_not_cached(a: Ours, upstream: Echo) -> None:
    upstream.keys = {"alice"}
    ids = await things_of(a, ALICE)
    path = f"/v1/responses/{ids['response']}"
    assert (await a.http.get(path, headers=BOB)).status_code == 401
    upstream.keys = {"alice", "bob"}
    assert (await a.http.get(path, headers=BOB)).status_code == 404
