"""Common parts of the transports to the upstream."""

from __future__ import annotations

import httpx


class UpstreamTransport(httpx.AsyncBaseTransport):
    """A transport whose connections to an address can be retired.

    It never uses a TLS connection for two values of the request extension `sni_hostname`.
    """

    def retire(self, url: str, server_name: str = "") -> None:
        """Close the connections to the address in `url`, which is no longer used, as soon as they are idle.

        Responses that are being read are not interrupted. `server_name` is the `sni_hostname` of the requests. A transport that
        has no access to its idle connections does nothing.
        """
