"""Responses and items as a run makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from responses_mw.ids import RANDOM_LENGTH, RunIds, random_part
from responses_mw.lua import load
from responses_mw.state.schema import json_size, response_address

if TYPE_CHECKING:
    from responses_mw.state import Chain, Item, State
    from responses_mw.state.schema import Address
    from tests.support.valkey import Plain

ALICE, BOB = "a" * 64, "b" * 64
USAGE = b"rmw:{usage}"


def address(response_id: str) -> Address:
    """Where a response lies."""
    return response_address(response_id)


def message(item_id: str, role: str, text: str) -> Item:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "id": item_id, "role": role, "content": [{"type": kind, "text": text}]}


def made(chain: Chain, text: str, status: str = "completed") -> tuple[dict[str, Any], list[Item]]:
    """A response's document and its input: `text` asked, `text!` answered."""
    ids = RunIds(chain.tag)
    given = [message(ids.item("msg"), "user", text)]
    output = [message(ids.item("msg"), "assistant", f"{text}!")]
    document: dict[str, Any] = {"id": ids.response, "object": "response", "status": status, "output": output, "model": "m"}
    if chain.conversation is not None:
        document["conversation"] = {"id": chain.conversation}
    return document, given


async def respond(state: State, chain: Chain, text: str, owner: str = ALICE, status: str = "completed") -> str:
    """Commits such a response, and returns its id."""
    document, given = made(chain, text, status)
    await state.responses.commit(chain, document, given, owner, random_part())
    return str(document["id"])


async def continued(state: State, response_id: str, text: str, owner: str = ALICE) -> str:
    """Commits a response on top of another, and returns its id."""
    return await respond(state, await state.responses.chain(response_id, owner), text, owner)


async def history(state: State, response_id: str, owner: str = ALICE) -> list[str]:
    """The texts of the chain up to and with a response."""
    return texts((await state.responses.chain(response_id, owner)).items)


def texts(items: list[Item]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


def everything(server: Plain) -> dict[bytes, Any]:
    """All keys with their values, but for the usage of owners, which is added up every ten seconds."""
    read = {
        b"hash": server.hgetall,
        b"string": server.get,
        b"list": lambda key: server.lrange(key, 0, -1),
        b"zset": lambda key: server.zrange(key, 0, -1, withscores=True),
    }
    return {key: read[server.type(key)](key) for key in server.keys("*") if not key.startswith(USAGE)}


def kept(server: Plain) -> list[bytes]:
    """All keys but tombstones, accounts and usage, which hold no text and go by themselves."""
    rest = accounts(server)
    return sorted(key for key in everything(server) if b":x:" not in key and key not in rest)


def turns(server: Plain) -> dict[bytes, int]:
    """The number of turns in each segment."""
    return {key: server.llen(key) for key in server.keys("*:s:*") if not key.endswith((b":refs", b":bytes"))}


def accounts(server: Plain) -> list[bytes]:
    """The keys of the accounts of what owners have stored."""
    return [*server.keys("*}:expires"), *server.keys("*}:sizes")]


def turn_sizes(server: Plain) -> dict[bytes, int]:
    """The size of each segment, as it is."""
    return {segment: sum(map(_turn_size, server.lrange(segment, 0, -1))) for segment in turns(server)}


def _turn_size(turn: bytes) -> int:
    return json_size(turn, RANDOM_LENGTH) if turn[RANDOM_LENGTH : RANDOM_LENGTH + 1] == b"Z" else len(turn)


async def used(state: State, owner: str = ALICE) -> int:
    """What the account of an owner says that it has stored."""
    keys = [f"rmw:{{b{owner}}}:{part}" for part in ("expires", "sizes")]
    _, stored = await state.client.script(load("state", "account")[0], keys, [0, 0])
    return int(stored)


def texts_in(keys: Plain) -> bytes:
    """All that is stored, in one piece; what is short is stored in the open."""
    return repr(everything(keys)).encode()
