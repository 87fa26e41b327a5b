"""Where an answer cites a source of a web search."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.responses.response_output_text import AnnotationURLCitation

from responses_mw.protocol.response.text import NOTHING_FOUND, citations, listing, sources_of

PARIS = {"url": "https://www.example.com/paris", "title": "Paris"}
WIKI = {"url": "https://en.wikipedia.org/wiki/Lyon_(city)", "title": "Lyon"}
SEARCH = {"url": "https://example.org/find?q=a&page=2", "title": ""}
SOURCES = [PARIS, WIKI, SEARCH]


def cited(text: str, sources: list[dict[str, Any]] = SOURCES) -> list[tuple[str, str]]:
    """The markers with the URLs that they stand for."""
    return [(text[one["start_index"] : one["end_index"]], one["url"]) for one in citations(text, sources)]


@pytest.mark.parametrize(
    ("text", "marker", "source"),
    [
        ("Paris [1].", "[1]", PARIS),
        ("Paris[1]", "[1]", PARIS),
        ("Lyon 【2】", "【2】", WIKI),
        ("Lyon 【2†L3-L5】!", "【2†L3-L5】", WIKI),
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
def test_a_source_is_cited_by_number_link_or_url(text: str, marker: str, source: dict[str, Any]) -> None:
    assert cited(text) == [(marker, source["url"])]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Nothing is cited.",
        "[4] and [0] and 【9】",
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
def test_what_is_no_source_or_stands_in_code_is_not_cited(text: str) -> None:
    assert cited(text) == []


def test_each_number_of_a_list_is_a_citation_of_its_own() -> None:
    assert cited("Both [1, 2,9].") == [("1", PARIS["url"]), ("2", WIKI["url"])]


def test_citations_stand_in_the_order_of_the_text_and_count_characters() -> None:
    text = "🗼 Ünder [1], dann [Lyon](https://en.wikipedia.org/wiki/Lyon_(city)) und [1]."
    found = citations(text, SOURCES)
    assert [text[one["start_index"] : one["end_index"]] for one in found] == [
        "[1]",
        "[Lyon](https://en.wikipedia.org/wiki/Lyon_(city))",
        "[1]",
    ]
    assert found[0] == {"type": "url_citation", "url": PARIS["url"], "title": "Paris", "start_index": 8, "end_index": 11}
    for one in found:
        AnnotationURLCitation.model_validate(one, strict=True)


def test_a_source_without_a_title_is_named_by_its_url() -> None:
    assert citations("[3]", SOURCES)[0]["title"] == SEARCH["url"]


def test_a_number_that_a_source_has_goes_before_its_place() -> None:
    sources = [{**WIKI, "number": 7}, {**PARIS, "number": 9}]
    assert cited("[1] [7] [9]", sources) == [("[7]", WIKI["url"]), ("[9]", PARIS["url"])]


def test_without_sources_nothing_is_cited() -> None:
    assert citations("[1] https://example.com/paris", []) == []


PIECES = st.sampled_from(
    [source["url"] for source in SOURCES]
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
def test_every_annotation_covers_a_marker_of_its_source_and_none_overlaps(text: str) -> None:
    end = 0
    for one in citations(text, SOURCES):
        assert end <= one["start_index"] < one["end_index"] <= len(text)
        end = one["end_index"]
        marker = text[one["start_index"] : end]
        number = str([source["url"] for source in SOURCES].index(one["url"]) + 1)
        assert number in marker or one["url"].partition("//")[2].removeprefix("www.") in marker


@pytest.mark.parametrize("piece", ["[", "[[a](", "`", "(https://", "[1,", "https://a", "【1†", "[a](https://a(", "```", ")"])
def test_long_nonsense_takes_time_in_proportion_to_its_length(piece: str) -> None:
    citations(piece * (200_000 // len(piece)), SOURCES)  # a pattern that goes back and forth would take hours


def test_the_sources_of_a_chain_are_those_of_its_searches_by_number() -> None:
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
    assert sources_of(items) == [
        {"number": 1, "url": "https://a", "title": "A"},
        {"number": 2, "url": "https://b", "title": "B"},
    ]


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
    ],
)
def test_results_that_a_client_has_spoilt_are_no_sources(results: Any) -> None:
    assert sources_of([{"type": "web_search_call", "results": results}]) == []
    assert listing(results) == NOTHING_FOUND


def test_the_model_reads_number_title_url_and_excerpt_of_each_result() -> None:
    shown = listing(
        [
            {"number": 4, "url": "https://a", "title": "A", "snippet": "text of a"},
            {"number": 5, "url": "", "title": "", "snippet": "a text alone"},
        ]
    )
    assert shown.split("\n\n")[1:] == ["[4] A\nhttps://a\ntext of a", "[5]\na text alone"]
    assert listing([]) == NOTHING_FOUND
