"""Delays between attempts."""

from __future__ import annotations

from responses_mw.backoff import Backoff


def test_delays_grow_up_to_the_maximum() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_success_resets_the_delay() -> None:
    backoff = Backoff(0.5, factor=1.5)
    assert [backoff.next(), backoff.next()] == [0.5, 0.75]
    backoff.reset()
    assert backoff.next() == 0.5


def test_a_delay_is_at_least_the_minimum() -> None:
    backoff = Backoff(1.0)
    assert [backoff.next(3.0), backoff.next()] == [3.0, 2.0]


def test_jitter_only_lengthens_a_delay() -> None:
    delays = [Backoff(1.0, jitter=0.25).next() for _ in range(100)]
    assert min(delays) >= 1.0
    assert max(delays) <= 1.25
    assert len(set(delays)) > 1
