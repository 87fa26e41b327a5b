"""The benchmark measures what it says: its upstream, relay and load work together, and failures are counted."""

import dataclasses
import json
from collections.abc import Iterator

import pytest

from benchmarks.collector import watching
from benchmarks.load import Load, Plan, Report
from benchmarks.processes import Server, running
from benchmarks.scenarios import measure

FEW = Plan(streams=3, tokens=5, timeout=60)


@pytest.fixture(scope="module")
def upstream() -> Iterator[Server]:
    with running("benchmarks.upstream", "--tokens-per-second=100") as server:
        yield server


@pytest.fixture(scope="module", params=["httpx", "aiohttp"])
def relay(request: pytest.FixtureRequest, upstream: Server) -> Iterator[Server]:
    with running("benchmarks.relay", f"--transport={request.param}", f"--upstream={upstream.url}") as server:
        yield server


async def test_every_token_comes_through_the_relay_with_a_sane_lag(relay: Server) -> None:
    report = await Load(relay.url, "chat", FEW).run()

    assert (report.tokens, report.failed, report.reasons) == (15, 0, {})
    assert 0 < report.lag.median <= report.lag.p99 < 1000
    assert 0 < report.first_event.median <= report.first_token.median < report.answer.median


async def test_the_upstream_keeps_its_pace(upstream: Server) -> None:
    report = await Load(upstream.url, "chat", Plan(streams=2, tokens=21)).run()

    assert report.failed == 0
    assert 195 <= report.answer.median < 2000  # 20 intervals of 10 ms after the first token


async def test_an_answer_without_a_stream_is_checked_too(relay: Server) -> None:
    report = await Load(relay.url, "chat", dataclasses.replace(FEW, stream=False, repeat=2)).run()

    assert (report.answers, report.failed, report.tokens) == (6, 0, 0)


async def test_a_wrong_status_is_a_failure(upstream: Server) -> None:
    report = await Load(upstream.url, "responses", FEW).run()

    assert report.failed == 3
    assert report.reasons == {"status 404": 3}


async def test_requests_still_open_at_the_timeout_count_as_failures(upstream: Server) -> None:
    report = await Load(upstream.url, "chat", Plan(streams=2, tokens=1000, repeat=2, timeout=0.3)).run()

    assert report.reasons == {"timed out": 2, "not begun": 2}


def test_a_measured_load_accounts_the_cpu_of_the_relay(relay: Server, upstream: Server) -> None:
    measurement, report = measure(relay, upstream, "chat", dataclasses.replace(FEW, repeat=20))

    assert (report.tokens, report.failed) == (300, 0)
    assert 0 < measurement.cpu_us_per_token < 100_000
    assert 0 < measurement.cpu_share <= 200


def test_a_report_is_unchanged_by_json_encoding() -> None:
    cpu = {"seconds": 2.0, "cpu_seconds": 0.5}
    spreads = {name: {"median": 1.0, "p99": 2.0} for name in ("first_event", "first_token", "answer", "lag")}
    fields = {"answers": 1, "failed": 1, "reasons": {"status 404": 1}, "tokens": 0} | cpu | spreads

    assert dataclasses.asdict(Report.from_json(json.dumps(fields))) == fields


def test_a_server_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(RuntimeError, match="unrecognized arguments: --no-such-option"),
        running("benchmarks.upstream", "--no-such-option"),
    ):
        pass


def test_a_server_that_is_to_be_watched_and_sends_nothing_is_an_error(upstream: Server) -> None:
    with (
        pytest.raises(RuntimeError, match="the collector has no spans, metrics"),
        watching(),
        running("responses_mw", "serve", f"--upstream={upstream.url}"),
    ):
        pass
