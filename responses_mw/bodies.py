"""Bodies of other servers' answers, read whole and within a bound.

They are asked for uncompressed, and taken no other way: a few bytes can expand to any number.
"""

from __future__ import annotations

import httpx

MIB = 1024 * 1024
MOST = 64 * MIB
"""Bytes of an answer that is read whole. Nothing that is asked for comes near it."""
MOST_OF_A_FAULT = MIB


class BodyRefused(Exception):
    """What is wrong with a body; the text follows "sent"."""


def check_plain(response: httpx.Response) -> None:
    """Raises ``BodyRefused`` for a body that is compressed."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise BodyRefused(f"a body with the content-encoding '{encoding[:32]}', which was not asked for")


async def read_whole(response: httpx.Response, most: int = MOST) -> bytes:
    """The body of an answer, whose stream has not been read yet; the caller closes it. Raises ``BodyRefused``, and what the
    stream raises."""
    check_plain(response)
    parts: list[bytes] = []
    size = 0
    async for data in response.aiter_raw():
        size += len(data)
        if size > most:
            raise BodyRefused(f"more than {most} bytes")
        parts.append(data)
    return b"".join(parts)
