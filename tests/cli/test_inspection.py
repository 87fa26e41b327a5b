"""The commands `inspect`, `tail` and `jobs`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import openai
import pytest

from responses_mw.cli import main
from responses_mw.ids import RunIds
from tests.support.scripted import Signal, completion, error, finish, text, usage
from tests.support.servers import PATIENCE

if TYPE_CHECKING:
    from tests.cli.conftest import Launch, Print
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

pytestmark = pytest.mark.usefixtures("nobody_else")

SECRET = "a secret that all the replicas of the deployment have"
ANSWER = completion({"role": "assistant", "content": "the answer"}, counts={"prompt_tokens": 7, "completion_tokens": 5})


@pytest.fixture
def recorded(start: Start, redis_url: str) -> Ours:
    return start(ui__mode="metadata", redis__url=redis_url, auth__secret_keys=[SECRET])


def wait_for(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def tail(printed: Print, *flags: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed("tail", "--json", *flags).splitlines()]


async def test_tail_prints_one_line_for_each_response_the_latest_last(
    recorded: Ours, upstream: ScriptedUpstream, printed: Print
) -> None:
    upstream.whole(ANSWER)
    upstream.stream(text("hello"), finish(), usage())
    first = recorded.sync_client.responses.create(model="tiny", input="a private question")
    with recorded.sync_client.responses.stream(
        model="tiny", input="another", previous_response_id=first.id, store=False
    ) as stream:
        second = stream.get_final_response()
    found = wait_for(lambda: len(listed := tail(printed)) == 2 and listed)
    assert [(one["id"], one["status"], one["kind"]) for one in found] == [
        (first.id, "completed", "json"),
        (second.id, "completed", "stream"),
    ]
    assert (found[0]["tokens_in"], found[0]["tokens_out"], found[0]["turns"]) == (7, 5, 1)
    assert (found[1]["previous"], found[1]["stored"], found[1]["unstored"]) == (first.id, False, "request")
    assert "private" not in json.dumps(found)
    lines = printed("tail").splitlines()
    assert re.fullmatch(rf"\d{{4}}-\S+ \S+Z  completed  json       {first.id}  tiny  \d+\.\d\d s, 7 in, 5 out", lines[0])
    assert lines[1].endswith("not stored: request")


async def test_failed_responses_are_found_with_their_cause(recorded: Ours, upstream: ScriptedUpstream, printed: Print) -> None:
    upstream.whole(ANSWER)
    upstream.whole(error("out of memory", 500), 500)
    recorded.sync_client.responses.create(model="tiny", input="fine")
    with pytest.raises(openai.InternalServerError):
        recorded.sync_client.responses.create(model="tiny", input="not fine")
    [found] = wait_for(lambda: tail(printed, "--failed"))
    assert (found["status"], found["upstream_status"], found["cause"]) == ("failed", 500, "upstream")
    shown = printed("inspect", found["id"])
    assert "upstream status 500" in shown
    assert "no: nothing was stored, because it failed" in shown
    assert tail(printed, "--failed", "--model", "other") == []


async def test_inspect_shows_what_was_sent_for_a_failed_response(
    start: Start, redis_url: str, upstream: ScriptedUpstream, printed: Print
) -> None:
    ours = start(ui__mode="content", redis__url=redis_url, auth__secret_keys=[SECRET])
    upstream.whole(error("out of memory\x1b[2J", 500), 500)
    with pytest.raises(openai.InternalServerError):
        ours.sync_client.responses.create(model="tiny", input="a private question")
    [found] = wait_for(lambda: tail(printed, "--failed"))
    shown = wait_for(lambda: "turn 1" in (text := printed("inspect", found["id"], "--content")) and text)
    turn = shown[shown.index("turn 1: status 500") :]
    assert '"content": "a private question"' in turn
    assert "out of memory" in turn
    assert "\x1b" not in turn
    assert "private" not in printed("inspect", found["id"])
    assert printed("inspect", found["request"]).splitlines()[0] == f"response   {found['id']}"
    [captured] = json.loads(printed("inspect", found["id"], "--content", "--json"))["captured"]["turns"]
    assert captured["status"] == 500


async def test_inspect_shows_texts_only_on_demand(recorded: Ours, upstream: ScriptedUpstream, printed: Print) -> None:
    upstream.whole(ANSWER)
    upstream.whole(ANSWER)
    made = recorded.sync_client.responses.create(model="tiny", input="a private question\x1b[2J")
    child = recorded.sync_client.responses.create(model="tiny", input="more", previous_response_id=made.id)
    wait_for(lambda: len(tail(printed)) == 2)
    shown = printed("inspect", made.id)
    facts = dict(line.split(maxsplit=1) for line in shown.partition("\n\n")[0].splitlines())
    assert facts["status"] == "completed, json"
    assert facts["tokens"] == "7 in, 5 out"
    assert facts["stored"].startswith("for ")
    assert facts["next"] == child.id
    assert "message: user, 22 characters" in shown
    assert "private" not in shown
    assert "the answer" not in shown
    content = printed("inspect", made.id, "--content")
    assert "    a private question�[2J\n" in content
    assert "    the answer\n" in content
    document = json.loads(printed("inspect", made.id, "--content", "--json"))
    assert document["response"]["output"][0]["content"][0]["text"] == "the answer"
    outline = json.loads(printed("inspect", made.id, "--json"))
    assert outline["output"][0]["characters"] == len("the answer")
    assert "the answer" not in json.dumps(outline)


async def test_inspect_says_why_a_response_is_not_stored(recorded: Ours, upstream: ScriptedUpstream, printed: Print) -> None:
    upstream.whole(ANSWER)
    made = recorded.sync_client.responses.create(model="tiny", input="hello", store=False)
    wait_for(lambda: tail(printed))
    assert "no: it was not stored (request)" in printed("inspect", made.id, "--content")
    assert "nothing is known" in printed("inspect", RunIds().response, status=1)
    assert "nothing is known" in printed("inspect", "resp_unknown", status=1)


async def test_inspect_works_without_the_index(ours: Ours, upstream: ScriptedUpstream, printed: Print) -> None:
    upstream.whole(ANSWER)
    made = ours.sync_client.responses.create(model="tiny", input="hello")
    assert "7 in, 5 out" in printed("inspect", made.id)
    assert tail(printed) == []


async def test_jobs_lists_running_and_waiting_jobs(start: Start, upstream: ScriptedUpstream, printed: Print) -> None:
    ours = start(ui__mode="metadata", auth__secret_keys=[SECRET], jobs__concurrency=1)
    held = Signal()
    upstream.stream(text("hello"), held, finish())
    running = ours.sync_client.responses.create(model="tiny", input="a", background=True)
    wait_for(lambda: ours.sync_client.responses.retrieve(running.id).status == "in_progress")
    waiting = ours.sync_client.responses.create(model="tiny", input="b", background=True)

    def listed() -> Any:
        found = json.loads(printed("jobs", "--json"))
        return found if [job["state"] for job in found["jobs"]] == ["running", "waiting"] and found["replicas"] else None

    found = wait_for(listed)
    assert [job["id"] for job in found["jobs"]] == [running.id, waiting.id]
    assert (found["waiting"], found["claimed"], [*found["owners"].values()]) == (1, 1, [2])
    assert 0 < found["jobs"][0]["lease"] <= 15
    assert found["jobs"][0]["attempt"] == 1
    assert found["jobs"][0]["worker"] in found["replicas"]
    lines = printed("jobs").splitlines()
    assert lines[0] == "1 waiting, 1 claimed by workers, of 1 owners"
    assert lines[2].startswith(f"running  {running.id}  owner ")
    assert lines[3].startswith(f"waiting  {waiting.id}")
    ours.sync_client.responses.cancel(waiting.id)
    held.set()


async def test_tail_follows_responses_until_it_is_interrupted(
    recorded: Ours, upstream: ScriptedUpstream, launch: Launch, redis_url: str
) -> None:
    upstream.whole(ANSWER)
    upstream.whole(ANSWER)
    first = recorded.sync_client.responses.create(model="tiny", input="hello")
    command = launch("tail", "--redis", redis_url, "--follow")
    command.wait_for(first.id)
    second = recorded.sync_client.responses.create(model="tiny", input="hello")
    command.wait_for(second.id)
    command.end()
    assert command.output.count(first.id) == command.output.count(second.id) == 1


@pytest.mark.parametrize("command", [["inspect", "resp_a"], ["tail"], ["jobs"]])
def test_a_command_needs_redis(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 2
    assert "--redis" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main([*command, "--redis", "redis://127.0.0.1:1"])
    assert end.value.code == 2
    assert "unavailable" in capsys.readouterr().err
