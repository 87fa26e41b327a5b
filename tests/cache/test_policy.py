"""The cache policy of a request: its parameter, its header and the limits of the settings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.cache.policy import MODES, Policy, policy_of
from responses_mw.errors import BadRequest
from tests.cache.asking import settings


def policy(body: Any = None, header: str | None = None, *, stored: bool = True, **given: Any) -> Policy:
    return policy_of(body, header, settings(**given).cache, stored=stored)


def test_the_cache_is_off_by_default() -> None:
    assert policy().is_off
    assert policy(cache__mode="exact").mode == "exact"
    assert policy("exact").mode == "exact"
    assert policy(header="semantic").mode == "semantic"


def test_body_and_header_accept_the_same_directives() -> None:
    body = {"mode": "semantic", "ttl": 60, "threshold": 0.99, "no_store": True, "refresh": True}
    header = "Semantic; TTL=60; threshold=0.99; no-store; refresh"
    expected = Policy("semantic", 60, 0.99, read=False, write=False)
    assert policy(body) == policy(header=header) == expected
    assert expected.is_off


def test_the_body_takes_precedence_over_the_header() -> None:
    assert policy({"mode": "exact"}, "semantic; ttl=5") == policy({"mode": "exact", "ttl": 5})


def test_the_settings_limit_the_mode_ttl_and_threshold_of_a_request() -> None:
    assert policy("semantic", cache__max_mode="exact").mode == "exact"
    assert policy("semantic", cache__max_mode="off").is_off
    got = policy({"mode": "semantic", "ttl": 10**6, "threshold": 0.1}, cache__ttl=100)
    assert (got.ttl, got.threshold) == (100, 0.5)


@pytest.mark.parametrize("mode", ["off", "exact"])
def test_a_maximum_mode_not_above_the_default_lets_a_request_only_lower_the_mode(mode: str) -> None:
    for asked in (
        policy({"mode": "semantic", "ttl": 7}, cache__max_mode=mode, cache__mode="exact"),
        policy(None, "semantic; ttl=7", cache__max_mode=mode, cache__mode="exact"),
    ):
        assert (asked.mode, asked.ttl) == ("exact", 7)
    assert policy("off", cache__max_mode=mode, cache__mode="exact").is_off


def test_an_unstored_response_is_cached_only_if_the_request_sets_a_mode() -> None:
    assert not policy(stored=False, cache__mode="exact").write
    assert policy(stored=False, cache__mode="exact").read
    assert policy("exact", stored=False).write
    assert not policy({"ttl": 5}, stored=False, cache__mode="exact").write


def test_refresh_does_not_read_and_no_store_does_not_write() -> None:
    assert (policy({"refresh": True}, cache__mode="exact").read, policy({"refresh": True}, cache__mode="exact").write) == (
        False,
        True,
    )
    assert (policy({"no_store": True}, cache__mode="exact").read, policy({"no_store": True}, cache__mode="exact").write) == (
        True,
        False,
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ("both", "cache"),
        (True, "cache"),
        (["exact"], "cache"),
        ({"mode": "both"}, "cache.mode"),
        ({"ttl": 0}, "cache.ttl"),
        ({"ttl": "60"}, "cache.ttl"),
        ({"threshold": 1.1}, "cache.threshold"),
        ({"refresh": "yes"}, "cache.refresh"),
        ({"no-store": True}, "cache.no-store"),
    ],
)
def test_an_invalid_cache_parameter_is_an_error_naming_it(body: Any, param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        policy(body)
    assert raised.value.param == param


@pytest.mark.parametrize(
    "header",
    [
        "both",
        "ttl",
        "ttl=",
        "ttl=x",
        "ttl=0",
        "ttl=-1",
        "threshold=nan",
        "threshold=2",
        "threshold=.",
        "ttl=0x7",
        "ttl=00",
        "refresh=no",
        "exact=1",
        "ttl=[1]",
    ],
)
def test_an_invalid_cache_header_is_an_error_naming_the_directive(header: str) -> None:
    with pytest.raises(BadRequest) as raised:
        policy(header=header)
    assert raised.value.param == f"X-Responses-Cache.{header.partition('=')[0]}"


@pytest.mark.parametrize("header", ["semantic; ttl=007; threshold=.96", "semantic; ttl=07; threshold=00.960"])
def test_numbers_in_the_header_may_have_leading_zeros_or_no_integer_part(header: str) -> None:
    assert policy(header=header) == policy({"mode": "semantic", "ttl": 7, "threshold": 0.96})


@given(st.text(max_size=40))
def test_any_header_is_either_parsed_or_a_400(header: str) -> None:
    try:
        got = policy(header=header)
    except BadRequest as error:
        assert error.param is not None
    else:
        assert got.mode in MODES
