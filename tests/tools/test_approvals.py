"""One approval runs a tool once, however often and wherever it is sent."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from mcp.server.mcpserver import MCPServer

from responses_mw.engine import history
from tests.support.scripted import call, completion, finish

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start

BODY = {"model": "tiny", "input": "Pay."}


@pytest.fixture
def payments() -> list[int]:
    return []


@pytest.fixture
def tools(serve: Serve, payments: list[int]) -> list[dict[str, Any]]:
    server: MCPServer[None] = MCPServer("bank", log_level="CRITICAL")

    @server.tool()
    def pay(amount: int) -> str:
        payments.append(amount)
        return "paid"

    url = serve(server.streamable_http_app(stateless_http=True)) + "/mcp"
    return [{"type": "mcp", "server_label": "bank", "server_url": url, "require_approval": "always"}]


@pytest.mark.parametrize(
    ("store", "redis"), [(True, True), (False, True), (False, False)], ids=["stored", "unstored", "without Redis"]
)
@pytest.mark.parametrize("is_parallel", [True, False], ids=["parallel", "in sequence"])
async def test_an_approval_that_is_sent_twice_runs_the_tool_once(
    start: Start,
    upstream: ScriptedUpstream,
    tools: list[dict[str, Any]],
    payments: list[int],
    store: bool,
    redis: bool,
    is_parallel: bool,
) -> None:
    without = {} if redis else {"redis__url": None}
    servers = [start(tools__allow_private_urls=True, **without) for _ in range(2 if redis else 1)]
    first, body = await asked(servers[0], upstream, tools, store)
    for _ in range(2):
        upstream.whole(completion({"content": "Paid."}))
    sends = [one.http.post("/v1/responses", json=body) for one in (servers[0], servers[-1])]
    answers = list(await asyncio.gather(*sends)) if is_parallel else [await one for one in sends]
    assert payments == [7]
    assert sorted(one.status_code for one in answers) == [200, 409]
    error = next(one for one in answers if one.status_code == 409).json()["error"]
    assert (error["code"], error["param"]) == ("approval_already_used", "input")
    assert first in error["message"]


async def asked(ours: Ours, upstream: ScriptedUpstream, tools: list[dict[str, Any]], store: bool) -> tuple[str, Any]:
    """Have the model ask for an approval. Return its id, and the request that grants it."""
    upstream.stream(call('{"amount": 7}', name="pay", call_id="c"), finish("tool_calls"))
    body = {**BODY, "tools": tools, "store": store}
    response = await ours.http.post("/v1/responses", json={**body, "stream": True})
    done = response.text.rpartition("event: response.completed\ndata: ")[2].partition("\n")[0]
    document = json.loads(done)["response"]
    asked_for = document["output"][1]["id"]
    approval = {"type": "mcp_approval_response", "approval_request_id": asked_for, "approve": True}
    if store:
        return asked_for, {**body, "input": [approval], "previous_response_id": document["id"]}
    history = [{"role": "user", "content": "Pay."}, *document["output"], approval]
    return asked_for, {**body, "input": history}


def test_a_process_without_redis_remembers_a_limited_number_of_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_CLAIMS", 2)
    claims = history._Claims()
    for approval in ("a", "b", "c"):
        assert claims.claim("alice", [approval], "resp_1") is None
        assert claims.claim("alice", [approval], "resp_1") is None
        assert claims.claim("alice", [approval], "resp_2") == approval
        assert claims.claim("bob", [approval], "resp_3") is None
