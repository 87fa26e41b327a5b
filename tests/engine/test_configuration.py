"""`configuration_update` items set parameters of the responses that follow them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from tests.support.oracle import stream, whole
from tests.support.scripted import HELLO, ScriptedUpstream, completion
from tests.support.scripted_responses import ScriptedResponses, item, response

if TYPE_CHECKING:
    from tests.support.servers import Ours, Start

USER = {"type": "message", "role": "user", "content": "Hi"}
SCHEMA = {"type": "json_schema", "name": "answer", "schema": {"type": "object", "properties": {}}}


def update(effort: str | None = None, **text: Any) -> dict[str, Any]:
    members = {"reasoning": {"effort": effort} if effort else None, "text": text or None}
    return {"type": "configuration_update", **members}


@pytest.fixture
def upstream() -> ScriptedUpstream:
    upstream = ScriptedUpstream()
    upstream.models = [{**upstream.models[0], "owned_by": "openai"}]  # a dialect with a field for each parameter
    return upstream


async def ask(ours: Ours, upstream: ScriptedUpstream, *items: Any, **body: Any) -> tuple[dict[str, Any], Any]:
    """Create a response, and return it with the request that the upstream got."""
    upstream.whole(completion({"content": "Hello"}))
    answer = await whole(ours, input=[*items], **body)
    return answer, upstream.requests[-1].json


async def test_an_update_sets_the_parameters_and_is_not_shown_to_the_model(ours: Ours, upstream: ScriptedUpstream) -> None:
    answer, sent = await ask(ours, upstream, update("high", verbosity="low", format=SCHEMA), USER)
    assert (sent["reasoning_effort"], sent["verbosity"]) == ("high", "low")
    assert sent["response_format"]["json_schema"]["name"] == "answer"
    assert sent["messages"] == [{"role": "user", "content": "Hi"}]
    assert answer["reasoning"]["effort"] == "high"
    assert (answer["text"]["verbosity"], answer["text"]["format"]["name"]) == ("low", "answer")


async def test_the_newest_update_of_each_parameter_counts(ours: Ours, upstream: ScriptedUpstream) -> None:
    items = [update("low", verbosity="high"), USER, update("high"), USER, update(format={"type": "text"})]
    _, sent = await ask(ours, upstream, *items)
    assert (sent["reasoning_effort"], sent["verbosity"]) == ("high", "high")
    assert "response_format" not in sent


async def test_an_update_takes_precedence_over_the_request(ours: Ours, upstream: ScriptedUpstream) -> None:
    body = {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "high", "format": SCHEMA}}
    answer, sent = await ask(ours, upstream, USER, update("high"), **body)
    assert (sent["reasoning_effort"], sent["verbosity"]) == ("high", "high")
    assert sent["response_format"]["type"] == "json_schema"
    assert answer["reasoning"] == {"effort": "high", "summary": "auto"}


@pytest.mark.parametrize("kind", ["previous_response_id", "conversation"])
async def test_an_update_stays_in_effect_for_later_responses(ours: Ours, upstream: ScriptedUpstream, kind: str) -> None:
    chained: dict[str, Any] = {}
    if kind == "conversation":
        chained[kind] = (await ours.http.post("/v1/conversations", json={})).json()["id"]
    for own, expected in (([update("high")], "high"), ([], "high"), ([update("minimal")], "minimal"), ([], "minimal")):
        answer, sent = await ask(ours, upstream, *own, USER, **chained)
        assert sent["reasoning_effort"] == answer["reasoning"]["effort"] == expected
        if kind == "previous_response_id":
            chained[kind] = answer["id"]


async def test_an_update_is_listed_with_the_input(ours: Ours, upstream: ScriptedUpstream) -> None:
    answer, _ = await ask(ours, upstream, update("high"), USER)
    listed = (await ours.http.get(f"/v1/responses/{answer['id']}/input_items?order=asc")).json()["data"]
    assert listed[0] == {"id": listed[0]["id"], "type": "configuration_update", "reasoning": {"effort": "high"}}
    adapter: TypeAdapter[ResponseItem] = TypeAdapter(ResponseItem)
    assert adapter.validate_python(listed[0]).type == "configuration_update"
    _, sent = await ask(ours, upstream, {"type": "item_reference", "id": listed[0]["id"]}, USER)
    assert sent["reasoning_effort"] == "high"


async def test_an_update_before_a_compaction_stays_in_effect(ours: Ours, upstream: ScriptedUpstream) -> None:
    first, _ = await ask(ours, upstream, update("high"), USER)
    second, sent = await ask(ours, upstream, {"type": "compaction_trigger"}, previous_response_id=first["id"])
    assert second["output"][0]["type"] == "compaction"
    _, sent = await ask(ours, upstream, USER, previous_response_id=second["id"])
    assert sent["reasoning_effort"] == "high"
    assert "summary" in sent["messages"][0]["content"]


async def test_a_background_response_applies_updates(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(auth__secret_keys=["k" * 40])
    upstream.stream(*HELLO)
    created = await ours.http.post("/v1/responses", json={"model": "tiny", "input": [update("high"), USER], "background": True})
    assert created.json()["reasoning"]["effort"] == "high"
    await upstream.received(1)
    assert upstream.requests[0].json["reasoning_effort"] == "high"


async def test_an_upstream_with_a_responses_api_gets_the_parameters(start: Start) -> None:
    native = ScriptedResponses()
    ours = start(upstream=native, upstream__api="responses")
    native.whole(response(item()))
    await whole(ours, input=[update("high", verbosity="low"), USER])
    sent = native.requests[0].json
    assert (sent["reasoning"], sent["text"]) == ({"effort": "high"}, {"verbosity": "low"})
    assert [one["type"] for one in sent["input"]] == ["message"]


async def test_a_value_that_the_upstream_does_not_support_is_a_400(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__dialect="tgi")
    body = {"model": "tiny", "input": [update("high"), USER]}
    answer = await ours.http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning.effort")


async def test_a_stream_begins_with_the_parameters_in_effect(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    streamed = await stream(ours, input=[update("high"), USER])
    assert streamed.events[0]["response"]["reasoning"]["effort"] == "high"
