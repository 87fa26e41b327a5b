"""A mark for tests that need IPv6, which some machines and containers do not have."""

from __future__ import annotations

import socket

import pytest


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
