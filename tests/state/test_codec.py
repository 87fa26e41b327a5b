"""How JSON is stored: what was not written by this server is damaged."""

from __future__ import annotations

import pytest

from responses_mw.state import Damaged
from responses_mw.state.codec import json_size, pack, unpack

TEXT = "x" * 100_000


def test_a_large_value_is_compressed_and_says_its_size() -> None:
    blob = pack(f'"{TEXT}"'.encode())
    assert len(blob) < 1000
    assert json_size(blob) == len(TEXT) + 2
    assert unpack(blob) == TEXT


@pytest.mark.parametrize("size", ["", "1", "99999999", "-1", "many"])
def test_a_value_that_is_larger_or_smaller_than_it_says_is_damaged(size: str) -> None:
    frame = pack(f'"{TEXT}"'.encode()).partition(b":")[2]
    with pytest.raises(Damaged):
        unpack(f"Z{size}:".encode() + frame)
