"""Search vector stores for the tool `file_search`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..protocol.types import Tool
from ..state.vector_stores import StoreRecords
from ..tools.stores import StoreSearch
from .filters import parse_filter
from .ranking import Found, parse_ranking

if TYPE_CHECKING:  # needs numpy
    from .retrieval import Retrieval

_RESULTS = 10  # maximum number of results, unless the tool sets another one


class ToolSearch(StoreSearch):
    """Searches vector stores with the options of a `file_search` tool."""

    def __init__(self, records: StoreRecords, retrieval: Retrieval) -> None:
        self._records = records
        self._retrieval = retrieval

    def check(self, tool: Tool, path: str) -> None:
        _options(tool, path)

    async def has_store(self, store_id: str, owner: str) -> bool:
        return await self._records.exists(store_id, owner)

    async def search(self, tool: Tool, queries: Sequence[str], owner: str, caller: Any) -> Sequence[Found]:
        stores, options = tool["vector_store_ids"], _options(tool, "tools")
        return await self._retrieval.search(stores, owner, queries, **options, caller=caller)


def _options(tool: Tool, path: str) -> dict[str, Any]:
    return {
        "filters": parse_filter(tool["filters"], f"{path}.filters") if "filters" in tool else None,
        "maximum": tool.get("max_num_results", _RESULTS),
        "ranking": parse_ranking(tool.get("ranking_options", {}), f"{path}.ranking_options"),
    }
