"""The timeline of a response, and the phases that are recorded for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.inspector.report import ResponseReport
from responses_mw.inspector.timeline import timeline
from responses_mw.telemetry.phases import MAX_PHASES, Phases
from tests.support.scripted import finish, text, usage

if TYPE_CHECKING:
    from tests.inspector.conftest import Inspect
    from tests.support.scripted import ScriptedUpstream


def line(document: dict[str, Any] | None = None, **summary: Any) -> list[tuple[str, float, list[Any]]]:
    found = timeline(ResponseReport("resp_x", summary={"id": "resp_x", **summary}, document=document))
    assert found is not None
    return [(row.name, row.seconds, list(row.stretches)) for row in found.rows]


def test_turns_and_tool_calls_are_placed_at_their_times() -> None:
    phases = [["turn", 0, 500], ["mcp", 500, 250], ["turn", 800, 200]]
    assert line(seconds=1.0, first_token=0.1, phases=phases) == [
        ("turn 1", 0.5, [("wait", 0.0, 10.0), ("answer", 10.0, 40.0)]),
        ("tool: mcp", 0.25, [("tool", 50.0, 25.0)]),
        ("turn 2", 0.2, [("answer", 80.0, 20.0)]),
    ]


def test_the_timeline_of_a_background_response_begins_in_the_queue() -> None:
    queued, turn = line(
        {"created_at": 100, "output": []}, seconds=3.0, ended=104.0, kind="background", phases=[["turn", 0, 3000]]
    )
    assert queued == ("in the queue", 1.0, [("queue", 0.0, 25.0)])
    assert turn == ("turn 1", 3.0, [("answer", 25.0, 75.0)])


@pytest.mark.parametrize("phases", [None, [], "x", [["turn", "0", 1]], [1]])
def test_a_summary_without_phases_has_one_row(phases: Any) -> None:
    assert line(seconds=2.0, first_token=0.5, phases=phases) == [
        ("whole response", 2.0, [("wait", 0.0, 25.0), ("answer", 25.0, 75.0)])
    ]


def test_the_number_of_phases_is_limited() -> None:
    phases = Phases()
    for _ in range(2 * MAX_PHASES):
        phases.add("turn", time.perf_counter())
    assert len(phases.since(0.0) or ()) == MAX_PHASES


async def test_a_summary_has_the_turns_and_the_round_trips_to_redis(
    nobody_else: None, inspect: Inspect, upstream: ScriptedUpstream
) -> None:
    inspected = inspect()
    upstream.stream(text("hello"), finish(), usage())
    with inspected.ours.sync_client.responses.stream(model="tiny", input="q") as stream:
        made = stream.get_final_response()
    [summary] = inspected.wait_for(1)
    [[kind, began, milliseconds]] = summary["phases"]
    assert (kind, began >= 0, milliseconds <= 1000 * summary["seconds"] + 1) == ("turn", True, True)
    assert summary["redis"][0] >= 1
    html = inspected.admin.get(f"/ui/responses/{made.id}").text
    assert "round trips to Redis" in html or "round trip to Redis" in html
    assert "turn 1" in html
