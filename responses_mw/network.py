"""Select address families, create the TLS context, and describe failed connections for logs and error messages."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Iterator
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from .descriptors import report_shortage

_SHORTAGE = (errno.EMFILE, errno.ENFILE)
_ERRNOS = {
    **dict.fromkeys((errno.EHOSTUNREACH, errno.ENETUNREACH), "there is no route to it"),
    **dict.fromkeys(_SHORTAGE, "this process may not open more files or connections"),
    errno.EADDRNOTAVAIL: "this machine has no address or no free port for a connection to it",
}
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING", "PACKET_LENGTH_TOO_LONG"})
_CERTIFICATE_FAULTS = {
    10: "has expired",
    **dict.fromkeys((18, 19, 20, 21), "is not trusted"),
    **dict.fromkeys((62, 64), "is for another name"),
}
"""Faults by the error code of OpenSSL's certificate verification (X509_V_ERR_...)."""
_CLIENT_CERTIFICATE_FAULTS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it requires a client certificate",
    **dict.fromkeys(("SSLV3_ALERT_HANDSHAKE_FAILURE", "TLSV1_ALERT_HANDSHAKE_FAILURE"), "it may require a client certificate"),
    **dict.fromkeys(("SSLV3_ALERT_BAD_CERTIFICATE", "TLSV1_ALERT_UNKNOWN_CA"), "it does not trust our client certificate"),
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our client certificate has expired",
}
"""Faults by the reason of an `ssl.SSLError`, which names an alert that the server has sent."""
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


def is_dual_stack(host: str) -> bool:
    """Return whether a socket on `host` accepts IPv4 too: `::` is the address of all interfaces in both families."""
    return host == "::" and socket.has_dualstack_ipv6()


def listening_socket(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Return a socket that listens on `host` and `port`. Raises `OSError`."""
    dual = is_dual_stack(host)
    return socket.create_server((host, port), family=address_family(host), reuse_port=reuse_port, dualstack_ipv6=dual)


def check_ca_files() -> None:
    """Check the files that replace the system's CA certificates. Raises `ValueError` if they cannot be used.

    OpenSSL ignores a missing file, and then trusts no server.
    """
    paths = ssl.get_default_verify_paths()
    if (file := os.environ.get(paths.openssl_cafile_env)) is not None:
        try:
            _load_ca_file(file)
        except OSError as error:
            raise ValueError(f"{paths.openssl_cafile_env}: {file} {_file_fault(error)}") from None
    for folder in os.environ.get(paths.openssl_capath_env, "").split(os.pathsep):
        if folder and not Path(folder).is_dir():
            raise ValueError(f"{paths.openssl_capath_env}: {folder} is not a directory")


@cache
def _load_ca_file(file: str) -> None:
    """Load the certificates in `file`, at most once. Raises `OSError`."""
    ssl.create_default_context(cafile=file)


@cache
def system_tls() -> ssl.SSLContext:
    """Return a TLS context with the system's CA certificates. It is cached, because loading them takes several milliseconds."""
    return ssl.create_default_context()


def tls_context(
    ca_file: str | None = None, certificate: str | None = None, key: str | None = None, password: str | None = None
) -> ssl.SSLContext:
    """Return a TLS context that trusts the certificates in `ca_file`, by default the system's, and sends a client certificate.

    `certificate` is a PEM file with the client certificate and its chain. `key` is a PEM file with the private key, by default
    `certificate`, and `password` decrypts it. Raises `ValueError`, which names the file, if a file cannot be used.
    """
    if not (ca_file or certificate or key):
        return system_tls()
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ValueError(f"the CA file {ca_file} {_file_fault(error)}") from None
    if certificate or key:
        try:
            context.load_cert_chain(certificate or "", key, password or "")  # without a password, OpenSSL would ask for one
        except OSError as error:
            files = certificate if key is None else f"{certificate} with the key {key}"
            raise ValueError(f"the client certificate {files} {_file_fault(error)}") from None
    return context


def _file_fault(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        reasons = {"KEY_VALUES_MISMATCH": "has a key that does not fit", "BAD_DECRYPT": "has a key with another password"}
        return reasons.get(error.reason, "is not a valid PEM file")
    return f"cannot be read: {error.strerror}"


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Let the kernel check a silent TCP connection after 30 s, and close it after another 15 s without an answer.

    Firewalls then keep a connection on which a model computes its first token, and a server that is gone is noticed.
    """
    bound = transport.get_extra_info("socket")
    if bound is None or bound.family not in (socket.AF_INET, socket.AF_INET6):
        return
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):  # Windows and macOS lack some
        if hasattr(socket, name):
            bound.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_MAX_CAUSES = 32


def failure_reason(error: BaseException) -> str:
    """Return a clause that says why a connection failed, or "" if the reason is unknown.

    Search `error`, its causes and its context. The clause may be sent to clients, so it never contains the server's name.
    """
    return next(filter(None, map(_reason, _causes(error))), "")


def is_shortage(error: BaseException | None) -> bool:
    """Return whether a connection failed because this process or machine has no file descriptors left."""
    return any(isinstance(cause, OSError) and cause.errno in _SHORTAGE for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error`, its cause or context, and so on. They may form a circle, so their number is limited."""
    for _ in range(_MAX_CAUSES):
        if error is None:
            return
        yield error
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate {_CERTIFICATE_FAULTS.get(error.verify_code, 'is not valid')}"
    if isinstance(error, ssl.SSLError):
        if error.reason in _CLIENT_CERTIFICATE_FAULTS:
            return _CLIENT_CERTIFICATE_FAULTS[error.reason]
        return "it does not speak TLS" if error.reason in _NO_TLS else f"TLS failed ({error.reason})"
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        if error.errno in _SHORTAGE:
            report_shortage("an outgoing connection")
        return _ERRNOS[error.errno]
    return next((reason for kind, reason in _CLASSES if isinstance(error, kind)), "")


def is_loopback(host: str) -> bool:
    """Return whether an address, or the name `localhost`, reaches only this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def host_and_port(url: str) -> tuple[str, int]:
    """Return the host and the port of an HTTP URL."""
    parsed = urlsplit(url)
    return parsed.hostname or "", parsed.port or {"http": 80, "https": 443}[parsed.scheme]
