"""What the upstream's answers contain that responses-mw does not know: counted, and logged once for each model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from responses_mw.telemetry import answers, instruments
from responses_mw.telemetry.answers import report_dropped, report_finish_reason
from tests.support.oracle import stream, whole
from tests.support.scripted import completion, finish, text

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours

LOGGER = answers.logger.name


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_REPORTED", set())


def counted(member: str) -> float:
    families = text_string_to_metric_families(instruments.exposition("")[0].decode())
    family = next(one for one in families if one.name == "responses_mw_upstream_dropped_members")
    return float(next(one.value for one in family.samples if one.labels == {"member": member}))


async def test_a_dropped_member_is_counted_for_each_response_and_logged_once(
    ours: Ours, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    before = counted("audio"), counted(instruments.OTHER)
    upstream.stream(text("Hi"), {"choices": [{"index": 0, "delta": {"audio": {"data": "x"}}}]}, finish())
    upstream.whole(completion({"content": "Hi", "audio": {"data": "x"}, "a\nb": 1}))
    assert (await stream(ours)).response["status"] == "completed"
    assert (await whole(ours))["status"] == "completed"
    assert (counted("audio"), counted(instruments.OTHER)) == (before[0] + 2, before[1] + 1)
    logged = [record.message for record in caplog.records if record.name == LOGGER]
    assert sorted(line.partition("member=")[2] for line in logged) == [r'"a\nb"', "audio"]


async def test_an_unknown_finish_reason_is_logged_once(
    ours: Ours, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        upstream.stream(text("Hi"), finish("unheard_of"))
        assert (await stream(ours)).response["status"] == "completed"
    logged = [record.message for record in caplog.records if record.name == LOGGER]
    assert len(logged) == 1
    assert "finish_reason=unheard_of" in logged[0]
    assert "model=tiny" in logged[0]


def test_log_records_are_limited_in_number_and_length(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, LOGGER):
        for number in range(answers.MAX_REPORTED):
            report_finish_reason("m" * 1000, f"word{number}")
        report_dropped("m", ["audio"])
    logged: list[Any] = [record.message for record in caplog.records if record.name == LOGGER]
    assert len(logged) == answers.MAX_REPORTED
    assert max(map(len, logged)) < 400
