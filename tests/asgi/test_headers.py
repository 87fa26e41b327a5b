"""The headers that all responses to a create have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.creates import CREATES

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Start


STATUSES = {"refused": 400, "invalid": 400, "no_json": 400, "without_key": 401, "from_foreign_page": 403, "broken_off": 502}


@pytest.mark.parametrize("kind", CREATES)
async def test_every_create_has_the_callers_request_id(start: Start, upstream: ScriptedUpstream, kind: str) -> None:
    response = await CREATES[kind](start, upstream, {"x-request-id": "mine"})
    assert response.status_code == STATUSES.get(kind.partition(",")[0], 200)
    assert response.headers.get_list("x-request-id") == ["mine"]
