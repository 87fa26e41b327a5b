"""Cursor paging over a list that is at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import BadRequest
from .values import Item, Page

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["no_such_cursor", "page"]


def page(items: Sequence[Item], *, after: str | None, before: str | None, limit: int, order: str) -> Page:
    """``limit`` items, in the ``order`` (``asc`` or ``desc``), between those with the ids ``after`` and ``before``.

    They are the first that there are; with ``before`` alone the last, which is the page before that item. ``items`` are in
    ascending order. Raises BadRequest for a cursor that is not among them.
    """
    listed = list(items) if order == "asc" else list(reversed(items))
    ids = [item.get("id") for item in listed]
    first = _position(ids, after, "after") + 1 if after else 0
    end = _position(ids, before, "before") if before else len(listed)
    between = listed[first:end]
    some = between[-limit:] if before and not after else between[:limit]
    return Page(some, has_more=len(between) > limit)


def no_such_cursor(param: str, item_id: str) -> BadRequest:
    return BadRequest(f"Item with id '{item_id}' is not in this list.", param=param, code="invalid_cursor")


def _position(ids: Sequence[str | None], item_id: str, param: str) -> int:
    if item_id not in ids:
        raise no_such_cursor(param, item_id)
    return ids.index(item_id)
