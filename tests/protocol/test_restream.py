"""The stream of a finished response obeys the laws of every stream, and gives the same response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.protocol.response.builder import ResponseOptions
from responses_mw.protocol.response.events import events_of
from tests.protocol import manners
from tests.protocol.manners import MANNERS, Manner, render
from tests.protocol.runs import chunk, respond, run
from tests.support.replay import check


@pytest.mark.parametrize("manner", MANNERS, ids=lambda manner: manner.name)
@given(data=st.data())
def test_the_stream_of_a_finished_response_gives_that_response(manner: Manner, data: st.DataObject) -> None:
    options = ResponseOptions(summary=data.draw(st.booleans()))
    response = check(run(render(manner, data.draw(manners.answers), data.draw(manners.cuts())), options))
    assert check(events_of(response)) == response


def test_an_incomplete_or_failed_response_is_streamed_with_its_status() -> None:
    cut = respond(chunk(content="Hel"), chunk(finish_reason="length"))
    assert check(events_of(cut)) == cut
    failed = check(run([chunk(content="Hel"), {"choices": 1}]))
    assert failed["status"] == "failed"
    assert check(events_of(failed)) == failed
