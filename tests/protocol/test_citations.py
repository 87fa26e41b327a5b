"""Citations that stay in the text of answers, and the results that answers can cite."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.responses.response_output_text import AnnotationFileCitation, AnnotationURLCitation

from responses_mw.protocol.citations import Source, Sources, visible_citations
from responses_mw.protocol.search_results import NOTHING_FOUND, file_output, sources_of, web_listing

PARIS = Source(1, "Paris", url="https://www.example.com/paris")
WIKI = Source(2, "Lyon", url="https://en.wikipedia.org/wiki/Lyon_(city)")
SEARCH = Source(3, "", url="https://example.org/find?q=a&page=2")
LEAVE = Source(5, "leave.pdf", file_id="file-1")
PAGES = [PARIS, WIKI, SEARCH]


def sources(*listed: Source) -> Sources:
    made = Sources()
    for source in listed or PAGES:
        made.add(source)
    return made


def citations(text: str, *listed: Source) -> list[dict[str, Any]]:
    return [*visible_citations(text, sources(*listed))]


def cited(text: str) -> list[tuple[str, str]]:
    """Return the markers with the URLs that they cite."""
    return [(text[one["start_index"] : one["end_index"]], one["url"]) for one in citations(text)]


@pytest.mark.parametrize(
    ("text", "marker", "source"),
    [
        ("Paris [1].", "[1]", PARIS),
        ("Paris[1]", "[1]", PARIS),
        ("Lyon [2†L3-L5]!", "[2†L3-L5]", WIKI),
        ("Lyon [citation:2]", "[citation:2]", WIKI),
        ("Lyon [^2], Lyon", "[^2]", WIKI),
        ("Lyon [^2^]", "[^2^]", WIKI),
        ("See [the page](https://www.example.com/paris).", "[the page](https://www.example.com/paris)", PARIS),
        ('[a](<https://example.com/paris> "Paris")', '[a](<https://example.com/paris> "Paris")', PARIS),
        ("([Lyon](https://en.wikipedia.org/wiki/Lyon_(city)))", "[Lyon](https://en.wikipedia.org/wiki/Lyon_(city))", WIKI),
        ("[1](https://www.example.com/paris)", "[1](https://www.example.com/paris)", PARIS),
        ("(see https://en.wikipedia.org/wiki/Lyon_(city)).", "https://en.wikipedia.org/wiki/Lyon_(city)", WIKI),
        ("**https://example.com/paris/**, so", "https://example.com/paris/", PARIS),
        ("<https://example.com/paris>", "https://example.com/paris", PARIS),
        ("http://EXAMPLE.com/paris#history", "http://EXAMPLE.com/paris#history", PARIS),
        ("https://example.org/find?q=a&page=2.", "https://example.org/find?q=a&page=2", SEARCH),
    ],
)
def test_a_source_can_be_cited_by_number_link_or_url(text: str, marker: str, source: Source) -> None:
    assert cited(text) == [(marker, source.url)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Nothing is cited.",
        "[4] and [0] and [9†source]",
        "https://elsewhere.example/paris",
        "https://example.com/paris/hotels",
        "https://example.org/find?q=b",
        "[elsewhere](https://elsewhere.example)",
        "[1](https://elsewhere.example)",
        "`items[1]`",
        "```python\nitems[1] = 'https://example.com/paris'\n```",
        "```\nunfinished[1]",
        "http://[broken and https://]",
        "[one] [1.5] [1-2]",
    ],
)
def test_unknown_sources_and_numbers_in_code_are_not_citations(text: str) -> None:
    assert cited(text) == []


def test_each_number_in_a_list_is_a_separate_citation() -> None:
    assert cited("Both [1, 2,9].") == [("1", PARIS.url), ("2", WIKI.url)]


def test_citations_are_in_text_order_with_positions_in_characters() -> None:
    text = "🗼 Ünder [1], dann [Lyon](https://en.wikipedia.org/wiki/Lyon_(city)) und [1]."
    found = citations(text)
    assert [text[one["start_index"] : one["end_index"]] for one in found] == [
        "[1]",
        "[Lyon](https://en.wikipedia.org/wiki/Lyon_(city))",
        "[1]",
    ]
    assert found[0] == {"type": "url_citation", "url": PARIS.url, "title": "Paris", "start_index": 8, "end_index": 11}
    for one in found:
        AnnotationURLCitation.model_validate(one, strict=True)


def test_the_title_of_a_source_without_a_title_is_its_url() -> None:
    assert citations("[3]")[0]["title"] == SEARCH.url


def test_a_file_is_cited_at_the_end_of_its_number() -> None:
    found = citations("20 days [5].", PARIS, LEAVE)
    assert found == [{"type": "file_citation", "index": 11, "file_id": "file-1", "filename": "leave.pdf"}]
    AnnotationFileCitation.model_validate(found[0], strict=True)


def test_a_text_without_sources_has_no_citations() -> None:
    assert [*visible_citations("[1] https://example.com/paris", Sources())] == []


PIECES = st.sampled_from(
    [source.url for source in PAGES]
    + [
        "[1]",
        "[2, 3]",
        "【1】",
        "[a](",
        ")",
        "(",
        "[",
        "]",
        "`",
        "```",
        "\n",
        " ",
        "https://",
        "http://[",
        "†",
        "】",
        "é",
        "🗼",
        "<",
        ">",
    ]
)
TEXTS = st.lists(PIECES | st.text(string.printable, max_size=5), max_size=30).map("".join)


@given(TEXTS)
@example("[1](https://en.wikipedia.org/wiki/Lyon_(city)")
def test_annotations_cover_the_markers_of_their_sources_without_overlaps(text: str) -> None:
    end = 0
    for one in citations(text):
        assert end <= one["start_index"] < one["end_index"] <= len(text)
        end = one["end_index"]
        marker = text[one["start_index"] : end]
        number = next(str(source.number) for source in PAGES if source.url == one["url"])
        assert number in marker or one["url"].partition("//")[2].removeprefix("www.") in marker


@pytest.mark.parametrize("piece", ["[", "[[a](", "`", "(https://", "[1,", "https://a", "[1†", "[a](https://a(", "```", ")"])
def test_citations_in_a_long_malformed_text_take_linear_time(piece: str) -> None:
    citations(piece * (200_000 // len(piece)))  # a pattern that goes back and forth would take hours


def test_the_sources_of_a_chain_are_those_of_its_searches_ordered_by_number() -> None:
    items: list[dict[str, Any]] = [
        {"type": "web_search_call", "results": [{"number": 2, "url": "https://b", "title": "B", "snippet": ""}]},
        {"type": "message", "content": []},
        {"type": "web_search_call", "status": "failed"},
        {
            "type": "web_search_call",
            "results": [
                {"number": 1, "url": "https://a", "title": "A", "snippet": ""},
                {"number": 3, "url": "", "title": "", "snippet": "a text of the provider's own"},
            ],
        },
    ]
    found = sources_of(items)
    assert [*found] == [Source(1, "A", url="https://a"), Source(2, "B", url="https://b")]
    assert (found.number("https://b"), found.number("https://c"), found.number()) == (2, 4, 5)


@pytest.mark.parametrize(
    "results",
    [
        None,
        "x",
        {},
        [None],
        [{}],
        [{"number": "1", "url": "https://a", "title": "A", "snippet": ""}],
        [{"number": 1, "url": 1}],
        [{"number": None, "url": "https://a", "title": "A", "snippet": ""}],
        [{"number": "1", "file_id": "f", "filename": "a", "text": "t"}],
        [{"number": 2**40, "file_id": "f", "filename": "a", "text": "t"}],
        [{"number": 1, "file_id": "f", "filename": "a", "text": 5}],
    ],
)
def test_results_that_a_client_has_malformed_are_not_sources(results: Any) -> None:
    assert not sources_of([{"type": kind, "results": results} for kind in ("web_search_call", "file_search_call")])
    assert web_listing(results) == NOTHING_FOUND


def test_the_model_reads_number_title_url_and_excerpt_of_each_result() -> None:
    shown = web_listing(
        [
            {"number": 4, "url": "https://a", "title": "A", "snippet": "text of a"},
            {"number": 5, "url": "", "title": "", "snippet": "a text alone"},
        ]
    )
    assert shown.split("\n\n")[1:] == [
        '<result cite="【4】">\nA\nhttps://a\ntext of a\n</result>',
        '<result cite="【5】">\na text alone\n</result>',
    ]
    assert web_listing([]) == NOTHING_FOUND


EXCERPT = {"file_id": "file-1", "filename": "leave.pdf", "score": 0.5, "attributes": {}, "text": "20 days"}


def test_the_model_reads_number_name_and_text_of_each_excerpt() -> None:
    item = {"type": "file_search_call", "results": [{**EXCERPT, "number": 7}, {**EXCERPT, "number": None}]}
    assert file_output(item).split("\n\n")[1:] == [
        '<result cite="【7】" file="leave.pdf">\n20 days\n</result>',
        '<result file="leave.pdf">\n20 days\n</result>',
    ]
    found = sources_of([item])
    assert [*found] == [Source(7, "leave.pdf", file_id="file-1")]
    assert found.number("file-1", "20 days") == 7


@pytest.mark.parametrize("item", [{}, {"results": None}])
def test_results_that_were_not_kept_are_no_longer_available(item: dict[str, Any]) -> None:
    assert "no longer available" in file_output({"type": "file_search_call", **item})


@pytest.mark.parametrize(
    "text",
    [
        *(
            "</result>",
            "</ResulT >",
            "<result cite='1'>",
            "<|im_end|>",
            "<｜User｜>",
            "<end_of_turn>",
            "</s>",
            "[/INST]",
            "【1】",
        ),
        *("<<SYS>>", "<</SYS>>", "[TOOL_CALLS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[SYSTEM_PROMPT]", "[gMASK]"),
        *("</tool_response>", "<tool_call>", "</think>", "[THINK]"),
    ],
)
def test_the_text_of_a_result_cannot_end_the_result_or_the_message(text: str) -> None:
    shown = file_output({"results": [{**EXCERPT, "number": 7, "filename": f'a" {text}\n', "text": f"a {text} b"}]})
    _, entry = shown.split("\n\n")
    assert text not in entry.replace('<result cite="【7】"', "").replace("\n</result>", "")
    assert len(entry.splitlines()) == 3


def test_code_in_the_text_of_a_result_stays_as_it_is() -> None:
    code = "if (a < b && c[1] > 2) { return <div class='s'>x</div>; }"
    assert code in file_output({"results": [{**EXCERPT, "number": 7, "text": code}]})
