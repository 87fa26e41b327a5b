"""Signatures: what proves that data came from us."""

from __future__ import annotations

import pytest

from responses_mw.crypto import Sealer

OLD, NEW = "an old secret of thirty-two letters", "a new secret of thirty-two letters."
OURS = {"purpose": "lists", "owner": "alice"}


def test_a_signature_holds_for_the_same_data_purpose_and_owner_only() -> None:
    sealer = Sealer([OLD])
    signature = sealer.sign(b"data", **OURS)
    assert sealer.is_signed(signature, b"data", **OURS)
    assert not sealer.is_signed(signature, b"Data", **OURS)
    assert not sealer.is_signed(signature, b"data", **{**OURS, "owner": "bob"})
    assert not sealer.is_signed(signature, b"data", **{**OURS, "purpose": "else"})


def test_the_same_data_has_the_same_signature_wherever_the_key_is_the_same() -> None:
    assert Sealer([OLD]).sign(b"data", **OURS) == Sealer([OLD]).sign(b"data", **OURS)


def test_a_key_that_is_rolled_out_before_it_signs_is_known_everywhere() -> None:
    assert Sealer([OLD, NEW]).is_signed(Sealer([NEW, OLD]).sign(b"data", **OURS), b"data", **OURS)
    assert not Sealer([OLD]).is_signed(Sealer([NEW]).sign(b"data", **OURS), b"data", **OURS)


def test_without_secrets_a_signature_is_known_to_the_process_that_made_it_only() -> None:
    assert not Sealer().is_signed(Sealer().sign(b"data", **OURS), b"data", **OURS)


@pytest.mark.parametrize("end", ["", ".", "=", "\udcff", "\u00e9", ".x"])
def test_what_is_no_signature_is_none(end: str) -> None:
    sealer = Sealer([OLD])
    signature = sealer.sign(b"data", **OURS)
    assert not sealer.is_signed(end, b"data", **OURS)
    assert not sealer.is_signed(f"{signature[:-4]}{end}", b"data", **OURS)
    assert not sealer.is_signed(f"rmw1.{sealer.key_ids[0]}.{end}", b"data", **OURS)
    assert not sealer.is_signed(f"{sealer.key_ids[0]}.{signature.rpartition('.')[2]}", b"data", **OURS)
