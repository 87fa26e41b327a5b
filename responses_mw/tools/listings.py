"""Lists of MCP servers' tools that come back with a request: whether they can be believed.

1. An ``mcp_list_tools`` item decides which tools are read-only, and so which may be called and which wait for an approval. It
   passes through the client's hands, and what a client put into its input is stored like any other item. So where an item
   stands tells nothing: a list is believed by its ``signature`` alone.
2. The signature is ours, for one owner and one server (its URL): a list of another server under the same label is none of it.
3. A list that is not believed is not refused. The server is asked for its own, as if there were none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from ..crypto import Sealer
from ..protocol.types import Item

_PURPOSE = "mcp_list_tools"
_MEMBERS = ("name", "input_schema", "description", "annotations")
_ANY_ORDER = orjson.OPT_SORT_KEYS


class Listings:
    """The lists among the ``items`` of one run of ``owner``; of several under one label the last counts. A list of more than
    ``most`` tools is none of ours."""

    def __init__(self, sealer: Sealer, owner: str, items: Iterable[Item], most: int) -> None:
        self._sealer = sealer
        self._owner = owner
        self._most = most
        self._latest = {item["server_label"]: item for item in items if item["type"] == "mcp_list_tools"}

    def believed(self, label: str, url: str) -> list[dict[str, Any]] | None:
        """The tools that the server at ``url`` listed for this owner before; None where nothing proves it."""
        item = self._latest.get(label)
        if item is None or len(item["tools"]) > self._most:
            return None
        signature, tools = item.get("signature"), _told(item["tools"])
        if not isinstance(signature, str):
            return None
        is_ours = self._sealer.is_signed(signature, _signed(url, tools), purpose=_PURPOSE, owner=self._owner)
        return tools if is_ours else None

    def made(self, label: str, url: str, tools: Sequence[dict[str, Any]]) -> Item | None:
        """The item for ``tools``, which the server at ``url`` has just listed; None where the history tells the same."""
        item = self._latest.get(label)
        if item is not None and len(item["tools"]) == len(tools) and _signed(url, item["tools"]) == _signed(url, tools):
            return None
        signature = self._sealer.sign(_signed(url, tools), purpose=_PURPOSE, owner=self._owner)
        return {"server_label": label, "tools": list(tools), "signature": signature}


def _told(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools with what counts of them only: clients add members, and nulls for those that are missing."""
    return [{name: tool[name] for name in _MEMBERS if tool.get(name) is not None} for tool in tools]


def _signed(url: str, tools: Sequence[dict[str, Any]]) -> bytes:
    return orjson.dumps([url, _told(tools)], option=_ANY_ORDER)
