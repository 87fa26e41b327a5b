"""Template filters that convert times, sizes and items to short texts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from .report import texts_of

PREVIEW = 20_000
"""Maximum number of characters of an item's text on a page. The rest is loaded on demand."""
MAX_JSON = 200_000  # maximum number of characters of a JSON document on a page

_IMAGE = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+")
_MAX_IMAGE = 4_000_000


def moment(seconds: float | None) -> str:
    """Return a time in UTC, as in `2026-01-15 03:00:00`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S") if seconds else ""


def clock(seconds: float | None) -> str:
    """Return a time in UTC without the date or, if it is not today, without the year."""
    text = moment(seconds)
    return text[11:] if text[:10] == moment(time.time())[:10] else text[5:]


def iso(seconds: float | None) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds") if seconds else ""


def duration(seconds: float | None) -> str:
    """Return a duration with a suitable unit: `87 ms`, `1.20 s`, `3 min` or `6 d 23 h`."""
    if seconds is None:
        return ""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms" if 0 < seconds < 0.00995 else f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    days, hours, minutes = int(seconds // 86400), int(seconds // 3600 % 24), int(seconds // 60 % 60)
    large, small = (f"{days} d", f"{hours} h") if days else (f"{hours} h", f"{minutes} min")
    if not days and not hours:
        return small
    return large if small.startswith("0") else f"{large} {small}"


def number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


def size(value: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value = value / 1024  # type: ignore[assignment]
    return f"{value:.1f} GiB"


def short(identifier: str, length: int = 8) -> str:
    """Shorten an id to its last `length` characters, or another name to its first ones."""
    return f"…{identifier[-length:]}" if identifier.startswith(("resp_", "conv_", "vs_", "file-")) else identifier[:length]


def pretty(value: Any) -> str:
    """Return indented JSON, cut off after `MAX_JSON` characters."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    return text if len(text) <= MAX_JSON else f"{text[:MAX_JSON]}\n… {len(text) - MAX_JSON:,} more characters"


def blocks(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of an item that a page shows, in order: texts (`text`, and `more` characters) and images (`image`)."""
    content = item.get("content")
    for part in content if isinstance(content, list) else [item]:
        if not isinstance(part, dict):
            continue
        if part.get("type") == "input_image":
            yield _image(part.get("image_url"))
        else:
            yield from _previews(texts_of(item if part is item else {"content": [part]}))


def _previews(texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    # Models often begin answers with blank lines, especially after reasoning.
    for text in filter(None, (text.lstrip("\n") for text in texts)):
        yield {"text": text[:PREVIEW], "more": max(0, len(text) - PREVIEW)}


def _image(url: Any) -> dict[str, Any]:
    if isinstance(url, str) and len(url) <= _MAX_IMAGE and _IMAGE.fullmatch(url):
        return {"image": url}
    return {"text": f"[image: {str(url)[:200]}]" if url else "[image]", "more": 0}


FILTERS = {
    "moment": moment,
    "clock": clock,
    "iso": iso,
    "duration": duration,
    "number": number,
    "size": size,
    "short": short,
    "pretty": pretty,
    "blocks": blocks,
}
