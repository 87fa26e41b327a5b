"""A model-based test: create, continue, delete and expire responses of several owners, with concurrent runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule, run_state_machine_as_test

from responses_mw.errors import BadRequest
from responses_mw.state import Chain, Missing, State, StateOptions, connect
from responses_mw.state.schema import json_size, turn_random
from tests.support.stored import ALICE, BOB, address, history, kept, respond, turn_sizes, turns, used

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.support.valkey import Server

# Bytes that objects count for in addition to their JSON.
RECORD, SEGMENT, TOMBSTONE = 1536, 768, 256
OWNERS = st.sampled_from([ALICE, BOB])


@dataclass(frozen=True)
class Known:
    """A stored response: the ids of its history, with its own last, and their texts."""

    owner: str
    status: str
    chain: tuple[str, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Running:
    """A run that has read its history and has not committed yet."""

    owner: str
    chain: Chain
    ids: tuple[str, ...]
    texts: tuple[str, ...]


class Store(RuleBasedStateMachine):
    """The model is `living`: responses by id. The bundle also has deleted and expired responses."""

    valkey: Server
    owner_bytes: int
    responses: Bundle[str] = Bundle("responses")
    runs: Bundle[Running] = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.server = self.valkey.client()
        self.server.flushall()
        self.replicas = [State(connect(self.valkey.url), StateOptions(owner_bytes=self.owner_bytes)) for _ in range(2)]
        self.living: dict[str, Known] = {}
        self.gone: dict[str, Known] = {}
        self.expired = False
        self.number = 0

    @property
    def state(self) -> State:
        """The state of another replica on each access."""
        self.replicas.reverse()
        return self.replicas[0]

    def do(self, step: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run(step)

    @rule(target=runs, owner=OWNERS)
    def begin(self, owner: str) -> Running:
        return Running(owner, Chain.new(), (), ())

    @rule(target=runs, parent=responses, owner=OWNERS)
    def go_on(self, parent: str, owner: str) -> Any:
        known = self.living.get(parent)
        if known is None or known.owner != owner:
            with pytest.raises(Missing):
                self.do(self.state.responses.chain(parent, owner))
            return multiple()
        if known.status == "failed":
            with pytest.raises(BadRequest, match="cannot be continued"):
                self.do(self.state.responses.chain(parent, owner))
            return multiple()
        return Running(owner, self.do(self.state.responses.chain(parent, owner)), known.chain, known.texts)

    @rule(target=responses, run=consumes(runs), status=st.sampled_from(["completed", "incomplete", "failed"]))
    def finish(self, run: Running, status: str) -> str:
        self.number += 1
        text = str(self.number)
        response: str = self.do(respond(self.state, run.chain, text, run.owner, status))
        known = Known(run.owner, status, (*run.ids, response), (*run.texts, text, f"{text}!"))
        self.living[response] = known
        return response

    @rule(response=responses, owner=OWNERS)
    def delete(self, response: str, owner: str) -> None:
        known = self.living.get(response)
        if known is None or known.owner != owner:
            with pytest.raises(Missing):
                self.do(self.state.responses.delete(response, owner))
            return
        self.do(self.state.responses.delete(response, owner))
        del self.living[response]

    @rule(response=responses)
    def expire(self, response: str) -> None:
        known = self.living.pop(response, None)
        if known is not None:
            self.expired = True
            where = address(response)
            self.server.delete(where.record)
            self.server.zadd(f"rmw:{{b{known.owner}}}:expires", {f"{where.tag}r{where.random}": 1}, xx=True)

    @rule(response=responses, owner=OWNERS)
    def look(self, response: str, owner: str) -> None:
        known = self.living.get(response)
        if known is None or known.owner != owner:
            with pytest.raises(Missing):
                self.do(self.state.responses.get(response, owner))
            return
        stored = self.do(self.state.responses.get(response, owner))
        assert stored.document["id"] == response
        assert stored.document["output"][0]["content"][0]["text"] == known.texts[-1]
        page = self.do(self.state.responses.input_items(response, owner, limit=100, order="asc"))
        assert [item["content"][0]["text"] for item in page.items] == list(known.texts[:-1])[:100]
        if known.status != "failed":
            assert self.do(history(self.state, response, owner)) == list(known.texts)

    @invariant()
    def exactly_the_texts_that_something_living_stands_on_are_kept(self) -> None:
        needed = {address(member).random for known in self.living.values() for member in known.chain}
        found = {turn_random(turn) for segment in turns(self.server) for turn in self.server.lrange(segment, 0, -1)}
        # Expired texts stay until a neighbour is changed, or until their own time to live ends.
        assert found >= needed if self.expired else found == needed

    @invariant()
    def the_accounts_say_what_is_there(self) -> None:
        if self.owner_bytes:
            records = [json_size(self.server.hget(key, "document")) for key in self.server.keys("*:r:*")]
            segments = turn_sizes(self.server)
            there = sum(records) + sum(segments.values()) + RECORD * len(records) + SEGMENT * len(segments)
            there += TOMBSTONE * len(self.server.keys("*:x:*"))
            assert there == sum(self.do(used(self.state, owner)) for owner in (ALICE, BOB))

    def teardown(self) -> None:
        for response, known in self.living.items():
            self.do(self.state.responses.delete(response, known.owner))
        if not self.expired:
            assert kept(self.server) == []
        assert all(self.server.pttl(key) > 0 for key in self.server.keys("*"))
        for replica in self.replicas:
            self.do(replica.aclose())
        self.loop.close()
        self.server.close()


@pytest.mark.hypothesis
@pytest.mark.parametrize("owner_bytes", [0, 10**9])
def test_any_sequence_of_create_continue_delete_and_expire_agrees_with_a_simple_model(valkey: Server, owner_bytes: int) -> None:
    Store.valkey, Store.owner_bytes = valkey, owner_bytes
    run_state_machine_as_test(Store, settings=settings(stateful_step_count=40))
