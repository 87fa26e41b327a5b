"""Detection of the kind of server from its responses."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from responses_mw.upstream.detection import detect


@pytest.mark.parametrize(
    ("models", "pages", "expected"),
    [
        ([{"id": "m", "owned_by": "vllm"}], {}, "vllm"),
        ([{"id": "m", "owned_by": "sglang"}], {}, "sglang"),
        ([{"id": "m", "owned_by": "llamacpp"}], {}, "llamacpp"),
        ([{"id": "llama3:latest", "owned_by": "library"}], {}, "ollama"),
        ([{"id": "hf.co/a/b", "owned_by": "someone"}], {"/api/version": {"version": "0.9"}}, "ollama"),
        (
            [{"id": "a/b", "owned_by": "a/b"}],
            {"/info": {"model_id": "a/b", "max_total_tokens": 4096, "version": "3.3.7"}},
            "tgi",
        ),
        ([{"id": "gpt-5", "owned_by": "openai"}], {"/health/liveliness": "I'm alive!"}, "litellm"),
        ([{"id": "gpt-5", "owned_by": "system"}], {}, "openai"),
        ([{"id": "Qwen/Qwen3", "owned_by": "Qwen"}], {}, "transformers"),
        ([{"id": "m", "owned_by": "me"}], {}, "openai"),
        ([], {}, "openai"),
    ],
)
async def test_a_server_is_recognized_by_its_responses(
    models: list[dict[str, Any]], pages: dict[str, Any], expected: str
) -> None:
    async def get(path: str) -> httpx.Response:
        return httpx.Response(200, json=pages[path]) if path in pages else httpx.Response(404, json={"detail": "Not Found"})

    assert (await detect(models, get)).name == expected
