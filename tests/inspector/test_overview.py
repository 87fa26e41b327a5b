"""The overview: measurements, checks and warnings."""

from __future__ import annotations

import logging
from html import unescape
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import redis

from responses_mw.inspector.charts import plots, sample_plot
from responses_mw.inspector.texts import clock, duration
from responses_mw.redaction import Redactor
from responses_mw.state.schema import REPLICAS
from responses_mw.telemetry.warning_log import MAX_TEXT, MAX_WARNINGS, WarningLog
from tests.inspector.conftest import until

if TYPE_CHECKING:
    from tests.inspector.conftest import Inspect

pytestmark = pytest.mark.usefixtures("nobody_else")


def test_the_latest_warnings_are_kept_redacted_and_bounded() -> None:
    log, logger = WarningLog(), logging.getLogger("responses_mw.example")
    with log.collecting(Redactor(["a-very-secret-key"])):
        logger.info("not a warning")
        for number in range(2 * MAX_WARNINGS):
            logger.warning("number %d", number)
        for _ in range(3):
            logger.warning("the key a-very-secret-key\n\x1b[31m\u202e is %s", "x" * 10_000)
        kept, reported = log.latest(), log.report()
    assert len(kept) == MAX_WARNINGS
    assert (kept[-2].text, kept[-1].times) == (f"number {2 * MAX_WARNINGS - 1}", 3)
    assert kept[-1].text.startswith("the key <redacted> [31m  is xxx")
    assert len(kept[-1].text) == MAX_TEXT
    assert orjson.loads(orjson.dumps(reported)) == [[*one] for one in kept]  # orjson refuses named tuples
    logger.warning("after the end")
    assert log.latest() == []


def test_warnings_are_still_printed_if_the_application_configures_no_logs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = WarningLog()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with log.collecting(Redactor()):
        logging.getLogger("responses_mw.example").warning("somebody should see this")
    assert "somebody should see this" in capsys.readouterr().err


async def test_the_overview_shows_checks_and_the_warnings_of_all_processes(inspect: Inspect, redis_url: str) -> None:
    inspected = inspect()
    warning = [1.5, "responses_mw.upstream", "<b>the endpoint is left out", 4]
    reports: list[dict[str, Any]] = [
        {"name": "another-process", "version": "1", "started": 0, "warnings": [warning, ["x"], 7]},
        {"name": "a-strange-process", "version": "1", "started": 0, "warnings": 5},
    ]
    with redis.Redis.from_url(redis_url) as client:
        for report in reports:
            client.zadd(REPLICAS, {orjson.dumps(report): 9e12})
    html = until(lambda: (shown := inspected.admin.get("/ui").text).count('status completed">ok') == 4 and shown)
    assert "&lt;b&gt;the endpoint is left out" in html
    assert "4 times, upstream, another-process" in html
    for check in ("upstream", "redis", "worker", "server"):
        assert f'<span class="status completed">ok</span> <strong>{check}</strong>' in html
    assert "Latency of Redis" in html
    assert "Age of the oldest waiting job" in html


def test_responses_are_plotted_by_status() -> None:
    statuses = ["completed"] * 3 + ["failed", "refused", "interrupted", "cancelled"]
    summaries = [{"status": status, "ended": 7100.0, "seconds": number + 1} for number, status in enumerate(statuses)]
    responses, first_token, took, _ = plots(summaries, 7200.0)
    assert (responses.value, responses.top) == ("7, 3 failed", "7")
    assert (responses.bars[0].kind, responses.bars[0].title) == ("bad", "2 min ago: 3 completed, 1 cancelled, 3 failed")
    assert [kind for kind, _ in responses.legend] == ["good", "idle", "bad"]
    assert (first_token.value, first_token.lines) == ("–", ())
    assert took.value == "p50 4.00 s, p95 7.00 s"


async def test_the_overview_shows_settings_without_secrets(inspect: Inspect) -> None:
    servers = {"cities": {"url": "http://127.0.0.1:9/mcp", "authorization": "a-secret-token"}}
    html = unescape(inspect(tools__mcp_servers=servers).admin.get("/ui").text)
    assert '{"cities": {"url": "http://127.0.0.1:9/mcp"' in html
    assert '["**********"]' in html  # auth.secret_keys
    assert "a-secret-token" not in html
    assert "SecretStr" not in html


def test_the_date_is_shown_with_times_of_other_days() -> None:
    assert clock(0.5) == "01-01 00:00:00"
    assert clock(None) == ""


def test_samples_are_plotted_at_the_time_of_their_measurement() -> None:
    plot = sample_plot("Age", [(3600.0 - 3599.0, 4.0), (3599.0, 1.0), (3599.5, 2.0)], 3600.0, duration)
    assert (plot.value, plot.top) == ("2.00 s now", "4.00 s")
    first, last = plot.bars
    assert (first.x, last.x) == (1.0, 310.3)
    assert first.height == 2 * last.height
    assert sample_plot("Age", [], 3600.0, duration).value == "not measured yet"
