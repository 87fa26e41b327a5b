"""Define the ids of vector stores, their keys in Redis, and the decoding of their records.

All records of an owner are in the slot of the owner's files, so the id of another owner's store is simply not found:

    rmw:{f<owner>}:vs                       index of the owner's stores
    rmw:{f<owner>}:vs:<store>               a store; also the numbers of its files by status, and the version of its content
    rmw:{f<owner>}:vs:<store>:files         index of its files
    rmw:{f<owner>}:vs:<store>:f:<file>      a file in it
    rmw:{f<owner>}:vs:<store>:b:<batch>     a batch of files; with `:files`, the index of its files
    rmw:{f<owner>}:of:<file>                the stores that have the file

The chunks are in a slot of the store (`blocks.py`).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ..errors import BadRequest
from ..ids import RANDOM_LENGTH
from ..lua import load
from .client import Client
from .errors import Damaged, Missing, NewerRecord, OverBound, Reply, check_answer
from .models import no_such_cursor
from .schema import VERSION, reading

[_LIST] = load("state", "store_list", library="store_lib")

Fields: TypeAlias = dict[str, bytes]

DAY = 24 * 3600
_BATCH = 500  # number of records that one script call reads
_NAME = re.compile(rf"(vs_|vsfb_|file-)([a-z0-9]{{{RANDOM_LENGTH}}})")
DAMAGED_FIELDS: Fields = {"damaged": b""}
_KINDS = {"vs_": "Vector store", "vsfb_": "File batch", "file-": "File"}


class StoreKeys(NamedTuple):
    """The keys of the records of an owner's store. `name` is its id without the prefix."""

    owner: str
    name: str

    @classmethod
    def of(cls, store_id: str, owner: str) -> StoreKeys:
        """Return the keys of a store. Raises Missing if the id is malformed."""
        return cls(owner, name_of(store_id, "vs_"))

    @property
    def tag(self) -> str:
        return f"f{self.owner}"

    @property
    def stores(self) -> str:
        return index_of_stores(self.owner)

    @property
    def record(self) -> str:
        return f"{self.stores}:{self.name}"

    @property
    def files(self) -> str:
        return f"{self.record}:files"

    @property
    def tombstone(self) -> str:
        return f"rmw:{{f{self.owner}}}:x:{self.name}"

    def file(self, file_name: str = "") -> str:
        return f"{self.record}:f:{file_name}"

    def batch(self, batch_name: str) -> str:
        return f"{self.record}:b:{batch_name}"


def index_of_stores(owner: str) -> str:
    return f"rmw:{{f{owner}}}:vs"


def stores_of_file(owner: str, file_name: str) -> str:
    return f"rmw:{{f{owner}}}:of:{file_name}"


def name_of(object_id: str, prefix: str) -> str:
    """Return an id without its prefix. Raises Missing if the id is malformed."""
    match = _NAME.fullmatch(object_id)
    if match is None or match[1] != prefix:
        raise Missing(_KINDS[prefix], object_id)
    return match[2]


class Range(NamedTuple):
    """A part of a list: up to `limit` records after the id `after` and before the id `before`, in `order` (`asc` or `desc`).

    If only `before` is set, they are the records right before it.
    """

    after: str | None = None
    before: str | None = None
    limit: int = 20
    order: str = "desc"


class Index(NamedTuple):
    """A sorted set of names and their records. `record` is the prefix of the records' keys, and `prefix` that of their ids."""

    client: Client
    key: str
    record: str
    prefix: str

    async def select(
        self, wanted: Range, admits: Callable[[Fields], bool] | None = None
    ) -> tuple[list[tuple[str, Fields]], bool]:
        """Return the names and fields of the records in a range, and whether there are more.

        If `admits` is given, skip records for which it returns false. Raises BadRequest if an id of the range is unknown.
        """
        after, before, limit, order = wanted
        batch = _BATCH if admits is not None else min(_BATCH, limit + 1)
        if before and not after:
            backwards = self.each(before, "asc" if order == "desc" else "desc", "before", batch)
            found, has_more = await _first(backwards, limit, admits)
            return found[::-1], has_more
        stop = _cursor(before, self.prefix, "before") if before else None
        if stop is not None and await self.client.command("ZSCORE", self.key, stop) is None:
            raise no_such_cursor("before", str(before))
        return await _first(self.each(after, order, batch=batch), limit, admits, stop)

    async def each(
        self, after: str | None = None, order: str = "asc", param: str = "after", batch: int = _BATCH
    ) -> AsyncIterator[tuple[str, Fields]]:
        """Yield the name and fields of each record after the id `after`. Raises BadRequest if that id is unknown."""
        last: str | bytes = _cursor(after, self.prefix, param) if after else ""
        while True:
            reply = await self.client.script(_LIST, [self.key], [last, batch, order, self.record])
            if reply is None:
                raise no_such_cursor(param, str(after))
            for name, values in zip(reply[::2], reply[1::2], strict=True):
                yield name.decode(errors="replace"), fields_in(values)
            if len(reply) < 2 * batch:
                return
            last, batch = reply[-2], _BATCH


async def _first(
    records: AsyncIterator[tuple[str, Fields]], limit: int, admits: Callable[[Fields], bool] | None, stop: str | None = None
) -> tuple[list[tuple[str, Fields]], bool]:
    """Return up to `limit` of the records before the one named `stop`, and whether there are more."""
    found = list[tuple[str, Fields]]()
    async for name, fields in records:
        if name == stop:
            break
        if fields and (admits is None or admits(fields)):  # a name without fields belongs to a record that has expired
            if len(found) == limit:
                return found, True
            found.append((name, fields))
    return found, False


def _cursor(object_id: str, prefix: str, param: str) -> str:
    try:
        return name_of(object_id, prefix)
    except Missing:
        raise no_such_cursor(param, object_id) from None


def fields_of(values: Mapping[bytes, bytes]) -> Fields:
    """Return the fields of a record from the reply to HGETALL. Raises NewerRecord if a newer release wrote it."""
    with reading("record"):
        found = {name.decode(): value for name, value in values.items()}
        if int(found.get("v", b"0")) > VERSION:
            raise NewerRecord
        return found


def fields_in(values: Sequence[bytes]) -> Fields:
    """Return the fields of a record from the reply of a script. Those of a damaged record are no valid record.

    Raises NewerRecord if a newer release wrote it.
    """
    try:
        return fields_of(dict(zip(values[::2], values[1::2], strict=True)))
    except Damaged:
        return DAMAGED_FIELDS


def check_verdict(verdict: bytes, object_id: str, bound: str = "") -> None:
    """Raise the error for a script's verdict about a vector store. `bound` is the message of `OverBound`."""
    if verdict == Reply.EXPIRED:
        raise BadRequest(f"Vector store with id '{object_id}' has expired.", code="vector_store_expired")
    if verdict == Reply.BOUND:
        raise OverBound(bound)
    check_answer(verdict, "Vector store", object_id)


def integer(fields: Fields, name: str) -> int:
    return int(fields.get(name, b"0"))


def text(fields: Fields, name: str) -> str:
    return fields.get(name, b"").decode()
