"""A page of items as the API gives it."""

from __future__ import annotations

from typing import Any

from ..state import Page


def listed(page: Page) -> dict[str, Any]:
    """The list object of the reference."""
    items = page.items
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": page.has_more,
    }
