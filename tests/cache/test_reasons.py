"""The reason of a miss: in the header, in a metric, and for two texts on the command line."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.cache import Miss, Policy
from responses_mw.cache.cache import MAX_TEXT_LENGTH
from responses_mw.telemetry.instruments import REGISTRY
from tests.cache.asking import EXACT, SEMANTIC, ask, granted, key
from tests.support.embeddings import EmbeddingServer
from tests.support.metrics import sample_value
from tests.support.scripted import completion

if TYPE_CHECKING:
    from responses_mw.cache import Cache
    from tests.cache.conftest import OpenCache
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Start

Q, SAME, FINLAND = (
    "What is the capital city of France?",
    "What is the capital-city of France?",
    "What was the capital city of France in 1940?",
)
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


def counted(reason: str) -> float:
    return sample_value("responses_mw_cache_misses_total", {"reason": reason}) or 0.0


def embeddings(error: str) -> float:
    labels = {"gen_ai_operation_name": "embeddings", "gen_ai_request_model": "embed", "error_type": error}
    return sample_value("gen_ai_client_operation_duration_seconds_count", labels) or 0.0


async def missed(cache: Cache, question: str, policy: Policy = SEMANTIC) -> Miss:
    """Look up a question, and assert that it is a miss counted once under its reason."""
    [family] = [one for one in REGISTRY.collect() if one.name == "responses_mw_cache_misses"]
    before = {one.labels["reason"]: one.value for one in family.samples if one.name.endswith("_total")}
    found = await cache.lookup(key(cache, question), replace(policy, write=False), granted)
    assert isinstance(found, Miss)
    assert counted(found.reason) == before.get(found.reason, 0) + 1
    return found


async def test_a_miss_below_the_threshold_reports_the_similarity(cache: Cache, embedding_server: EmbeddingServer) -> None:
    embedding_server.near(Q, SAME, 0.93)
    await ask(cache, key(cache), SEMANTIC, answer="Paris.")
    miss = await missed(cache, SAME)
    assert miss.header.startswith("miss; reason=below_threshold; similarity=0.9")
    assert miss.header.endswith("; threshold=0.9500")
    assert miss.nearest == pytest.approx(0.93, abs=1e-3)
    assert (await missed(cache, "Who wrote Hamlet?")).header == "miss; reason=not_found"


async def test_a_miss_by_the_guard_names_the_rule(cache: Cache, embedding_server: EmbeddingServer) -> None:
    embedding_server.near(Q, FINLAND, 0.999)
    await ask(cache, key(cache), SEMANTIC, answer="Paris.")
    assert (await missed(cache, FINLAND)).header.startswith("miss; reason=guard:numbers; similarity=0.99")


async def test_failed_embeddings_long_texts_and_refresh_are_reasons_of_a_miss(
    cache: Cache, embedding_server: EmbeddingServer
) -> None:
    before = embeddings("NoEmbedding"), embeddings("")
    await ask(cache, key(cache), SEMANTIC, answer="Paris.")
    embedding_server.status = 500
    assert (await missed(cache, SAME)).header == "miss; reason=embedding_failed"
    assert (embeddings("NoEmbedding"), embeddings("")) == (before[0] + 1, before[1] + 1)
    assert (await missed(cache, "long " * MAX_TEXT_LENGTH)).header == "miss; reason=too_long"
    assert (await missed(cache, Q, replace(EXACT, read=False, write=True))).header == "miss; reason=refresh"


async def test_an_unreachable_redis_is_a_reason_of_a_miss(open_cache: OpenCache) -> None:
    cache = open_cache()
    assert (await missed(cache, Q, EXACT)).reason == "not_found"
    away = open_cache("redis://127.0.0.1:1")
    assert (await missed(away, Q, EXACT)).header == "miss; reason=failed"


@pytest.mark.parametrize(
    ("members", "cause"),
    [
        ({"tools": [FUNCTION]}, "tools"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "input"),
        ({"enable_response_messages": True}, "messages"),
        ({"top_logprobs": 1, "include": ["message.output_text.logprobs"]}, "logprobs"),
    ],
)
async def test_an_uncacheable_request_names_the_cause_in_the_header_and_a_metric(
    start: Start, upstream: ScriptedUpstream, members: dict[str, Any], cause: str
) -> None:
    before = counted(f"uncacheable:{cause}")
    upstream.whole(completion({"content": "Paris."}))
    ours = start(cache__mode="exact")
    answer = await ours.http.post("/v1/responses", json={"model": "tiny", "input": Q, **members})
    assert answer.headers["x-responses-cache"] == f"miss; reason=uncacheable:{cause}"
    assert counted(f"uncacheable:{cause}") == before + 1
