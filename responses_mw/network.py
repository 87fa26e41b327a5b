"""Address families, the TLS context, and descriptions of failed connections for logs and error messages."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterator
from functools import cache

__all__ = ["address_family", "failure_reason", "system_tls"]

_NO_ROUTE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH})
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING", "PACKET_LENGTH_TOO_LONG"})
_EXPIRED, _OTHER_NAMES = 10, frozenset({62, 64})
_UNTRUSTED = frozenset({18, 19, 20, 21})
"""Error codes of OpenSSL's certificate verification (X509_V_ERR_...)."""

_CLASSES: tuple[tuple[type[BaseException], str], ...] = (
    (socket.gaierror, "its name is not known"),
    (UnicodeError, "its name is not valid"),
    (ConnectionRefusedError, "the connection was refused"),
    (FileNotFoundError, "its socket does not exist"),
    (PermissionError, "this process may not connect to it"),
    (ConnectionError, "it closed the connection"),
)


def address_family(host: str) -> socket.AddressFamily:
    """Return the address family of a socket that listens on `host`, which is an IP address or a name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@cache
def system_tls() -> ssl.SSLContext:
    """Return a TLS context with the system's CA certificates. It is cached, because loading them takes several milliseconds."""
    return ssl.create_default_context()


def failure_reason(error: BaseException) -> str:
    """Return a clause that says why a connection failed, or "" if the reason is unknown.

    The reason is derived from `error`, its causes and its context. It never contains the server's name, because callers of the
    API may see it.
    """
    return next(filter(None, map(_reason, _causes(error))), "")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_fault(error.verify_code)
    if isinstance(error, ssl.SSLError):
        return "it does not speak TLS" if error.reason in _NO_TLS else f"TLS failed ({error.reason})"
    if isinstance(error, OSError) and error.errno in _NO_ROUTE:
        return "there is no route to it"
    return next((reason for kind, reason in _CLASSES if isinstance(error, kind)), "")


def _certificate_fault(code: int) -> str:
    if code == _EXPIRED:
        return "its certificate has expired"
    if code in _OTHER_NAMES:
        return "its certificate is for another name"
    return "its certificate is not trusted" if code in _UNTRUSTED else "its certificate is not valid"
