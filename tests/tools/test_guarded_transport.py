"""The transport that guards against URLs of requests that lead to private addresses."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.tools import guarded_transport
from responses_mw.tools.guarded_transport import AddressRefused, GuardedTransport, checked_addresses, fault_of, is_public
from tests.support.mcp_servers import answering
from tests.support.servers import PATIENCE

if TYPE_CHECKING:
    from tests.support.servers import Serve

PRIVATE_V4 = [
    "0.0.0.0",
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
]
PRIVATE_V6 = [
    "::",
    "::1",
    "::7f00:1",
    "::ffff:0:7f00:1",
    "::ffff:10.0.0.1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
    "100::1",
    "2001::1",
    "2001:db8::1",
    "2002:7f00:1::1",
    "2002:808:808::1",
    "3fff::1",
    "5f00::1",
    "64:ff9b::a00:1",
    "64:ff9b:1::808:808",
    "2600:1f00::5efe:a00:1",
    "2600::200:5efe:a00:1",
]
PUBLIC = ("1.1.1.1", "8.8.8.8", "172.32.0.1", "2606:4700::1111", "2a00:1450:4001::200e", "::ffff:8.8.8.8", "64:ff9b::808:808")


Answer = Callable[..., None]


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Set the addresses to which every host resolves."""

    def answer(*addresses: str) -> None:
        async def resolve(host: str, port: int, *, trusted: bool) -> list[str]:
            return list(addresses)

        monkeypatch.setattr(guarded_transport, "resolve", resolve)

    return answer


async def get(transport: httpx2.AsyncBaseTransport, url: str, *, follow_redirects: bool = False) -> httpx2.Response:
    async with httpx2.AsyncClient(transport=transport, follow_redirects=follow_redirects, trust_env=False) as client:
        return await client.get(url)


def is_refused(response: httpx2.Response) -> bool:
    return response.status_code == 502 and "does not lead to a public address" in response.text


@pytest.mark.parametrize("address", [*PRIVATE_V4, *PRIVATE_V6])
def test_special_purpose_addresses_are_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_internet_addresses_are_public(address: str) -> None:
    assert is_public(ip_address(address))


@given(st.ip_addresses(v=4))
def test_an_embedded_ipv4_address_decides_whether_an_ipv6_address_is_public(inner: IPv4Address) -> None:
    for prefix in (0xFFFF << 32, int(IPv6Address("64:ff9b::"))):
        assert is_public(IPv6Address(prefix | int(inner))) == is_public(inner)
    assert not is_public(IPv6Address(int(IPv6Address("2002::")) | int(inner) << 80))
    assert not is_public(IPv6Address(int(inner)))


FORMS: tuple[Callable[[int], str], ...] = (
    str,
    hex,
    lambda n: f"0{n:o}",
    lambda n: ".".join(f"0{byte:o}" for byte in n.to_bytes(4, "big")),
    lambda n: ".".join(hex(byte) for byte in n.to_bytes(4, "big")),
    lambda n: f"{n >> 24}.{n & 0xFFFFFF}",
    lambda n: f"{n >> 24}.{n >> 16 & 255}.{n & 0xFFFF}",
    lambda n: f"::ffff:{IPv4Address(n)}",
    lambda n: IPv6Address(0xFFFF << 32 | n).exploded,
    lambda n: f"64:ff9b::{n >> 16:x}:{n & 0xFFFF:x}",
)


@given(st.sampled_from(PRIVATE_V4), st.sampled_from(FORMS))
async def test_every_notation_of_a_private_address_is_refused(address: str, form: Callable[[int], str]) -> None:
    host = form(int(IPv4Address(address)))
    with pytest.raises(AddressRefused):
        await checked_addresses(host, 80, allow_private=False)


async def test_a_host_with_any_private_address_is_refused(resolved: Answer) -> None:
    resolved("8.8.8.8", "::1")
    with pytest.raises(AddressRefused):
        await checked_addresses("a.example", 80, allow_private=False)


async def test_private_addresses_can_be_allowed(resolved: Answer) -> None:
    resolved("10.0.0.1")
    assert await checked_addresses("a.example", 80, allow_private=True) == ["10.0.0.1"]


async def test_a_host_without_an_address_is_reported_as_unknown(resolved: Answer) -> None:
    resolved()
    response = await get(GuardedTransport(1000, allow_private=False), "http://a.example/")
    assert response.json()["error"]["message"] == "it cannot be reached: its name is not known"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a.example",
        "ftp://a.example",
        "file:///etc/passwd",
        "http://",
        "http:///x",
        "https://key@a.example/",
        "http://a:b@c/",
        "http://127.0.0.1/",
        "http://[::1]/",
        "http://[fe80::1%25eth0]/",
        "http://a.example:0/",
        "http://a.example:99999/",
        "http://[::1",
        "http://a\nb/",
    ],
)
def test_fault_of_reports_an_invalid_url(url: str) -> None:
    assert fault_of(url, allow_private=False)


@pytest.mark.parametrize(
    "url", ["http://a.example", "https://a.example:8443/mcp?x=y", "http://8.8.8.8/", "HTTPS://[2606:4700::1]/"]
)
def test_fault_of_is_none_for_a_valid_url(url: str) -> None:
    assert fault_of(url, allow_private=False) is None


async def test_the_name_is_resolved_once_and_the_connection_uses_the_checked_address(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = httpx2.URL(serve(answering(200, b"here")))
    asked: list[str] = []

    async def rebinding(host: str, port: int, *, trusted: bool) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    monkeypatch.setattr(guarded_transport, "resolve", rebinding)
    response = await get(GuardedTransport(1000, allow_private=True), f"http://name.example:{url.port}/")
    assert response.text == "here"
    assert asked == ["name.example"]
    assert response.request.headers["host"] == f"name.example:{url.port}"


async def test_a_connection_to_a_name_that_resolves_to_a_private_address_is_refused(serve: Serve, resolved: Answer) -> None:
    url = serve(answering(200))
    resolved("127.0.0.1")
    transport = GuardedTransport(1000, allow_private=False)
    assert is_refused(await get(transport, f"http://name.example:{httpx2.URL(url).port}/"))
    assert transport.address_refused


async def test_a_redirect_to_a_private_address_is_refused(serve: Serve, resolved: Answer) -> None:
    inner = serve(answering(200, b"secret")).replace("127.0.0.1", "private.example")
    outer = httpx2.URL(serve(answering(302, headers=[(b"location", inner.encode())])))
    resolved("127.0.0.1")

    class Lenient(GuardedTransport):
        """Treat only the first server as public."""

        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            chosen = lenient if request.url.host == "public.example" else strict
            return await chosen.handle_async_request(request)

    lenient, strict = GuardedTransport(1000, allow_private=True), GuardedTransport(1000, allow_private=False)
    async with lenient, strict:
        transport = Lenient(1000, allow_private=False)
        assert is_refused(await get(transport, f"http://public.example:{outer.port}/", follow_redirects=True))
    assert strict.address_refused


async def test_the_next_address_is_tried_when_a_connection_is_refused(serve: Serve, resolved: Answer) -> None:
    url = httpx2.URL(serve(answering(200, b"here")))
    resolved("127.0.0.9", "127.0.0.1")
    response = await get(GuardedTransport(1000, allow_private=True), f"http://name.example:{url.port}/")
    assert response.text == "here"


async def test_slow_lookups_do_not_block_other_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, held = socket.getaddrinfo, threading.Event()

    def lookup(host: Any, *args: Any, **options: Any) -> Any:
        if str(host).endswith(".slow.example"):
            held.wait(60)
            raise socket.gaierror
        return fast(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    lookups = [asyncio.ensure_future(checked_addresses(f"{n}.slow.example", 443, allow_private=False)) for n in range(64)]
    try:
        await asyncio.sleep(0.1)
        async with asyncio.timeout(30):
            assert await asyncio.get_running_loop().getaddrinfo("localhost", 80)
        assert not any(lookup.done() for lookup in lookups)
    finally:
        held.set()
        await asyncio.gather(*lookups, return_exceptions=True)


EVENT = b"event: message\r\ndata: [1,\r\ndata: 2]\r\n\r\n"


@pytest.mark.parametrize(
    ("kind", "body", "read"),
    [
        (b"application/json", b"[%b1]" % (b"1," * 9), b"[%b1]" % (b"1," * 9)),
        (b"application/json", b"[%b1]" % (b"1," * 10), b""),
        (b"application/json", b"[%b]" % (b"{}," * 10), b""),
        (b"application/json", b'["%b"]' % (b"{," * 10), b'["%b"]' % (b"{," * 10)),
        (b"text/event-stream", EVENT * 5, EVENT * 5),
        (b"text/event-stream", EVENT * 6, b""),
        (b"text/event-stream", b': "\r' + EVENT * 6, b""),
        (b"text/event-stream", EVENT * 4 + b"data: [1,2,3", EVENT * 4),
    ],
)
async def test_a_body_with_too_many_json_values_is_not_read(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, kind: bytes, body: bytes, read: bytes
) -> None:
    monkeypatch.setattr(guarded_transport, "MAX_VALUES", 10)
    url = serve(answering(200, body, [(b"content-type", kind)]))
    response = await get(GuardedTransport(1000, allow_private=True), url)
    assert response.content == read


async def test_reconnections_to_a_server_that_closes_its_event_streams_are_limited(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(guarded_transport, "time", clock)
    monkeypatch.setattr(guarded_transport, "MAX_STREAMS", 2)
    url = serve(answering(200, b"retry: 0\n\n", [(b"content-type", b"text/event-stream")]))
    async with httpx2.AsyncClient(transport=GuardedTransport(1000, allow_private=True), trust_env=False) as client:
        assert [(await client.get(url)).status_code for _ in range(3)] == [200, 200, 502]
        assert (await client.post(url)).status_code == 200
        clock.monotonic = lambda: 3.0
        assert [(await client.get(url)).status_code for _ in range(3)] == [200, 200, 502]


async def test_the_tls_handshake_names_the_host_of_the_url(resolved: Answer) -> None:
    """The handshake sends the host name of the URL, not the address of the connection."""
    asked: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = lambda _socket, name, _context: asked.append(name)
    resolved("127.0.0.1")

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def shake() -> None:
            connection, _ = listener.accept()
            with connection:
                try:
                    context.wrap_socket(connection, server_side=True)
                except OSError:
                    return

        thread = threading.Thread(target=shake)
        thread.start()
        url = f"https://name.example:{listener.getsockname()[1]}/"
        assert (await get(GuardedTransport(1000, allow_private=True), url)).status_code == 502
        thread.join(PATIENCE)
    assert asked == ["name.example"]
