"""Stored responses and items, created as a run creates them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from responses_mw.ids import RANDOM_LENGTH, RunIds, random_part
from responses_mw.lua import load
from responses_mw.state.schema import json_size, response_address

if TYPE_CHECKING:
    from responses_mw.protocol.types import Item
    from responses_mw.state import Chain, State
    from responses_mw.state.schema import Address
    from tests.support.valkey import Plain

ALICE, BOB = "a" * 64, "b" * 64
USAGE = b"rmw:{usage}"


def address(response_id: str) -> Address:
    """Return the address of the keys of a response."""
    return response_address(response_id)


def message(item_id: str, role: str, text: str) -> Item:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "id": item_id, "role": role, "content": [{"type": kind, "text": text}]}


def made(chain: Chain, text: str, status: str = "completed") -> tuple[dict[str, Any], list[Item]]:
    """Return a response with the answer `text!`, and its input `text`."""
    ids = RunIds(chain.tag)
    given = [message(ids.item("msg"), "user", text)]
    output = [message(ids.item("msg"), "assistant", f"{text}!")]
    document: dict[str, Any] = {"id": ids.response, "object": "response", "status": status, "output": output, "model": "m"}
    if chain.conversation is not None:
        document["conversation"] = {"id": chain.conversation}
    return document, given


async def respond(state: State, chain: Chain, text: str, owner: str = ALICE, status: str = "completed") -> str:
    """Commit such a response, and return its id."""
    document, given = made(chain, text, status)
    await state.responses.commit(chain, document, given, owner, random_part())
    return str(document["id"])


async def continued(state: State, response_id: str, text: str, owner: str = ALICE) -> str:
    """Commit a response that continues another, and return its id."""
    return await respond(state, await state.responses.chain(response_id, owner), text, owner)


async def history(state: State, response_id: str, owner: str = ALICE) -> list[str]:
    """Return the texts of a history up to and including a response."""
    return texts((await state.responses.chain(response_id, owner)).items)


def texts(items: list[Item]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


def everything(server: Plain) -> dict[bytes, Any]:
    """Return all keys with their values, except the usage of owners, which is updated every ten seconds."""
    read = {
        b"hash": server.hgetall,
        b"string": server.get,
        b"list": lambda key: server.lrange(key, 0, -1),
        b"zset": lambda key: server.zrange(key, 0, -1, withscores=True),
    }
    return {key: read[server.type(key)](key) for key in server.keys("*") if not key.startswith(USAGE)}


def kept(server: Plain) -> list[bytes]:
    """Return all keys except tombstones, accounts and usage, which contain no text and expire."""
    rest = accounts(server)
    return sorted(key for key in everything(server) if b":x:" not in key and key not in rest)


def turns(server: Plain) -> dict[bytes, int]:
    """Return the number of turns in each segment."""
    return {key: server.llen(key) for key in server.keys("*:s:*") if not key.endswith((b":refs", b":bytes"))}


def accounts(server: Plain) -> list[bytes]:
    """Return the keys of the accounts of stored bytes."""
    return [*server.keys("*}:expires"), *server.keys("*}:sizes")]


def turn_sizes(server: Plain) -> dict[bytes, int]:
    """Return the actual size of each segment."""
    return {segment: sum(map(_turn_size, server.lrange(segment, 0, -1))) for segment in turns(server)}


def _turn_size(turn: bytes) -> int:
    return json_size(turn, RANDOM_LENGTH) if turn[RANDOM_LENGTH : RANDOM_LENGTH + 1] == b"Z" else len(turn)


async def used(state: State, owner: str = ALICE) -> int:
    """Return the number of stored bytes in the account of an owner."""
    keys = [f"rmw:{{b{owner}}}:{part}" for part in ("expires", "sizes")]
    _, stored = await state.client.script(load("state", "account")[0], keys, [0, 0])
    return int(stored)


def texts_in(keys: Plain) -> bytes:
    """Return everything that is stored, as one string. Short values are stored uncompressed."""
    return repr(everything(keys)).encode()
