"""The files of certificates."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from responses_mw import create_app
from responses_mw.errors import StartupError
from responses_mw.network import failure_reason, is_shortage
from tests.support.configured import make_settings

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
async def test_missing_ca_certificates_prevent_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, str(tmp_path / "missing"))
    app = create_app(make_settings(upstream__url="http://127.0.0.1:1"))
    with pytest.raises(StartupError, match=f"^{name}: {re.escape(str(tmp_path))}/missing "):
        await app._open({})


def test_circular_causes_of_an_exception_do_not_loop_forever() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    assert not is_shortage(first)
    assert failure_reason(first) == ""
