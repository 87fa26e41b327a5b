"""Truncated calls of kinds that are not streamed before they are complete."""

from __future__ import annotations

import pytest

from responses_mw.protocol.request.tools import offered
from tests.protocol.runs import assembler, chunk, fragment
from tests.support.replay import check


@pytest.mark.parametrize("kind", ["shell", "apply_patch", "local_shell"])
def test_a_truncated_call_that_the_client_could_not_read_is_omitted(kind: str) -> None:
    assembling = assembler()
    assembling.offer(offered([{"type": kind}], []), "auto")
    events = assembling.start() + assembling.feed(chunk(tool_calls=[fragment(name=kind, arguments='{"comm')]))
    events += assembling.feed(chunk(finish_reason="length")) + assembling.end_turn()
    assembling.conclude(1)
    response = check(events + assembling.terminal())
    assert response["status"] == "incomplete"
    assert [item["type"] for item in response["output"]] == ["message"]
