"""Citation markers, which are removed from the text while it arrives."""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.protocol.citation_markers import MarkerFilter, Shown
from responses_mw.protocol.citations import Source, Sources
from responses_mw.protocol.response.builder import ResponseOptions
from responses_mw.protocol.response.replay import LogReplay, OutputReplay, Takeover
from responses_mw.protocol.response.seam import Seam
from responses_mw.protocol.sse import decode, encode
from responses_mw.protocol.types import Event
from tests.support.replay import check

from .runs import CountedIds, assembler, chunk

LEAVE = Source(1, "leave.pdf", file_id="file-abcdefgh1")
TRAVEL = Source(2, "travel costs.docx", file_id="file-abcdefgh2")
PAGE = Source(3, "Page", url='https://www.example.com/a_(b)?q="c"')
LINK = "([example.com](https://www.example.com/a_%28b%29?q=%22c%22))"


def sources() -> Sources:
    made = Sources()
    for source in (LEAVE, TRAVEL, PAGE):
        made.add(source)
    return made


def shown(*pieces: str) -> tuple[str, list[tuple[int, str]]]:
    """Return the text that is shown, and the position and source of each citation."""
    markers = MarkerFilter(sources())
    parts: list[Shown] = [*map(markers.feed, pieces), markers.feed("", is_last=True)]
    found = [one for part in parts for one in part.citations]
    return "".join(part.text for part in parts), [(_place(one), _name(one)) for one in found]


def _place(citation: dict[str, Any]) -> int:
    return int(citation["index"] if "index" in citation else citation["start_index"])


def _name(citation: dict[str, Any]) -> str:
    return str(citation.get("filename") or citation["url"])


@pytest.mark.parametrize(
    ("text", "expected", "cited"),
    [
        ("You have 20 days【1】.", "You have 20 days.", [(16, "leave.pdf")]),
        ("You have 20 days 【1】.", "You have 20 days.", [(16, "leave.pdf")]),
        ("20 days 【1】 a year", "20 days a year", [(7, "leave.pdf")]),
        ("20 days 【1】(paid)", "20 days (paid)", [(7, "leave.pdf")]),
        ("20 days 【1】", "20 days", [(7, "leave.pdf")]),
        ("20天【1】。", "20天。", [(3, "leave.pdf")]),
        ("a【1】【2】", "a", [(1, "leave.pdf"), (1, "travel costs.docx")]),
        ("a 【1】 【2】 b", "a b", [(1, "leave.pdf"), (1, "travel costs.docx")]),
        ("a【1, 2】", "a", [(1, "leave.pdf"), (1, "travel costs.docx")]),
        ("a【1、2】", "a", [(1, "leave.pdf"), (1, "travel costs.docx")]),
        ("a【1-2】", "a", [(1, "leave.pdf"), (1, "travel costs.docx")]),
        ("a【1】【1】【1†source】", "a", [(1, "leave.pdf")]),
        ("a【2†source】", "a", [(1, "travel costs.docx")]),
        ("a【2†L3-L10】", "a", [(1, "travel costs.docx")]),
        ("a【1:0†source】", "a", [(1, "leave.pdf")]),
        ("a【1:0†leave.pdf】", "a", [(1, "leave.pdf")]),
        ("a【4:1†leave.pdf】", "a", [(1, "leave.pdf")]),
        ("a【1:3†travel costs.docx】", "a", [(1, "travel costs.docx")]),
        ("a【travel costs.docx】", "a", [(1, "travel costs.docx")]),
        ("a【file-abcdefgh2】", "a", [(1, "travel costs.docx")]),
        ("a【file-abcdefgh2†page 3】", "a", [(1, "travel costs.docx")]),
        ("a 【3】.", f"a {LINK}.", [(2, PAGE.url)]),
        ("a【3】.", f"a {LINK}.", [(2, PAGE.url)]),
        ("【3】", LINK, [(0, PAGE.url)]),
        ("a【3】【1】b", f"a {LINK}b", [(2, PAGE.url), (2 + len(LINK), "leave.pdf")]),
    ],
)
def test_a_marker_is_removed_and_becomes_a_citation(text: str, expected: str, cited: list[tuple[int, str]]) -> None:
    assert shown(text) == (expected, cited)
    assert shown(*text) == (expected, cited)


@pytest.mark.parametrize(
    "marker", ["【9】", "【0】", "【7†source】", "【4:0†other.pdf】", "【file-00000000】", "【8, 9】", "【2024】"]
)
def test_an_invented_marker_is_removed_without_a_citation(marker: str) -> None:
    assert shown(*f"20 days {marker}.") == ("20 days.", [])


@pytest.mark.parametrize(
    ("marker", "cited"),
    [("1", "file-abcdefgh1"), ("1†source", "file-abcdefgh1"), ("file-abcdefgh1", "file-abcdefgh1"), ("7", "file-hostile3")],
)
def test_the_name_of_a_file_does_not_take_the_citations_of_others(marker: str, cited: str) -> None:
    made = Sources()
    for number, name in enumerate(("1", "source", "file-abcdefgh1", "7", ""), 2):
        made.add(Source(number, name, file_id=f"file-hostile{number - 2}"))
    made.add(LEAVE)
    found = MarkerFilter(made).feed(f"a【{marker}】【†】", is_last=True)
    assert [one["file_id"] for one in found.citations] == [cited]
    assert found.text == "a【†】"


@pytest.mark.parametrize(
    ("marker", "citations"), [("【1】", 1000), ("【1-9, 1-9】", 1000), ("【20-60, 20-60】", 0), ("【7】", 0)]
)
def test_only_the_first_markers_of_a_text_are_looked_up(marker: str, citations: int) -> None:
    looked_up = 0

    class Counting(Sources):
        def get(self, number: int) -> Source | None:
            nonlocal looked_up
            looked_up += 1
            return super().get(number)

    made = Counting()
    for number in (1, 2):
        made.add(Source(number, "a.txt", file_id=f"file-0000000{number}"))
    found = MarkerFilter(made).feed(f"{marker} a" * 5000, is_last=True)
    assert (found.text, len(found.citations)) == (" a" * 5000, citations)
    assert looked_up <= 1000 * 2 * 41


def test_the_time_for_a_piece_does_not_depend_on_the_number_of_file_names() -> None:
    compared = 0

    class Counted(str):
        __slots__ = ()

        def startswith(self, *arguments: Any) -> bool:
            nonlocal compared
            compared += 1
            return str.startswith(self, *arguments)

    made = Sources()
    for number in range(1000):
        made.add(Source(number + 1, Counted(f"a{number}.txt"), file_id=f"file-{number:08}"))
    markers = MarkerFilter(made)
    for piece in ("【", "a", "9", "9", "9", ".", "t"):
        assert markers.feed(piece).text == ""
    assert compared < 10


@pytest.mark.parametrize(
    "text",
    [
        "【注意】请先阅读",
        "【第1章】 序",
        "【】",
        "【 】",
        "【1",
        "【1\n】",
        "【1†a",
        "1】",
        "【other.pdf】",
        "【leave.pdf.txt】",
        "【file】",
        f"【1†{'x' * 400}】",
        "a  b ",
        "a[1] = b",
    ],
)
def test_other_text_is_shown_unchanged(text: str) -> None:
    assert shown(text) == (text, [])
    assert shown(*text) == (text, [])


def test_only_an_end_that_may_become_a_marker_is_held_back() -> None:
    markers = MarkerFilter(sources())
    pieces = ["Hello", " wor", "ld", " 【", "note", "】 and", " 【1", "†so", "urce】", ".", " 【f", "ox】"]
    assert [markers.feed(piece).text for piece in pieces] == [
        *("Hello", " wor", "ld", "", " 【note", "】 and", "", "", "", ".", "", " 【fox】"),
    ]


PIECES = st.sampled_from(
    [
        *"【】†[]123:, .-a\n",
        "【1】",
        "【3】",
        " 【2†x】",
        "leave.pdf",
        "file-",
        "【travel costs.docx】",
        "【file-abcdefgh1",
        "注",
    ]
)


@given(st.lists(PIECES, max_size=25).map("".join), st.data())
def test_the_result_does_not_depend_on_how_the_text_is_split(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    assert shown(*pieces) == shown(text)


@given(st.lists(PIECES, max_size=25).map("".join), st.data())
def test_pieces_that_pass_are_the_same_as_if_they_were_fed(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    markers, seen, found = MarkerFilter(sources()), "", []
    for piece in [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]:
        part = Shown(piece, [], []) if markers.passes(piece) else markers.feed(piece)
        seen += part.text
        found += part.citations
    last = markers.feed("", is_last=True)
    named = [(_place(one), _name(one)) for one in [*found, *last.citations]]
    assert (seen + last.text, named) == shown(text)


# -- in a response -------------------------------------------------------------------------------------------------------


def events_of(*texts: str, logprobs: bool = False) -> list[Event]:
    assembling = assembler(ResponseOptions(logprobs=logprobs))
    assembling.sources = sources()
    events = assembling.start()
    for text in texts:
        tokens = {"logprobs": {"content": [{"token": text, "logprob": -1.0, "bytes": None, "top_logprobs": []}]}}
        events += assembling.feed(("content", text)) if not logprobs else assembling.feed(chunk(content=text, **tokens))
    events += assembling.feed(chunk(finish_reason="stop")) + assembling.end_turn()
    assembling.conclude(1_700_000_001)
    return events + assembling.terminal()


TEXTS = ("Twenty", " days", " 【", "1", "】", ", see", "【3】", ". [2]", " ", "`x`")


def test_citations_are_events_of_the_stream_and_annotations_of_the_response() -> None:
    part = check(events_of(*TEXTS))["output"][0]["content"][0]
    assert part["text"] == f"Twenty days, see {LINK}. [2] `x`"
    files = [one for one in part["annotations"] if one["type"] == "file_citation"]
    (page,) = [one for one in part["annotations"] if one["type"] == "url_citation"]
    assert [(one["index"], one["filename"]) for one in files] == [
        (11, "leave.pdf"),
        (len(part["text"]) - 4, "travel costs.docx"),
    ]
    assert part["text"][page["start_index"] : page["end_index"]] == LINK
    assert page["url"] == PAGE.url


def test_a_citation_is_sent_when_its_marker_is_complete() -> None:
    types = [event.type.removeprefix("response.") for event in events_of("20 days 【1", "】. And", " more.")]
    wanted = ["output_text.delta", "output_text.annotation.added", "output_text.delta", "output_text.delta", "output_text.done"]
    begin = types.index("output_text.delta")
    assert types[begin : begin + 5] == [wanted[0], wanted[0], wanted[1], wanted[0], wanted[4]]


def test_deltas_on_the_short_path_are_the_same_as_others() -> None:
    expected = [event for event in events_of(*TEXTS) if event.type != "response.completed"]
    assembling = assembler()
    assembling.sources = sources()
    frames, short = encode(assembling.start()), 0
    for piece in TEXTS:
        frame = assembling.delta(("content", piece))
        short += frame is not None
        frames += encode(assembling.feed(("content", piece))) if frame is None else frame
    frames += encode(assembling.feed(chunk(finish_reason="stop")) + assembling.end_turn())
    assert short == 2
    assert list(decode(frames)) == [json.loads(json.dumps(event.data)) for event in expected]


@pytest.mark.parametrize("marker", ["【3】", "【1】.", "[1]"])
def test_a_text_has_a_limited_number_of_citations(marker: str) -> None:
    part = check(events_of(marker * 1500))["output"][0]["content"][0]
    assert len(part["annotations"]) == 1000
    assert "【" not in part["text"]
    assert part["text"].count(LINK) == (1000 if marker == "【3】" else 0)


def test_the_tokens_of_a_marker_have_no_log_probabilities() -> None:
    part = check(events_of(*TEXTS, logprobs=True))["output"][0]["content"][0]
    assert [one["token"] for one in part["logprobs"]] == ["Twenty", " days", ", see", ". [2]", " ", "`x`"]


def test_text_that_is_held_back_is_dropped_if_another_answer_continues_the_text() -> None:
    assembling = assembler()
    assembling.sources = sources()
    assembling.start()
    assembling.feed(chunk(content="20 days 【1"))
    assembling.break_off()
    assembling.feed(chunk(content=" a year【2】"), chunk(finish_reason="stop"))
    assembling.end_turn()
    part = assembling.response["output"][0]["content"][0]
    assert part["text"] == "20 days a year"
    assert [(one["index"], one["filename"]) for one in part["annotations"]] == [(14, "travel costs.docx")]


@pytest.mark.parametrize("cut", range(1, len(TEXTS)))
def test_a_text_with_citations_is_continued_by_another_worker(cut: int) -> None:
    lost = assembler()
    lost.sources = sources()
    events = lost.start() + [event for text in TEXTS[:cut] for event in lost.feed(("content", text))]
    log = LogReplay()
    log.read(encode(events))
    takeover = Takeover(log)
    before = deepcopy(takeover.items[-1]["content"][0])
    other = assembler(ids=CountedIds(len(takeover.items)))
    other.sources = sources()
    events += other.take_over(takeover, len(events))
    other.join(Seam(before["text"], is_trimmed=False), None)
    events += other.feed(chunk(content=" and more 【2】."), chunk(finish_reason="stop")) + other.end_turn()
    other.conclude(1_700_000_001)
    part = check(events + other.terminal())["output"][0]["content"][0]
    assert part["text"] == before["text"] + " and more."
    assert part["annotations"][: len(before["annotations"])] == before["annotations"]
    at = len(part["text"]) - 1
    assert {"type": "file_citation", "index": at, "file_id": TRAVEL.file_id, "filename": TRAVEL.title} in part["annotations"]


def test_another_worker_finds_the_citations_of_an_unfinished_text_in_its_events() -> None:
    replay = OutputReplay([])
    for event in events_of(*TEXTS):
        if event.type == "response.output_text.done":
            break
        replay.take(event.data)
    (part,) = replay.put(0)["content"]
    assert [one["type"] for one in part["annotations"]] == ["file_citation", "url_citation", "file_citation"]
    assert part["text"].startswith("Twenty days, see")
