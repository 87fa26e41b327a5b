"""Which endpoint a session prefers: rendezvous hashing with bounded load.

1. The score of an endpoint for a session depends only on these two. A session goes to the endpoint with the highest score, so
   all replicas choose the same one without communication.
2. If an endpoint is removed, only its sessions move, and they spread evenly over the others. If one is added, it takes its
   share from all others.
3. An endpoint with more than `LOAD_FACTOR` times the mean number of requests in flight is skipped, and the session goes to the
   endpoint with the next highest score. Up to `FLOOR` requests are always allowed, so that parallel requests of a session stay
   together while the load is low.

(D. G. Thaler and C. V. Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998; V. Mirrokni, M. Thorup and
M. Zadimoghaddam, "Consistent Hashing with Bounded Loads", arXiv 1608.01350.)
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from math import ceil

LOAD_FACTOR = 1.25
FLOOR = 8
"""Number of requests in flight that an endpoint may have whatever the mean is."""

_BITS = 64
_MASK = (1 << _BITS) - 1
_FACTOR = 0xD6E8FEB86659FD93  # mixes 64 bits well (C. Wellons, "Prospecting for Hash Functions")


def hashed(text: str) -> int:
    """Return a 64-bit hash of `text`, which is the same in all processes."""
    return int.from_bytes(blake2b(text.encode(), digest_size=_BITS // 8).digest())


def session_key(*parts: str | bytes) -> str:
    """Return the key of the session that `parts` identify: a hash of 32 hexadecimal digits that does not reveal them."""
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


def score(session: int, endpoint: int) -> int:
    """Return the score of an endpoint for a session. Both are given as 64-bit hashes."""
    mixed = ((session ^ endpoint) * _FACTOR) & _MASK
    return ((mixed ^ (mixed >> 32)) * _FACTOR) & _MASK


def capacity(loads: Iterable[int]) -> int:
    """Return the maximum number of requests in flight at an endpoint, including the new one, given the `loads` of all."""
    numbers = list(loads)
    return max(FLOOR, ceil(LOAD_FACTOR * (sum(numbers) + 1) / len(numbers)))
