"""Requests in flight at the endpoints of a pool."""

from __future__ import annotations

from responses_mw.upstream.pool import ANY, Lease, Pool, Wanted, choose


def lease(pool: Pool, session: str = "", wanted: Wanted = ANY) -> Lease:
    """Return a request in flight at the endpoint that would get it."""
    return Lease(pool, choose(pool.candidates(wanted), session))
