"""Chunks are found by their meaning and by their words."""

from __future__ import annotations

import numpy as np
import pytest

from responses_mw.files.ranking import Weights
from responses_mw.files.search import Index, Query, Segment, search


def unit(*numbers: float) -> np.ndarray:
    vector = np.array(numbers, np.float32)
    return vector / np.linalg.norm(vector)


def segment(name: str, *chunks: tuple[str, np.ndarray]) -> Segment:
    return Segment.of_texts(name, [text for text, _ in chunks], np.stack([vector for _, vector in chunks]))


BOTH = Weights()
LEAVE = segment("a", ("the annual leave is 28 days", unit(1, 0, 0)), ("parental leave", unit(0.7, 0.7, 0)))
DOG = segment("b", ("the office dog is called Rex", unit(0, 0, 1)))


@pytest.fixture
def index() -> Index:
    return Index().updated({"a", "b"}, [LEAVE, DOG])


def found(index: Index, vector: np.ndarray | None, text: str, k: int = 10, weights: Weights = BOTH) -> list[tuple[str, int]]:
    return [(hit.block, hit.chunk) for hit in search([(index, index.blocks)], [Query(vector, text)], k, weights)]


def test_a_chunk_is_found_by_its_words(index: Index) -> None:
    assert found(index, None, "REX?") == [("b", 0)]
    assert found(index, None, "annual leave") == [("a", 0), ("a", 1)]
    assert found(index, None, "nothing") == []


def test_a_chunk_is_found_by_its_vector(index: Index) -> None:
    assert found(index, unit(0.9, 0.3, 0), "nothing") == [("a", 0), ("a", 1), ("b", 0)]
    assert found(index, unit(0, 0, 1), "leave", 1, Weights(1, 0)) == [("b", 0)]
    assert found(index, unit(0, 0, 1), "parental", 1, Weights(0, 1)) == [("a", 1)]


def test_the_score_is_the_weighted_mean_of_the_scores_by_vectors_and_by_words(index: Index) -> None:
    def scores(*weights: float) -> list[float]:
        [first] = search([(index, index.blocks)], [Query(unit(1, 0, 0), "annual dog")], 1, Weights(*weights))
        assert (first.block, first.chunk) == ("a", 0)
        return [first.score]

    vectors, words = scores(1, 0), scores(0, 1)
    assert 0 < words[0] < 0.5 < vectors[0] <= 1
    assert scores(1, 1) == scores(0.5, 0.5) == pytest.approx([(vectors[0] + words[0]) / 2])
    assert scores(0.9, 0.1) == pytest.approx([0.9 * vectors[0] + 0.1 * words[0]])


def test_the_ranking_does_not_depend_on_a_similarity_common_to_all_vectors() -> None:
    random = np.random.default_rng(1)
    words = [f"w{n}" for n in range(20)]
    texts = [" ".join(random.choice(words, 8)) for _ in range(2000)]
    vectors, query = random.standard_normal((2000, 16)), random.standard_normal(16)
    rankings = []
    for common in (0, 20):  # the similarities are about 0, or about 0.96
        with_common = [np.append(vector / np.linalg.norm(vector) * 4, common) for vector in (*vectors, query)]
        units = np.array([vector / np.linalg.norm(vector) for vector in with_common], np.float32)
        index = Index().updated({"a"}, [Segment.of_texts("a", texts, units[:-1])])
        rankings.append(found(index, units[-1], "w1 w2", 10))
    assert len({*rankings[0]} & {*rankings[1]}) >= 9


def test_only_wanted_blocks_are_searched(index: Index) -> None:
    query = [Query(unit(1, 0, 0), "leave")]
    assert [hit.block for hit in search([(index, {"b"})], query, 10)] == ["b"]
    assert search([(index, ())], query, 10) == []


def test_each_chunk_gets_the_score_of_its_best_query(index: Index) -> None:
    queries = [Query(unit(0, 1, 0), "parental"), Query(unit(0, 0, 1), "dog")]
    first, second = search([(index, index.blocks)], queries, 2)
    assert {(first.block, first.chunk), (second.block, second.chunk)} == {("a", 1), ("b", 0)}
    assert search([(index, index.blocks)], queries[:1], 1)[0][:3] == (0, "a", 1)


def test_several_indexes_are_searched_as_one() -> None:
    indexes = [(Index().updated(one.blocks, [one]), one.blocks) for one in (DOG, LEAVE)]
    hits = search(indexes, [Query(unit(1, 0, 0), "annual dog")], 3)
    assert [(hit.store, hit.block, hit.chunk) for hit in hits] == [(1, "a", 0), (1, "a", 1), (0, "b", 0)]


def test_a_block_is_replaced_as_a_whole_and_removed(index: Index) -> None:
    replaced = index.updated({"c", "b"}, [segment("c", ("sick leave", unit(0, 1, 0)))])
    assert found(replaced, None, "leave") == [("c", 0)]
    assert found(replaced.updated({"b"}), None, "leave") == []
    assert found(index, None, "leave") == [("a", 1), ("a", 0)]


def test_a_rare_word_counts_more_than_a_frequent_one() -> None:
    chunks = [(f"common {'rare' if n == 7 else 'word'} {'common ' * (n % 3)}", unit(1, n)) for n in range(50)]
    assert found(Index().updated({"a"}, [segment("a", *chunks)]), None, "common rare", 1) == [("a", 7)]


def test_an_updated_index_equals_one_built_at_once() -> None:
    random = np.random.default_rng(1)
    words = [f"w{n}" for n in range(30)]
    blocks = [
        segment(f"{n}", *((" ".join(random.choice(words, 8)), unit(*random.standard_normal(4))) for _ in range(n % 5 + 1)))
        for n in range(40)
    ]
    index, kept = Index(), set[str]()
    for block in blocks:
        kept = {name for name in kept | {*block.blocks} if int(name) % 7 or int(name) > 30}
        index = index.updated(kept, [block])
    whole = Index().updated(kept, [block for block in blocks if block.blocks[0] in kept])
    assert len(index.segments) < 8
    assert index.blocks == kept
    assert sum(map(len, index.segments)) == sum(map(len, whole.segments))
    for _ in range(20):
        query = [Query(unit(*random.standard_normal(4)), " ".join(random.choice(words, 3)))]
        one, other = ({hit[1:3]: hit.score for hit in search([(each, kept)], query, 300)} for each in (index, whole))
        assert one.keys() == other.keys()


def test_the_ranking_equals_that_of_an_exact_scan() -> None:
    random = np.random.default_rng(1)
    vectors = random.standard_normal((500, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    names = {f"{start}" for start in range(0, 500, 50)}
    index = Index().updated(names, [Segment.of_texts(name, [""] * 50, vectors[int(name) : int(name) + 50]) for name in names])
    for query in vectors[:20] + 0.1:
        best = np.argsort(-(vectors @ query), kind="stable")[:10]
        assert found(index, query, "") == [(f"{n // 50 * 50}", n % 50) for n in best]


@pytest.mark.parametrize("number", [np.nan, np.inf, 3.0])
def test_a_vector_that_is_not_of_length_one_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="not of length 1"):
        Segment.of_texts("a", ["a", "b"], np.array([[1, 0], [number, 0]]))
