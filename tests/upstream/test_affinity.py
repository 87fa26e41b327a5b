"""Endpoints are chosen for sessions with balance, little movement, agreement between replicas, and bounded load."""

from __future__ import annotations

import heapq
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import islice
from math import ceil, sqrt

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from responses_mw.upstream.affinity import FLOOR, LOAD_FACTOR, score, session_key
from responses_mw.upstream.discovery import Address
from responses_mw.upstream.endpoint import Endpoint
from responses_mw.upstream.pool import choose


def fleet(size: int, url: str = "http://10.0.0.{}:8000") -> list[Endpoint]:
    return [endpoint(url.format(number)) for number in range(size)]


def endpoint(url: str, in_flight: int = 0) -> Endpoint:
    made = Endpoint(Address(url, "vllm:8000", ""))
    made.in_flight = in_flight
    return made


def url_of(chosen: Endpoint) -> str:
    return chosen.address.url


def sessions(number: int) -> list[str]:
    return [session_key(f"chain-{index}") for index in range(number)]


def deviation(counts: Iterable[int], cells: int) -> float:
    """Return how many standard deviations the chi-squared statistic of `counts` is above that of an even distribution."""
    found = list(counts)
    mean = sum(found) / cells
    squares = sum((count - mean) ** 2 / mean for count in found) + (cells - len(found)) * mean
    return (squares - (cells - 1)) / sqrt(2 * (cells - 1))


URLS = st.lists(st.sampled_from([f"http://10.0.0.{number}:8000" for number in range(40)]), min_size=1, max_size=12, unique=True)
SESSIONS = st.lists(st.binary(max_size=8).map(session_key), min_size=1, max_size=40)


# -- sessions ------------------------------------------------------------------------------------------------------------


@given(one=st.lists(st.text() | st.binary(), max_size=4), other=st.lists(st.text() | st.binary(), max_size=4))
def test_different_parts_have_different_keys(one: list[str | bytes], other: list[str | bytes]) -> None:
    def encoded(parts: list[str | bytes]) -> list[bytes]:
        return [part.encode() if isinstance(part, str) else part for part in parts]

    assume(encoded(one) != encoded(other))
    assert session_key(*one) != session_key(*other)


def test_session_keys_depend_on_the_boundaries_between_parts() -> None:
    keys = [session_key(*parts) for parts in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], ["", "abc"], [])]
    assert len(set(keys)) == len(keys)


def test_a_session_key_can_be_made_of_any_string() -> None:
    assert len(session_key("\ud800", "\0", "é" * 10_000)) == 32


# -- balance -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://10.0.0.{}:8000", "http://vllm-{}.vllm:8000", "http://localhost:{}"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_sessions_are_spread_evenly_over_endpoints_with_similar_urls(size: int, url: str) -> None:
    endpoints = fleet(size, url)
    counts = Counter(url_of(choose(endpoints, session)) for session in sessions(16_000))
    assert deviation(counts.values(), size) < 5


@pytest.mark.slow
def test_64_000_sessions_are_spread_evenly_over_64_endpoints() -> None:
    endpoints = fleet(64)
    counts = Counter(url_of(choose(endpoints, session)) for session in sessions(64_000))
    assert deviation(counts.values(), 64) < 5
    assert max(counts.values()) < 1.2 * 1_000
    assert min(counts.values()) > 0.8 * 1_000


def test_the_sessions_of_a_removed_endpoint_are_spread_evenly_over_the_others() -> None:
    endpoints = fleet(8)
    for removed in endpoints:
        left = [one for one in endpoints if one is not removed]
        moved = [session for session in sessions(4_000) if choose(endpoints, session) is removed]
        assert len(moved) > 300
        assert deviation(Counter(url_of(choose(left, session)) for session in moved).values(), len(left)) < 5


# -- movement ------------------------------------------------------------------------------------------------------------


@given(urls=URLS, keys=SESSIONS, data=st.data())
def test_removing_an_endpoint_moves_only_its_sessions(urls: list[str], keys: list[str], data: st.DataObject) -> None:
    assume(len(urls) > 1)
    endpoints = [endpoint(url) for url in urls]
    removed = data.draw(st.sampled_from(endpoints))
    left = [one for one in endpoints if one is not removed]
    for session in keys:
        before = choose(endpoints, session)
        assert before is removed or choose(left, session) is before


@given(urls=URLS, keys=SESSIONS)
def test_sessions_that_move_when_an_endpoint_is_added_move_to_it(urls: list[str], keys: list[str]) -> None:
    endpoints, added = [endpoint(url) for url in urls], endpoint("http://10.0.0.40:8000")
    for session in keys:
        assert choose([added, *endpoints], session) in (added, choose(endpoints, session))


def test_an_added_endpoint_gets_its_share_from_all_others() -> None:
    *endpoints, added = fleet(8)
    moved = [session for session in sessions(16_000) if choose([*endpoints, added], session) is added]
    assert 0.8 < len(moved) / 2_000 < 1.2
    assert deviation(Counter(url_of(choose(endpoints, session)) for session in moved).values(), 7) < 5


# -- replicas ------------------------------------------------------------------------------------------------------------


@given(urls=URLS, keys=SESSIONS, seed=st.randoms(use_true_random=False))
def test_the_order_of_the_endpoints_does_not_matter(urls: list[str], keys: list[str], seed: random.Random) -> None:
    endpoints, shuffled = [endpoint(url) for url in urls], [endpoint(url) for url in urls]
    seed.shuffle(shuffled)
    for session in keys:
        assert url_of(choose(endpoints, session)) == url_of(choose(shuffled, session))


CHOICES = """
from tests.upstream.test_affinity import choose, fleet, sessions, url_of
print(*[url_of(choose(fleet(8), session))[14] for session in sessions(24)], sep="")
"""


@pytest.mark.parametrize("seed", ["0", "1"])
def test_processes_with_different_hash_seeds_and_later_versions_agree(seed: str) -> None:
    """During an update, replicas of two versions run together. If they disagreed, almost all sessions would move."""
    done = subprocess.run(
        [sys.executable, "-c", CHOICES], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True
    )
    assert done.stdout.strip() == "026631552153205534637243"


# -- bounded load --------------------------------------------------------------------------------------------------------


def limit(total: int, size: int) -> int:
    """Return how many requests an endpoint may have if `total` are in flight at `size` endpoints."""
    return max(FLOOR, ceil(LOAD_FACTOR * total / size))


@given(loads=st.lists(st.integers(0, 60), min_size=2, max_size=64), key=st.binary(max_size=8).map(session_key))
def test_a_session_gets_the_endpoint_with_the_highest_score_of_those_with_room(loads: list[int], key: str) -> None:
    endpoints = fleet(len(loads))
    for one, load in zip(endpoints, loads, strict=True):
        one.in_flight = load
    chosen = choose(endpoints, key)
    most = limit(sum(loads) + 1, len(loads))
    assert chosen.in_flight + 1 <= most
    point = int(key[:16], 16)
    better = [one for one in endpoints if score(point, one.hash) > score(point, chosen.hash)]
    assert all(one.in_flight + 1 > most for one in better)


@given(size=st.integers(2, 64), key=st.binary(max_size=8).map(session_key))
def test_up_to_the_floor_the_requests_of_a_session_stay_together(size: int, key: str) -> None:
    endpoints = fleet(size)
    used = set()
    for _ in range(FLOOR):
        chosen = choose(endpoints, key)
        chosen.in_flight += 1
        used.add(url_of(chosen))
    assert len(used) == 1


class Load:
    """Chains whose turns follow each other, each at the chosen endpoint for a random time.

    20 chains for each endpoint run at the same time. When one ends, the next begins.
    """

    def __init__(self, lengths: list[int], size: int, seed: int) -> None:
        self._left = lengths
        self._random = random.Random(seed)
        self._keys = [session_key(f"{seed}/{chain}") for chain in range(len(lengths))]
        self._ends: list[tuple[float, int, Endpoint]] = []
        self._last: dict[int, Endpoint] = {}
        self._waiting = iter(range(len(lengths)))
        self.endpoints = fleet(size)
        self.turns = self.moves = 0
        self.busy: defaultdict[str, float] = defaultdict(float)
        """For each endpoint, the number of requests in flight, integrated over the time."""

    def run(self) -> None:
        """Run until no chain is left to begin."""
        now = 0.0
        for chain in islice(self._waiting, 20 * len(self.endpoints)):
            self._send(chain, now)
        while True:
            end, chain, used = heapq.heappop(self._ends)
            for one in self.endpoints:
                self.busy[url_of(one)] += one.in_flight * (end - now)
            now = end
            used.in_flight -= 1
            self._left[chain] -= 1
            following = chain if self._left[chain] else next(self._waiting, None)
            if following is None:
                return
            self._send(following, now)

    def _send(self, chain: int, now: float) -> None:
        chosen = choose(self.endpoints, self._keys[chain])
        chosen.in_flight += 1
        assert chosen.in_flight <= limit(len(self._ends) + 1, len(self.endpoints))
        self.turns += 1
        self.moves += self._last.get(chain, chosen) is not chosen
        self._last[chain] = chosen
        heapq.heappush(self._ends, (now + self._random.expovariate(1), chain, chosen))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_no_endpoint_has_more_than_1_3_times_the_mean_load_with_chains_of_zipf_distributed_length(size: int, seed: int) -> None:
    lengths = [max(1, int(1_000 / rank**1.1)) for rank in range(1, 1_001)]
    load = Load(random.Random(seed).sample(lengths, len(lengths)), size, seed)
    load.run()
    assert max(load.busy.values()) <= 1.3 * sum(load.busy.values()) / size
    assert load.moves <= 0.05 * load.turns  # nevertheless, chains stay
