"""Redirects of the upstream, which must lead to this server and must not tell the upstream's address."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias
from urllib.parse import urlsplit, urlunsplit

BasePaths: TypeAlias = Mapping[str, bytes | None]
"""The base paths of the upstream's endpoints by host name. None if the host is an endpoint of another upstream."""

_LOCATIONS = frozenset({b"location", b"content-location"})


def own_locations(
    headers: Sequence[tuple[bytes, bytes]], prefix: bytes, base_path: bytes, base_paths: Callable[[], BasePaths]
) -> Sequence[tuple[bytes, bytes]]:
    """Return the headers of a response, with redirects to this server instead of the upstream.

    A redirect to a path that this server does not forward to the upstream is removed. Redirects to other servers are kept.
    `prefix` is the path of this server, and `base_path` that of the endpoint which sent the response.
    """
    if all(name.lower() not in _LOCATIONS for name, _ in headers):
        return headers
    hosts = base_paths()
    located = (
        (name, _own_location(value, prefix, base_path, hosts) if name.lower() in _LOCATIONS else value)
        for name, value in headers
    )
    return [(name, value) for name, value in located if value is not None]


def _own_location(location: bytes, prefix: bytes, base_path: bytes, hosts: BasePaths) -> bytes | None:
    try:
        url = urlsplit(location)
        host = (url.hostname or b"").decode("latin-1")
    except ValueError:
        return None
    if not (host in hosts if url.netloc else url.path.startswith(b"/")):
        return location
    base = hosts[host] if url.netloc else base_path
    path = url.path or b"/"
    if base is None or (base and not (path + b"/").startswith(base + b"/")):
        return None
    target = prefix + path[len(base) :]
    return urlunsplit((b"", b"", b"/" + target.lstrip(b"/"), url.query, url.fragment))
