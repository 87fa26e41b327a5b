"""The format of stored JSON, and the detection of damaged values."""

from __future__ import annotations

import pytest

from responses_mw.state import Damaged
from responses_mw.state.schema import compress, decompress, json_size, pack, unpack

TEXT = "x" * 100_000


def test_a_large_value_is_compressed_and_states_its_size() -> None:
    blob = pack(f'"{TEXT}"'.encode())
    assert len(blob) < 1000
    assert json_size(blob) == len(TEXT) + 2
    assert unpack(blob) == TEXT


@pytest.mark.parametrize("size", ["", "1", "99999999", "-1", "many"])
def test_a_value_whose_size_differs_from_its_stated_size_is_damaged(size: str) -> None:
    frame = pack(f'"{TEXT}"'.encode()).partition(b":")[2]
    with pytest.raises(Damaged):
        unpack(f"Z{size}:".encode() + frame)


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 17, 1 << 24])
def test_highly_repetitive_data_is_decompressed_unchanged(size: int) -> None:
    assert decompress(compress(bytes(size))) == bytes(size)


MAGIC = bytes.fromhex("28b52ffd")


@pytest.mark.parametrize("size", [1 << 20, 1 << 40, 1 << 62])
def test_no_memory_is_allocated_for_a_short_frame_that_states_a_large_size(size: int) -> None:
    frame = (
        MAGIC + b"\xe0" + size.to_bytes(8, "little") + b"\x03\x00\x00x"
    )  # a single segment; the last block, run-length encoded
    with pytest.raises(ValueError, match="impossible size"):
        decompress(frame)
    with pytest.raises(Damaged):
        unpack(f"Z{size}:".encode() + frame)


@pytest.mark.parametrize("blob", [b"Z5:", b"Z5:no frame", b"Z5", b"J{", b""])
def test_an_invalid_frame_or_invalid_json_is_damaged(blob: bytes) -> None:
    with pytest.raises(Damaged):
        unpack(blob)
