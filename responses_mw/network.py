"""Select address families, create the TLS context, and describe failed connections for logs and error messages."""

from __future__ import annotations

import errno
import socket
import ssl
from functools import cache

_ERRNOS = {
    **dict.fromkeys((errno.EHOSTUNREACH, errno.ENETUNREACH), "there is no route to it"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "this process may not open more files or connections"),
    errno.EADDRNOTAVAIL: "this machine has no address or no free port for a connection to it",
}
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING", "PACKET_LENGTH_TOO_LONG"})
_CERTIFICATE_FAULTS = {
    10: "has expired",
    **dict.fromkeys((18, 19, 20, 21), "is not trusted"),
    **dict.fromkeys((62, 64), "is for another name"),
}
"""Faults by the error code of OpenSSL's certificate verification (X509_V_ERR_...)."""
_CLASSES: tuple[tuple[type[BaseException], str], ...] = (
    (socket.gaierror, "its name is not known"),
    (UnicodeError, "its name is not valid"),
    (ConnectionRefusedError, "the connection was refused"),
    (FileNotFoundError, "its socket does not exist"),
    (PermissionError, "this process may not connect to it"),
    (ConnectionError, "it closed the connection"),
)


def address_family(host: str) -> socket.AddressFamily:
    """Return the address family for a socket that listens on `host`. A host name is treated like an IPv4 address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@cache
def system_tls() -> ssl.SSLContext:
    """Return a TLS context with the system's CA certificates. It is cached, because loading them takes several milliseconds."""
    return ssl.create_default_context()


def failure_reason(error: BaseException) -> str:
    """Return a clause that says why a connection failed, or "" if the reason is unknown.

    Search `error`, its causes and its context. The clause may be sent to clients, so it never contains the server's name.
    """
    cause: BaseException | None = error
    while cause is not None:
        if reason := _reason(cause):
            return reason
        cause = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause.__cause__ or cause.__context__
    return ""


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate {_CERTIFICATE_FAULTS.get(error.verify_code, 'is not valid')}"
    if isinstance(error, ssl.SSLError):
        return "it does not speak TLS" if error.reason in _NO_TLS else f"TLS failed ({error.reason})"
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return _ERRNOS[error.errno]
    return next((reason for kind, reason in _CLASSES if isinstance(error, kind)), "")
