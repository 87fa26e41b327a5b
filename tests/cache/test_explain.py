"""`cache explain` and `cache eval`, with the built-in embeddings and a judge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from responses_mw.cache import create_judge
from responses_mw.cache.explain import Comparer
from responses_mw.embeddings.static import StaticEmbedder
from tests.cache.asking import settings
from tests.support.embeddings import EmbeddingServer
from tests.support.judges import ScriptedJudge

if TYPE_CHECKING:
    from tests.cache.conftest import RunCommand
    from tests.support.servers import Serve

Q, SAME, TRAP = "How do I reset my password?", "I forgot my password, how do I reset it?", "How do I change my password?"


@pytest.fixture
def judge() -> ScriptedJudge:
    return ScriptedJudge(same=lambda one, other: {one, other} == {Q, SAME})


async def test_explain_shows_every_stage(run: RunCommand, serve: Serve, judge: ScriptedJudge) -> None:
    flags = [f"--cache.judge-url={serve(judge, lifespan='off')}", "--cache.judge-model=judge"]
    status, printed = await run("explain", *flags, Q, SAME, "Click here.")
    assert (status, printed.splitlines()[:6]) == (
        0,
        [
            "normal form: different",
            "similarity: 0.8816 reaches cache.threshold (0.5)",
            "guard: accepts",
            "words: different",
            "judge: approves with probability 1.000",
            "hit: semantic",
        ],
    )
    assert orjson.loads(judge.bodies[0]["messages"][1]["content"])["answer"] == "Click here."
    status, printed = await run("explain", *flags, Q, TRAP)
    assert (status, printed.splitlines()[4:6]) == (1, ["judge: refuses with probability 0.000", "hit: none"])
    status, printed = await run("explain", *flags, Q, "How do I not reset my password?")
    assert "guard: refuses by negations" in printed
    assert printed.splitlines()[4:6] == ["judge: not asked", "hit: none"]
    assert len(judge.bodies) == 2


async def test_explain_without_servers_uses_the_built_in_embeddings(run: RunCommand) -> None:
    status, printed = await run("explain", Q, Q.lower())
    assert (status, printed.splitlines()[-1]) == (1, "hit: none")
    status, printed = await run("explain", Q, Q.rstrip("?"))
    assert (status, printed.splitlines()[-1]) == (0, "hit: exact")
    status, printed = await run("explain", Q)
    assert (status, "two questions" in printed) == (2, True)


async def test_explain_reports_a_failing_embedding_server(
    run: RunCommand, serve: Serve, embedding_server: EmbeddingServer
) -> None:
    embedding_server.status = 500
    url = serve(embedding_server, lifespan="off")
    flags = ["--cache.embedding-model=e", f"--cache.embedding-url={url}", "--cache.timeout=20"]
    status, printed = await run("explain", Q, SAME, *flags)
    assert (status, "similarity: unknown: the embeddings server answered 500" in printed) == (1, True)


async def test_eval_prints_precision_recall_latency_and_cost(
    run: RunCommand, serve: Serve, judge: ScriptedJudge, tmp_path: Path
) -> None:
    rows = [
        {"one": Q, "other": SAME, "same": True, "answer": "Click here."},
        {"one": Q, "other": Q.rstrip("?"), "same": True},
        {"one": Q, "other": "Why is the sky blue?", "same": False},
        {"one": Q, "other": TRAP, "same": False},
        {"one": Q, "other": "Reset 5 passwords?", "same": True},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(b"\n".join(map(orjson.dumps, rows)) + b"\n")
    flags = [f"--cache.judge-url={serve(judge, lifespan='off')}", "--cache.judge-model=judge", f"--pairs={file}"]
    status, printed = await run("eval", *flags)
    assert status == 0
    for line in (
        "pairs: 5, of which 3 should be hits",
        "hits: 2, of which 0 are wrong",
        "precision: 1.000",
        "recall: 0.667",
        "judge requests: 2, of which 0 failed; tokens: 200",
    ):
        assert line in printed.splitlines()
    judge.same = lambda one, other: True
    status, printed = await run("eval", *flags)
    assert status == 1
    assert f"wrong: {Q!r} / {TRAP!r}" in printed
    file.write_bytes(b"[]\n")
    for wrong in (flags, ["--pairs=/nonexistent"], []):
        assert (await run("eval", *wrong))[0] == 2


async def test_a_judge_that_fails_has_no_opinion(judge: ScriptedJudge) -> None:
    chosen = settings().cache
    judge.answer = {"choices": []}
    found = await Comparer(StaticEmbedder(), create_judge(judge.post, judge.dialect, chosen), chosen).compare(Q, SAME)
    assert (found.is_hit, found.no_opinion) == (False, "the judge sent no answer")
