"""Skip tests that need Helm if it is not available."""

from __future__ import annotations

import pytest

from tests.helm.rendering import NoHelm, helm


@pytest.fixture(scope="session", autouse=True)
def _helm() -> None:
    try:
        helm()
    except NoHelm as missing:
        pytest.skip(str(missing))
