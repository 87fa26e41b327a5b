"""Whose a request is. Every stored object carries its owner, and is there for nobody else."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from .errors import BadRequest

if TYPE_CHECKING:
    from starlette.datastructures import Headers

ANONYMOUS = "anonymous"
CONTAINER_OWNER_HEADER = "x-responses-mw-owner"
"""Tells the sandbox whose containers a call may use. No request can set it."""


def owner_of(headers: Headers, tenant_header: str | None) -> str:
    """The owner that ``headers`` tell: the trusted gateway's ``tenant_header`` where one is set, else the credential. It is a
    hash: neither can be read from what is stored. A changed credential is another owner.

    Raises ``BadRequest`` where the tenant is missing: a gateway that forgot it must not have everybody share one owner.
    """
    if tenant_header:
        return _hashed("tenant", _tenant(headers, tenant_header))
    # A credential that stands there twice tells neither of the two.
    told = ", ".join(headers.getlist("authorization"))
    return _hashed("credential", _canonical(told)) if told else ANONYMOUS


def _tenant(headers: Headers, name: str) -> str:
    """The one value of the header. Two of them are the gateway's and one that its client made up."""
    values = headers.getlist(name)
    if len(values) == 1 and values[0].strip():
        return values[0]
    fault = "is sent more than once" if len(values) > 1 else "is empty" if values else "is missing"
    message = f"The header '{name}', by which this server knows whose a request is, {fault}."
    raise BadRequest(message, param=name, code="invalid_tenant_header")


def _hashed(kind: str, told: str) -> str:
    return sha256(f"{kind}\0{told}".encode()).hexdigest()[:32]


def _canonical(authorization: str) -> str:
    """The header as most write it: a scheme is the same in any case, and a credential behind however many spaces."""
    scheme, _, credential = authorization.strip().partition(" ")
    return f"{scheme.capitalize()} {credential.lstrip()}" if credential else scheme  # which is then the credential


def container_owner(owner: str) -> str:
    """The owner as the sandbox is told it: a hash, as a name may have characters that no header can."""
    return sha256(f"container\0{owner}".encode(errors="surrogatepass")).hexdigest()[:32]
