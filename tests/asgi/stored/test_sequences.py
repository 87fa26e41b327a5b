"""Sequences of operations by two owners, compared with a model of two lists."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from responses_mw import ResponsesMiddleware
from tests.support.configured import make_settings
from tests.support.echo import Echo, said
from tests.support.servers import lifespan
from tests.support.stored import everything

if TYPE_CHECKING:
    from starlette.types import ASGIApp

Step = tuple[str, str, int]

KINDS = ("respond", "continue", "read", "delete", "converse", "respond_in", "delete_item", "forget")
OWNERS = ("alice", "bob")
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(OWNERS), st.integers(0, 9)), min_size=12, max_size=40)
"""What is done, by whom, and to which of the responses or conversations that are there by then."""


@dataclass
class Thing:
    """A response or a conversation, and the texts of its items in order."""

    id: str
    owner: str
    texts: list[str]
    deleted: bool = False

    def is_for(self, owner: str) -> bool:
        return not self.deleted and self.owner == owner


class World:
    """The server and its expected state. Every step is applied to both."""

    def __init__(self, http: httpx.AsyncClient, upstream: Echo) -> None:
        self.http = http
        self.upstream = upstream
        self.responses: list[Thing] = []
        self.conversations: list[Thing] = []
        self.count = 0

    async def take(self, step: Step) -> None:
        kind, owner, number = step
        if kind in ("respond", "converse"):
            await getattr(self, kind)(owner)
            return
        things = self.responses if kind in ("continue", "read", "delete") else self.conversations
        await getattr(self, f"{kind}_")(owner, things[number % len(things)])

    async def ask(self, owner: str, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return await self.http.request(method, path, json=body, headers={"authorization": f"Bearer {owner}"})

    async def create(self, owner: str, **stands_on: str) -> httpx.Response:
        self.count += 1
        return await self.ask(owner, "POST", "/v1/responses", {"model": "tiny", "input": f"text {self.count}", **stands_on})

    def check_created(self, answer: httpx.Response, history: list[str]) -> list[str]:
        """Check that the upstream received `history`; return it with the texts that the response adds."""
        assert answer.status_code == 200, answer.text
        given = f"text {self.count}"
        assert said(self.upstream.messages) == [*history, given]
        return [*history, given, f"{given}!"]

    async def respond(self, owner: str) -> None:
        answer = await self.create(owner)
        self.responses.append(Thing(answer.json()["id"], owner, self.check_created(answer, [])))

    async def continue_(self, owner: str, previous: Thing) -> None:
        answer = await self.create(owner, previous_response_id=previous.id)
        if previous.is_for(owner):
            self.responses.append(Thing(answer.json()["id"], owner, self.check_created(answer, previous.texts)))
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")

    async def read_(self, owner: str, response: Thing) -> None:
        answer = await self.ask(owner, "GET", f"/v1/responses/{response.id}")
        listed = await self.ask(owner, "GET", f"/v1/responses/{response.id}/input_items?order=asc&limit=100")
        if response.is_for(owner):
            assert [*texts(listed), answer.json()["output_text"]] == response.texts
        else:
            assert (answer.status_code, listed.status_code) == (404, 404)

    async def delete_(self, owner: str, response: Thing) -> None:
        answer = await self.ask(owner, "DELETE", f"/v1/responses/{response.id}")
        assert answer.status_code == (200 if response.is_for(owner) else 404)
        response.deleted |= response.is_for(owner)

    async def converse(self, owner: str) -> None:
        answer = await self.ask(owner, "POST", "/v1/conversations", {"items": [{"role": "user", "content": "Hi"}]})
        self.conversations.append(Thing(answer.json()["id"], owner, ["Hi"]))

    async def respond_in_(self, owner: str, conversation: Thing) -> None:
        answer = await self.create(owner, conversation=conversation.id)
        if conversation.is_for(owner):
            conversation.texts = self.check_created(answer, conversation.texts)
        else:
            assert answer.status_code == 404

    async def delete_item_(self, owner: str, conversation: Thing) -> None:
        path = f"/v1/conversations/{conversation.id}/items"
        listed = await self.ask(owner, "GET", f"{path}?order=asc&limit=100")
        if not conversation.is_for(owner):
            assert listed.status_code == 404
            return
        assert texts(listed) == conversation.texts
        for item in listed.json()["data"][:1]:
            assert (await self.ask(owner, "DELETE", f"{path}/{item['id']}")).status_code == 200
            conversation.texts = conversation.texts[1:]

    async def forget_(self, owner: str, conversation: Thing) -> None:
        answer = await self.ask(owner, "DELETE", f"/v1/conversations/{conversation.id}")
        assert answer.status_code == (200 if conversation.is_for(owner) else 404)
        conversation.deleted |= conversation.is_for(owner)

    async def check_all(self) -> None:
        for response in self.responses:
            for owner in OWNERS:
                await self.read_(owner, response)
        for conversation in self.conversations:
            for owner in OWNERS:
                await self.delete_item_(owner, conversation)


def texts(listed: httpx.Response) -> list[str]:
    return [item["content"][0]["text"] for item in listed.json()["data"]]


async def run(steps: list[Step], redis_url: str) -> World:
    upstream = Echo()
    app: ASGIApp = ResponsesMiddleware(upstream, make_settings(redis__url=redis_url))
    transport = httpx.ASGITransport(app)
    async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://ours") as http:
        world = World(http, upstream)
        for step in [*((kind, owner, 0) for kind in ("respond", "converse") for owner in OWNERS), *steps]:
            await world.take(step)
        await world.check_all()
        return world


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=STEPS)
def test_any_sequence_of_operations_agrees_with_the_model(redis_url: str, steps: list[Step]) -> None:
    with redis.Redis.from_url(redis_url) as keys:
        keys.flushdb()
        world = asyncio.run(run(steps, redis_url))
        living = [thing for thing in world.responses + world.conversations if not thing.deleted]
        needed = {text for thing in living for text in thing.texts}
        stored = repr(everything(keys))
        for text in {text for response in world.responses for text in response.texts}:
            assert (f'"{text}"' in stored) == (text in needed)
