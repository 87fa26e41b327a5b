"""Discovery of endpoint addresses, with a scripted resolver and with the operating system's."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import httpx
import pytest

from responses_mw.upstream import discovery
from responses_mw.upstream.discovery import MAX_ADDRESSES, Address, Discovery, SystemResolver
from responses_mw.upstream.transports.http11 import NetworkTransport
from tests.support.certificates import create_certificate

if TYPE_CHECKING:
    from pathlib import Path

NO_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
TRY_AGAIN = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
HEADLESS = "dns+http://vllm-headless:8000"

Answer = Sequence[str] | Exception


class Names:
    """A resolver whose answers are set by the tests, and the sets of addresses that were reported."""

    def __init__(self, *urls: str, **answers: Answer) -> None:
        self.answers: dict[str, Answer] = dict(answers)
        self.asked: list[tuple[str, int]] = []
        self.reported: list[list[Address]] = []
        self.discovery = Discovery(urls, lambda found: self.reported.append(list(found)), self._resolve)

    async def _resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def refresh(self, **answers: Answer) -> list[str]:
        """Refresh with these answers, and return the URLs that were reported last."""
        self.answers |= answers
        await self.discovery.refresh()
        return [address.url for address in self.reported[-1]]


def headless(first: Answer) -> Names:
    names = Names(HEADLESS)
    names.answers["vllm-headless"] = first
    return names


async def lookups(names: Names, *answers: Answer) -> list[list[str]]:
    return [await names.refresh(**{"vllm-headless": answer}) for answer in answers]


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records if record.name == discovery.logger.name]


ONE, TWO = ["http://10.0.0.1:8000"], ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
IPS = ["10.0.0.1", "10.0.0.2"]


# -- addresses -----------------------------------------------------------------------------------------------------------


async def test_static_urls_are_known_without_a_lookup() -> None:
    names = Names("http://vllm-1:8000", "https://b.example/base", "http://[fd00::7]:8000")
    await names.discovery.refresh()
    await names.discovery.run()  # returns, because there is nothing to resolve
    assert names.reported == [
        [
            Address("http://[fd00::7]:8000", "[fd00::7]:8000", ""),
            Address("http://vllm-1:8000", "vllm-1:8000", ""),
            Address("https://b.example/base", "b.example", ""),
        ]
    ]
    assert names.asked == []


@pytest.mark.parametrize(
    ("url", "ip", "address"),
    [
        ("dns+http://vllm:8000", "10.0.0.7", Address("http://10.0.0.7:8000", "vllm:8000", "")),
        ("dns+http://vllm:8000/base", "fd00::7", Address("http://[fd00::7]:8000/base", "vllm:8000", "")),
        ("dns+http://vllm:8000", "::ffff:10.0.0.7", Address("http://10.0.0.7:8000", "vllm:8000", "")),
        ("dns+http://vllm", "10.0.0.7", Address("http://10.0.0.7", "vllm", "")),
        ("dns+https://vllm", "fd00::7", Address("https://[fd00::7]", "vllm", "vllm")),
        ("dns+https://vllm.svc.:8000", "10.0.0.7", Address("https://10.0.0.7:8000", "vllm.svc.:8000", "vllm.svc")),
        (
            "dns+https://bücher.example",
            "10.0.0.7",
            Address("https://10.0.0.7", "xn--bcher-kva.example", "xn--bcher-kva.example"),
        ),
    ],
)
async def test_a_resolved_name_is_kept_for_the_host_header_and_tls(url: str, ip: str, address: Address) -> None:
    names = Names(url)
    names.answers[address.host.split(":")[0]] = [ip]
    await names.discovery.refresh()
    assert names.reported == [[address]]


@pytest.mark.parametrize(("url", "port"), [("http://vllm", 80), ("https://vllm", 443), ("http://vllm:8000", 8000)])
async def test_a_name_is_resolved_with_the_port_of_its_url(url: str, port: int) -> None:
    names = Names(f"dns+{url}", vllm=["10.0.0.1"])
    await names.discovery.refresh()
    assert names.asked == [("vllm", port)]


async def test_answers_with_the_same_addresses_in_another_order_are_reported_once() -> None:
    names = headless([])
    for _ in range(5):
        assert (await lookups(names, random.sample(IPS * 2, 4))) == [TWO]
    assert len(names.reported) == 1


async def test_added_and_removed_addresses_are_reported() -> None:
    names = headless([])
    assert await lookups(names, ["10.0.0.1"], IPS, ["10.0.0.1"]) == [ONE, TWO, ONE]
    assert len(names.reported) == 3


async def test_addresses_that_several_names_share_are_merged() -> None:
    names = Names("http://10.0.0.1:8000", "dns+http://b:8000", "dns+http://a:8000", a=IPS, b=IPS)
    assert await names.refresh() == TWO
    assert [address.host for address in names.reported[-1]] == ["10.0.0.1:8000", "b:8000"]


async def test_a_pod_with_an_ipv4_and_an_ipv6_address_is_one_endpoint() -> None:
    names = headless([])
    answers = ["fd00::2", "10.0.0.1", "fd00::1", "10.0.0.2"], ["fd00::2", "fd00::1"]
    assert await lookups(names, *answers) == [TWO, ["http://[fd00::1]:8000", "http://[fd00::2]:8000"]]


async def test_addresses_that_no_server_can_have_are_ignored() -> None:
    names = headless([])
    assert await lookups(names, ["0.0.0.0", "224.0.0.1", "10.0.0.1"], ["::", "ff02::1", "10.0.0.1"]) == [ONE, ONE]


async def test_at_most_1024_addresses_are_used_the_same_on_every_replica(caplog: pytest.LogCaptureFixture) -> None:
    many = [f"10.0.{number // 256}.{number % 256}" for number in range(1, MAX_ADDRESSES + 10)]
    found = []
    for _ in range(2):
        names = Names("http://z:8000", HEADLESS)
        found += await lookups(names, random.sample(many, len(many)))
    assert found[0] == found[1]
    assert len(found[0]) == MAX_ADDRESSES
    assert "http://z:8000" in found[0]
    assert "only 1024 of them are used" in caplog.text


# -- failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure",
    [
        TRY_AGAIN,
        socket.gaierror(socket.EAI_FAIL, "Non-recoverable failure in name resolution"),
        OSError("no file descriptors"),
        UnicodeError("label too long"),
        TimeoutError(),
    ],
    ids=repr,
)
async def test_a_failed_lookup_keeps_the_addresses_and_is_logged_once_per_outage(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    names = headless(IPS)
    assert await lookups(names, IPS, failure, failure, failure, IPS, failure) == [TWO] * 6
    assert len(names.reported) == 1
    assert levels(caplog) == ["WARNING", "INFO", "WARNING"]
    assert "vllm-headless" in caplog.text


@pytest.mark.parametrize("empty", [[], NO_NAME, socket.gaierror(socket.EAI_NODATA, "No address")], ids=repr)
async def test_the_second_empty_answer_in_a_row_removes_the_addresses(empty: Answer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    names = headless(IPS)
    assert await lookups(names, IPS, empty, empty, empty, IPS) == [TWO, TWO, [], [], TWO]
    assert levels(caplog) == ["WARNING", "INFO"]


async def test_empty_answers_with_another_answer_between_them_remove_nothing() -> None:
    names = headless(IPS)
    assert await lookups(names, IPS, NO_NAME, IPS, NO_NAME, TRY_AGAIN, NO_NAME) == [TWO] * 6


async def test_a_name_that_does_not_exist_yet_is_found_later(caplog: pytest.LogCaptureFixture) -> None:
    names = headless(NO_NAME)
    assert await lookups(names, NO_NAME, NO_NAME, IPS) == [[], [], TWO]
    assert caplog.text.count("has no address") == 1


async def test_a_failed_lookup_does_not_affect_other_names() -> None:
    names = Names("dns+http://a:1", "dns+http://b:1", a=["10.0.0.1"], b=["10.0.0.2"])
    await names.refresh()
    assert await names.refresh(a=TRY_AGAIN, b=["10.0.0.3"]) == ["http://10.0.0.1:1", "http://10.0.0.3:1"]


async def test_a_hung_lookup_delays_neither_static_urls_nor_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOKUP_TIMEOUT", 60)
    complete = asyncio.Event()
    reported: list[list[str]] = []

    def changed(found: Sequence[Address]) -> None:
        reported.append([address.url for address in found])
        if len(found) == 2:
            complete.set()

    async def resolve(host: str, port: int) -> list[str]:
        if host == "hung":
            await asyncio.Event().wait()
        return ["10.0.0.1"]

    urls = ["dns+http://hung:1", "dns+http://a:1", "http://static:1"]
    refreshing = asyncio.create_task(Discovery(urls, changed, resolve).refresh())
    async with asyncio.timeout(30):
        await complete.wait()
    assert reported == [["http://static:1"], ["http://10.0.0.1:1", "http://static:1"]]
    assert not refreshing.done()
    refreshing.cancel()


async def test_a_lookup_that_takes_too_long_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(discovery, "LOOKUP_TIMEOUT", 0.01)
    reported: list[Sequence[Address]] = []

    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    async with asyncio.timeout(30):
        await Discovery([HEADLESS], reported.append, resolve).refresh()
    assert reported == [()]
    assert "no answer within 0.01 s" in caplog.text


async def test_names_are_resolved_periodically(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "INTERVAL", 0.01)
    names = headless(["10.0.0.1"])
    running = asyncio.create_task(names.discovery.run())
    async with asyncio.timeout(30):
        while not names.reported:
            await asyncio.sleep(0.01)
        names.answers["vllm-headless"] = IPS
        while len(names.reported) < 2:
            await asyncio.sleep(0.01)
    running.cancel()
    assert [address.url for address in names.reported[-1]] == TWO


# -- the operating system's resolver -------------------------------------------------------------------------------------


async def test_a_real_name_is_resolved() -> None:
    reported: list[Sequence[Address]] = []
    await Discovery(["dns+http://localhost:8000"], reported.append).refresh()
    assert list(reported[-1]) in (
        [Address("http://127.0.0.1:8000", "localhost:8000", "")],
        [Address("http://[::1]:8000", "localhost:8000", "")],
    )


@pytest.mark.parametrize("host", ["a" * 64 + ".example", "a..b"])
async def test_an_invalid_name_is_a_failed_lookup(host: str, caplog: pytest.LogCaptureFixture) -> None:
    reported: list[Sequence[Address]] = []
    await Discovery([f"dns+http://{host}:8000"], reported.append).refresh()
    assert reported == [()]
    assert host in caplog.text


class SlowLookup:
    """A blocking lookup that the test ends explicitly."""

    def __init__(self) -> None:
        self.count = 0
        self.end = threading.Event()

    def __call__(self, host: str, port: int, **options: object) -> list[object]:
        self.count += 1
        assert self.end.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", port))]


async def test_a_lookup_that_outlasts_its_timeout_is_not_repeated_and_its_answer_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "LOOKUP_TIMEOUT", 0.05)
    reported: list[Sequence[Address]] = []
    slow = SlowLookup()
    found = Discovery([HEADLESS], reported.append, SystemResolver(slow))
    for _ in range(3):
        await found.refresh()
    monkeypatch.setattr(discovery, "LOOKUP_TIMEOUT", 60)
    slow.end.set()
    await found.refresh()
    assert slow.count == 1
    assert [address.url for address in reported[-1]] == ONE
    await found.refresh()
    assert slow.count == 2


async def test_any_number_of_hung_lookups_delays_no_other() -> None:
    slow = SlowLookup()

    def look_up(host: str, port: int, **options: object) -> list[object]:
        return [("", "", "", "", ("10.0.0.2", port))] if host == "other" else slow(host, port)

    resolver = SystemResolver(look_up)
    hung = [asyncio.create_task(resolver(f"hung-{number}", 80)) for number in range(50)]
    try:
        async with asyncio.timeout(30):
            assert await resolver("other", 80) == ["10.0.0.2"]
    finally:
        slow.end.set()
    assert await asyncio.gather(*hung) == [["10.0.0.1"]] * 50


HUNG = """
import asyncio, threading
from responses_mw.upstream import discovery
discovery.LOOKUP_TIMEOUT = 0.05
resolver = discovery.SystemResolver(lambda *_, **__: threading.Event().wait())
asyncio.run(discovery.Discovery(["dns+http://hung:80"], lambda found: None, resolver).refresh())
"""


def test_a_hung_lookup_does_not_delay_the_end_of_the_process() -> None:
    subprocess.run([sys.executable, "-c", HUNG], check=True, timeout=60)


async def test_a_request_to_a_resolved_address_is_checked_against_the_certificate_of_the_name(tmp_path: Path) -> None:
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
        writer.close()

    create_certificate(tmp_path, "localhost")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    reported: list[Sequence[Address]] = []
    trusting = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    async with NetworkTransport(trusting) as transport, await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as server:
        port = server.sockets[0].getsockname()[1]
        await Discovery([f"dns+https://localhost:{port}"], reported.append).refresh()
        [address] = reported[-1]
        extensions = {"sni_hostname": address.server_name}
        request = httpx.Request("GET", address.url, headers={"host": address.host}, extensions=extensions)
        assert (await transport.handle_async_request(request)).status_code == 204
    assert f"Host: localhost:{port}".lower().encode() in heads[0].lower()
