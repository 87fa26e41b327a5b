"""Check the bodies of requests for vector stores, and convert stores, files and batches to the API's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..files.chunks import MAX_TOKENS, MIN_TOKENS, Chunking
from ..files.filters import parse_filter
from ..files.ranking import MAX_RESULTS, Found, parse_ranking
from ..files.vector_stores import Addition
from ..protocol import checks
from ..protocol.request.create import check_metadata
from ..state.store_file_records import Attributes, FileBatch, StoreFile
from ..state.vector_stores import FileCounts, VectorStore

MAX_NAME = 256
MAX_DESCRIPTION = 1024
MAX_DAYS = 365
MAX_BATCH = 2000
"""Maximum number of files that a request may add."""
MAX_ATTRIBUTES, MAX_KEY, MAX_VALUE = 16, 64, 512
STATUSES = frozenset({"in_progress", "completed", "failed", "cancelled"})

# -- bodies --------------------------------------------------------------------------------------------------------------


def attributes(value: Any, path: str) -> Attributes:
    """Check the attributes of a file, and omit those that are null. Raises `BadRequest` if they are invalid."""
    found = checks.mapping(value, path)
    if len(found) > MAX_ATTRIBUTES:
        expected = f"Expected at most {MAX_ATTRIBUTES}, but got {len(found)} instead."
        checks.invalid(path, f"too many properties. {expected}", "object_above_max_properties")
    for key, one in found.items():
        checks.string(key, path, max_length=MAX_KEY)
        if isinstance(one, str):
            checks.string(one, f"{path}.{key}", max_length=MAX_VALUE)
        elif not isinstance(one, int | float):  # a boolean is an int
            checks.wrong_type(f"{path}.{key}", "a string, a number or a boolean", one)
    return found


_STATIC = checks.closed_object(
    {
        "max_chunk_size_tokens": partial(checks.integer, minimum=MIN_TOKENS, maximum=MAX_TOKENS),
        "chunk_overlap_tokens": partial(checks.integer, minimum=0),
    }
)
_STRATEGY = checks.by_type(
    {
        "auto": checks.closed_object({"type": checks.string}),
        "static": checks.closed_object({"type": checks.string, "static": _STATIC}),
    }
)


def chunking(value: Any, path: str) -> Chunking:
    """Parse the `chunking_strategy` of a request. Raises `BadRequest` if it is invalid."""
    strategy = _STRATEGY(value, path)
    if strategy["type"] == "auto":
        return Chunking()
    tokens, overlap = strategy["static"]["max_chunk_size_tokens"], strategy["static"]["chunk_overlap_tokens"]
    if overlap > tokens // 2:
        checks.invalid(f"{path}.static.chunk_overlap_tokens", "it must not exceed half of 'max_chunk_size_tokens'.")
    return Chunking(tokens, overlap)


def _lifetime(value: Any, path: str) -> int:
    """Return the number of days in `expires_after`. Raises `BadRequest` if it is invalid."""
    days = partial(checks.integer, minimum=1, maximum=MAX_DAYS)
    return int(checks.closed_object({"anchor": checks.among("last_active_at"), "days": days})(value, path)["days"])


_FILE_IDS = checks.each(checks.string, max_length=MAX_BATCH)
_name = partial(checks.string, max_length=MAX_NAME)
_description = partial(checks.string, max_length=MAX_DESCRIPTION)
_FILE = checks.closed_object({"file_id": checks.string}, attributes=attributes, chunking_strategy=chunking)
_FILES = checks.each(_FILE, max_length=MAX_BATCH)

MAX_QUERIES = 16
MAX_QUERY = 8192
"""Maximum length of a query in characters."""
_query = partial(checks.string, max_length=MAX_QUERY)


def _queries(value: Any, path: str) -> list[str]:
    if isinstance(value, str):
        return [_query(value, path)]
    queries = checks.each(_query, max_length=MAX_QUERIES)(checks.string_or_array(value, path), path)
    if not queries:
        checks.invalid(path, "the array is empty.", "empty_array")
    return queries


CREATE: Mapping[str, checks.Check] = {
    "chunking_strategy": chunking,
    "description": _description,
    "expires_after": _lifetime,
    "file_ids": _FILE_IDS,
    "metadata": check_metadata,
    "name": _name,
}
UPDATE: Mapping[str, checks.Check] = {
    "description": _description,
    "expires_after": _lifetime,
    "metadata": check_metadata,
    "name": _name,
}
ADD: Mapping[str, checks.Check] = {
    "attributes": attributes,
    "chunking_strategy": chunking,
    "file_id": checks.string,
}
DESCRIBE: Mapping[str, checks.Check] = {"attributes": attributes}
ADD_BATCH: Mapping[str, checks.Check] = {
    "attributes": attributes,
    "chunking_strategy": chunking,
    "file_ids": _FILE_IDS,
    "files": _FILES,
}
SEARCH: Mapping[str, checks.Check] = {
    "filters": parse_filter,
    "max_num_results": partial(checks.integer, minimum=1, maximum=MAX_RESULTS),
    "query": _queries,
    "ranking_options": parse_ranking,
    "rewrite_query": checks.boolean,
}
"""`SEARCH` and the mappings above have the checks for the members of each endpoint's body."""


def parse(value: Any, members: Mapping[str, checks.Check], *, nulls: bool = False) -> dict[str, Any]:
    """Check the members of a body, and omit those that are null. With `nulls`, return these as None.

    Raises `BadRequest` if a member is unknown or invalid.
    """
    sent = value if nulls and isinstance(value, dict) else checks.body(value)
    for name in sent:
        if name not in members:
            checks.unknown(name)
    return {name: None if one is None else members[name](one, name) for name, one in sent.items()}


def changes(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a store that the parsed body of an update changes. A name that is null stays unchanged."""
    fields = {name: body[name] for name in ("name", "description") if body.get(name) is not None}
    if "metadata" in body:
        fields["metadata"] = body["metadata"] or {}
    if "expires_after" in body:
        fields["days"] = body["expires_after"]
    return fields


def additions(body: dict[str, Any]) -> list[Addition]:
    """Return the files in `file_ids` of a parsed body, without duplicates."""
    return [_addition({**body, "file_id": file_id}) for file_id in dict.fromkeys(body.get("file_ids", []))]


def addition(body: dict[str, Any]) -> Addition:
    """Return the file in `file_id` of a parsed body. Raises `BadRequest` if it is missing."""
    if "file_id" not in body:
        checks.missing("file_id")
    return _addition(body)


def _addition(body: dict[str, Any]) -> Addition:
    return Addition(body["file_id"], body.get("attributes", {}), body.get("chunking_strategy", Chunking()))


def batch_additions(body: dict[str, Any]) -> list[Addition]:
    """Return the files of a batch, without duplicates.

    Raises `BadRequest` if there are none, or if `files` is combined with members for all files.
    """
    if "files" in body:
        for name in ("file_ids", "attributes", "chunking_strategy"):
            if name in body:
                checks.invalid(name, "it cannot be combined with 'files'.")
    elif "file_ids" not in body:
        checks.missing("file_ids")
    name = "files" if "files" in body else "file_ids"
    if not body[name]:
        checks.invalid(name, "the array is empty.", "empty_array")
    return list({one["file_id"]: _addition(one) for one in body["files"]}.values()) if "files" in body else additions(body)


# -- objects -------------------------------------------------------------------------------------------------------------


def store_object(store: VectorStore) -> dict[str, Any]:
    status = "expired" if store.is_expired else "in_progress" if store.counts.in_progress else "completed"
    return {
        "id": store.id,
        "object": "vector_store",
        "created_at": store.created_at,
        "name": store.name,
        "description": store.description,
        "usage_bytes": store.size,
        "file_counts": _counts(store.counts),
        "status": status,
        "expires_after": None if store.days is None else {"anchor": "last_active_at", "days": store.days},
        "expires_at": store.expires_at,
        "last_active_at": store.active_at,
        "metadata": store.metadata,
    }


def file_object(file: StoreFile) -> dict[str, Any]:
    tokens, overlap = file.chunking["tokens"], file.chunking["overlap"]
    return {
        "id": file.id,
        "object": "vector_store.file",
        "usage_bytes": file.size,
        "created_at": file.created_at,
        "vector_store_id": file.store_id,
        "status": file.status,
        "last_error": None if file.error is None else {"code": file.error[0], "message": file.error[1]},
        "chunking_strategy": {
            "type": "static",
            "static": {"max_chunk_size_tokens": tokens, "chunk_overlap_tokens": overlap},
        },
        "attributes": file.attributes,
    }


def batch_object(batch: FileBatch) -> dict[str, Any]:
    return {
        "id": batch.id,
        "object": "vector_store.files_batch",
        "created_at": batch.created_at,
        "vector_store_id": batch.store_id,
        "status": batch.status,
        "file_counts": _counts(batch.counts),
    }


def search_page(queries: Sequence[str], found: Sequence[Found]) -> dict[str, Any]:
    """Return the results of a search as the API's page."""
    data = [
        {
            "file_id": one.file_id,
            "filename": one.filename,
            "score": one.score,
            "attributes": one.attributes,
            "content": [{"type": "text", "text": one.text}],
        }
        for one in found
    ]
    page = {"object": "vector_store.search_results.page", "search_query": list(queries), "data": data}
    return {**page, "has_more": False, "next_page": None}


def _counts(counts: FileCounts) -> dict[str, int]:
    return {**counts._asdict(), "total": counts.total}


def page_of(data: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return the API's object for a page of a list."""
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": has_more}
