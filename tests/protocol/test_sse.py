"""Decoding and encoding of event streams, including unusual ones of real servers."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.errors import UpstreamError
from responses_mw.protocol import sse
from responses_mw.protocol.sse import SSEDecoder


def decode(*reads: bytes) -> list[bytes]:
    decoder = SSEDecoder()
    return [frame for read in reads for frame in decoder.feed(read)] + decoder.flush()


@pytest.mark.parametrize(
    ("stream", "frames"),
    [
        (b'data: {"a": 1}\n\n', [b'{"a": 1}']),
        (b"data:x\n\n", [b"x"]),  # axum 0.6 under TGI up to 2.0
        (b"data:  x\n\n", [b" x"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"\n\n\ndata: a\n\n\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\r\n\ndata: b\n\r\n", [b"a", b"b"]),
        (b": ping\n\ndata: a\n\n:\n\n: keep-alive\n\n", [b"a"]),
        (b": ping\ndata: a\n\n", [b"a"]),
        (b"event: sglext_ids\ndata: a\nid: 1\nretry: 10\nunknown\n\n", [b"a"]),
        (b"data\n\ndata:\n\ndata: \n\ndata: a\n\n", [b"a"]),
        (codecs.BOM_UTF8 + b"data: a\n\n", [b"a"]),
        (b"data: [DONE]\n\n", [sse.DONE]),
        (b"data: a\n\ndata: [DONE]", [b"a", sse.DONE]),  # the stream ends without a line end
        (b"data: a\n", [b"a"]),
        (b"data: a\r", [b"a"]),
        (b'error: {"message": "boom"}\n\n', [b'{"error":{"message": "boom"}}']),  # llama.cpp before September 2025
        (b"error: boom\n\n", [b'{"error":"boom"}']),
        (b"event: error\n: no image\n\ndata: a\n\n", [b'{"object":"error","error":"no image"}', b"a"]),  # Dynamo
        (b"event:Error\r\n:a\r\n: b\r\n\r\n", [b'{"object":"error","error":"a\\nb"}']),
        (b"event: error\n\n", [b'{"object":"error","error":""}']),
        (b'event: error\ndata: {"message": "boom"}\n\n', [b'{"object":"error","error":{"message": "boom"}}']),
        (b"event: error\n: c\ndata: boom\n\n", [b'{"object":"error","error":"boom"}']),
        (b"event: error\ndata: 5\n\n", [b'{"object":"error","error":"5"}']),
        (b'{"error": 1}\ndata: [DONE]\n\n', [b'{"error": 1}', sse.DONE]),
        (b'data: a\n{"error": 1}\n{"b": 2}\n\n', [b"a", b'{"error": 1}', b'{"b": 2}']),
        (b'  {\n  "error": {\n  }\n}\n\ndata: a\n\n', [b'{\n  "error": {\n  }\n}', b"a"]),
        (b"Bad gateway: {\n\ndata: a\n\n", [b"a"]),
        (b"", []),
        (b"\n\n", []),
        ("data: Größe 🙂\n\n".encode(), ["Größe 🙂".encode()]),
    ],
)
def test_a_stream_is_decoded_to_the_data_of_its_frames(stream: bytes, frames: list[bytes]) -> None:
    assert decode(stream) == frames
    assert decode(*(stream[n : n + 1] for n in range(len(stream)))) == frames


payloads = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1).map(str.encode)
noise = st.sampled_from([b"", b":", b": ping", b"event: x", b"id: 1", b"retry: 1"])


@given(
    frames=st.lists(st.tuples(noise, st.lists(payloads, min_size=1, max_size=3)), max_size=5),
    ends=st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=1, max_size=5),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any),
    bom=st.booleans(),
)
def test_frames_do_not_depend_on_line_ends_or_packet_boundaries(
    frames: list[tuple[bytes, list[bytes]]], ends: list[bytes], lengths: list[int], bom: bool
) -> None:
    lines: list[bytes] = []
    for other, data in frames:
        lines += [other] if other else []
        lines += [b"data: " + line for line in data] + [b""]
    stream = codecs.BOM_UTF8 if bom else b""
    for number, line in enumerate(lines):
        stream += line + ends[number % len(ends)]
    if b"\r" in ends and b"\n" in ends:
        stream = stream.replace(b"\r\n", b"\n")  # a CR that happens to stand before an LF would be one line end
    reads, position, turn = [], 0, 0
    while position < len(stream):
        reads.append(stream[position : position + lengths[turn % len(lengths)]])
        position, turn = position + len(reads[-1]), turn + 1
    expected = [b"\n".join(data) for _, data in frames]
    assert decode(stream) == decode(*reads)
    if not (b"\r" in ends and b"\n" in ends):
        assert decode(stream) == expected


def test_an_empty_read_between_cr_and_lf_does_not_end_the_line_twice() -> None:
    assert decode(b"data: a\r", b"", b"\ndata: b\r\n\r\n") == [b"a\nb"]


def test_flushed_data_is_not_returned_again() -> None:
    decoder = SSEDecoder()
    decoder.feed(b"data: a")
    assert decoder.flush() == [b"a"]
    assert decoder.flush() == []


def test_a_frame_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_FRAME", 10)
    decoder = SSEDecoder()
    assert decoder.feed(b"data: " + b"x" * 20 + b"\n\n") == [b"x" * 20]
    with pytest.raises(UpstreamError, match="10 bytes"):
        decoder.feed(b"data: 12345")


def test_an_encoded_event_can_be_decoded() -> None:
    assert sse.frame("response.created", b"{}") == b"event: response.created\ndata: {}\n\n"
    assert decode(sse.frame("response.created", b"{}") + sse.KEEP_ALIVE + sse.DONE_FRAME) == [b"{}", sse.DONE]
