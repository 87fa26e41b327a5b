"""Whose a request is. Every stored object carries its owner, and is there for nobody else."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.datastructures import Headers

ANONYMOUS = "anonymous"
CONTAINER_OWNER_HEADER = "x-responses-mw-owner"
"""Tells the sandbox whose containers a call may use. No request can set it."""


def owner_of(headers: Headers, tenant_header: str | None) -> str:
    """The owner that ``headers`` tell: the trusted gateway's ``tenant_header`` where one is set, else the credential. It is a
    hash: neither can be read from what is stored. A changed credential is another owner."""
    # A header that stands there twice (a gateway added its own to the caller's) tells neither of the two.
    told = ", ".join(headers.getlist(tenant_header or "authorization"))
    if not told:
        return ANONYMOUS
    if not tenant_header:
        told = _canonical(told)
    return sha256(f"{'tenant' if tenant_header else 'credential'}\0{told}".encode()).hexdigest()[:32]


def _canonical(authorization: str) -> str:
    """The header as most write it: a scheme is the same in any case, and a credential behind however many spaces."""
    scheme, _, credential = authorization.strip().partition(" ")
    return f"{scheme.capitalize()} {credential.lstrip()}" if credential else scheme  # which is then the credential


def container_owner(owner: str) -> str:
    """The owner as the sandbox is told it: a hash, as a name may have characters that no header can."""
    return sha256(f"container\0{owner}".encode(errors="surrogatepass")).hexdigest()[:32]
