"""Whose a request is. Every stored object carries its owner, and is there for nobody else."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

ANONYMOUS = "anonymous"


def owner_of(headers: Mapping[str, str], tenant_header: str | None) -> str:
    """The owner that ``headers`` (names in lower case) tell: the trusted gateway's ``tenant_header`` where one is set, else the
    credential. It is a hash: neither can be read from what is stored. A changed credential is another owner."""
    told = headers.get(tenant_header.lower()) if tenant_header else headers.get("authorization")
    if not told:
        return ANONYMOUS
    return sha256(f"{'tenant' if tenant_header else 'credential'}\0{told}".encode()).hexdigest()[:32]
