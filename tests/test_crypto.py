"""Signatures, which prove that data came from us, and envelopes, which only we can read."""

from __future__ import annotations

import pytest

from responses_mw.crypto import InvalidEnvelope, Sealer, is_envelope

OLD, NEW = "an old secret of thirty-two letters", "a new secret of thirty-two letters."
OURS = {"purpose": "lists", "owner": "alice"}


def test_a_signature_holds_for_the_same_data_purpose_and_owner_only() -> None:
    sealer = Sealer([OLD])
    signature = sealer.sign(b"data", **OURS)
    assert sealer.is_signed(signature, b"data", **OURS)
    assert not sealer.is_signed(signature, b"Data", **OURS)
    assert not sealer.is_signed(signature, b"data", **{**OURS, "owner": "bob"})
    assert not sealer.is_signed(signature, b"data", **{**OURS, "purpose": "else"})


def test_equal_data_and_keys_give_equal_signatures() -> None:
    assert Sealer([OLD]).sign(b"data", **OURS) == Sealer([OLD]).sign(b"data", **OURS)


def test_a_key_that_is_rolled_out_before_it_signs_is_known_everywhere() -> None:
    assert Sealer([OLD, NEW]).is_signed(Sealer([NEW, OLD]).sign(b"data", **OURS), b"data", **OURS)
    assert not Sealer([OLD]).is_signed(Sealer([NEW]).sign(b"data", **OURS), b"data", **OURS)


def test_without_secrets_a_signature_is_known_to_the_process_that_made_it_only() -> None:
    assert not Sealer().is_signed(Sealer().sign(b"data", **OURS), b"data", **OURS)


@pytest.mark.parametrize("end", ["", ".", "=", "\udcff", "\u00e9", ".x"])
def test_a_malformed_signature_is_invalid(end: str) -> None:
    sealer = Sealer([OLD])
    signature = sealer.sign(b"data", **OURS)
    assert not sealer.is_signed(end, b"data", **OURS)
    assert not sealer.is_signed(f"{signature[:-4]}{end}", b"data", **OURS)
    assert not sealer.is_signed(f"rmw1.{sealer.key_ids[0]}.{end}", b"data", **OURS)
    assert not sealer.is_signed(f"{sealer.key_ids[0]}.{signature.rpartition('.')[2]}", b"data", **OURS)


# -- envelopes -----------------------------------------------------------------------------------------------------------------

SEALING = {"purpose": "a credential", "owner": "alice"}


def test_an_envelope_is_opened_for_the_same_purpose_and_owner_only() -> None:
    envelope = Sealer([OLD]).seal(b"data", **SEALING)
    assert is_envelope(envelope)
    assert Sealer([NEW, OLD]).open(envelope, **SEALING) == b"data"
    for sealer, other in (
        (Sealer([OLD]), {**SEALING, "owner": "bob"}),
        (Sealer([OLD]), {**SEALING, "purpose": "else"}),
        (Sealer([NEW]), SEALING),
        (Sealer(), SEALING),
    ):
        with pytest.raises(InvalidEnvelope):
            sealer.open(envelope, **other)


def test_the_same_data_is_sealed_differently_each_time() -> None:
    sealer = Sealer([OLD])
    assert len({sealer.seal(b"data", **SEALING) for _ in range(20)}) == 20


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "rmw1",
        "rmw1.{key}",
        "rmw1.{key}.",
        "rmw1.{key}.AAAA",
        "rmw1.{key}.{data}A",
        "rmw1.{key}.{data}====",
        "rmw1.{key}.{data}\u00e9",
        "rmw1.{key}.!{data}",
        "rmw1.{key}. {data}",
        "rmw1.0000.{data}",
        "rmw0.{key}.{data}",
        "rmw2.{key}.{data}",
        "{key}.{data}",
    ],
)
def test_a_damaged_envelope_is_invalid(damaged: str) -> None:
    sealer = Sealer([OLD])
    key, data = sealer.seal(b"data", **SEALING).split(".")[1:]
    with pytest.raises(InvalidEnvelope):
        sealer.open(damaged.format(key=key, data=data), **SEALING)


def test_each_character_of_an_envelope_matters() -> None:
    sealer = Sealer([OLD])
    envelope = sealer.seal(b"12", **SEALING)  # 30 bytes, so that base64 leaves no bit unused
    for place, character in enumerate(envelope):
        with pytest.raises(InvalidEnvelope):
            sealer.open(envelope[:place] + ("A" if character != "A" else "B") + envelope[place + 1 :], **SEALING)


def test_data_stored_by_earlier_releases_can_be_read() -> None:
    sealer = Sealer([OLD])
    assert sealer.key_ids == ["4bd7f7ee"]
    assert sealer.open("rmw1.4bd7f7ee.dQteSV9MB4ocHk5mHnCC5fXulO_L-cKtkiXLsfAIdos=", **SEALING) == b"data"
    assert sealer.is_signed("rmw1.4bd7f7ee.p0nBEK-b59nFUPfs2rz4MFrca3yYqviUgL-CAATkoOs=", b"data", **OURS)
