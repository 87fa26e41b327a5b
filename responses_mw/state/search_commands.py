"""The commands with which the search module finds chunks, and the replies to them.

A search has two halves: by the vector, and by the words. FT.HYBRID of Redis 8.4 does both. It merges the halves by reciprocal
rank, and its window and limit are so large that the reply has all chunks of both. It is documented at
https://redis.io/docs/latest/commands/ft.hybrid/, and in RediSearch's repository in `src/hybrid/hybrid_exec.c` and
`tests/pytests/test_hybrid.py`. Replies are maps in RESP3, and lists in RESP2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from .client import Value
from .errors import StateUnavailable

TIMEOUT = 10_000  # ms; by default, the module returns incomplete results after 500 ms

Command: TypeAlias = tuple[Value, ...]


class Restriction(NamedTuple):
    """The blocks that may be found: only the named ones or, if `excludes` is true, all but these."""

    blocks: Sequence[str] = ()
    excludes: bool = True

    @property
    def query(self) -> str:
        if not self.blocks:
            return "*"
        names = "|".join(block.replace("-", "\\-").replace(":", "\\:") for block in self.blocks)
        return f"{'-' if self.excludes else ''}@f:{{{names}}}"


class WordQuery(NamedTuple):
    """Words to search for. A chunk with one of `required` is found. Those of `others` only raise its score."""

    required: Sequence[str]
    others: Sequence[str] = ()

    @property
    def query(self) -> str:
        optional = f" ~@t:({'|'.join(self.others)})" if self.others else ""
        return f"@t:({'|'.join(self.required)}){optional}"


class ChunkQuery(NamedTuple):
    """A search for the chunks with the most similar vectors, and for those with the highest scores for the words (BM25).

    vector   in float32; None if there is no search by vector
    words    None if there is no search by words
    limit    maximum number of chunks that each half finds
    effort   number of candidates that HNSW looks at
    """

    vector: bytes | None
    words: WordQuery | None
    limit: int
    effort: int
    restriction: Restriction = Restriction()

    @property
    def _word_query(self) -> str:
        assert self.words is not None
        if not self.restriction.blocks:
            return self.words.query
        return f"({self.restriction.query})=>{{$weight: 0}} {self.words.query}"  # else a matching block adds to the score

    def searches(self, index: str) -> list[Command]:
        """Return a command for each half."""
        found = list[Command]()
        last: Command = ("NOCONTENT", "LIMIT", 0, self.limit, "TIMEOUT", TIMEOUT, "DIALECT", 2)
        if self.vector is not None:
            chosen = f"({self.restriction.query})" if self.restriction.blocks else "*"
            query = f"{chosen}=>[KNN {self.limit} @v $q EF_RUNTIME {self.effort} AS d]"
            found.append(("FT.SEARCH", index, query, "PARAMS", 2, "q", self.vector, "SORTBY", "d", *last))
        if self.words is not None:
            found.append(("FT.SEARCH", index, self._word_query, "SCORER", "BM25STD", *last))
        return found

    def hybrid(self, index: str) -> Command:
        """Return the command that does both halves."""
        assert self.vector is not None
        chosen: Command = ("FILTER", self.restriction.query) if self.restriction.blocks else ()
        return (
            *("FT.HYBRID", index, "SEARCH", self._word_query, "SCORER", "BM25STD"),
            *("VSIM", "@v", "$q", "KNN", 4, "K", self.limit, "EF_RUNTIME", self.effort, *chosen),
            *("COMBINE", "RRF", 2, "WINDOW", self.limit, "LIMIT", 0, 2 * self.limit),
            *("PARAMS", 2, "q", self.vector, "TIMEOUT", TIMEOUT),
        )


# These raise StateUnavailable if the module has not searched everything, and KeyError, TypeError or ValueError if the reply has
# another form.


def total(reply: Any) -> int:
    """Return the number of results of FT.SEARCH."""
    return int(_members(reply)["total_results"] if isinstance(reply, dict) else reply[0])


def keys(reply: Any) -> list[bytes]:
    """Return the keys that FT.SEARCH has found."""
    if not isinstance(reply, dict):
        return list(reply[1:])
    members = _members(reply)
    _check(members["warning"])
    return [_members(row)["id"] for row in members["results"]]


def hybrid_keys(reply: Any) -> list[bytes]:
    """Return the keys that FT.HYBRID has found."""
    members = _members(reply)
    _check(members["warnings"])
    return [_members(row)["__key"] for row in members["results"]]


def _check(warnings: Sequence[bytes]) -> None:
    if warnings:
        raise StateUnavailable(f"the search module has not searched everything: {warnings[0]!r}")


def _members(reply: Any) -> dict[str, Any]:
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {name.decode() if isinstance(name, bytes) else str(name): value for name, value in pairs}
