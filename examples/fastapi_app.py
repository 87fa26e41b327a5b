"""Mount the middleware in a FastAPI application that serves Chat Completions itself.

uvicorn examples.fastapi_app:app --port 8080
"""

import time
from typing import Any

from fastapi import FastAPI

from responses_mw import ResponsesMiddleware, Settings

app = FastAPI()


@app.get("/v1/models")
def models() -> dict[str, Any]:
    """List the models. The middleware calls this to verify the credential of requests that do not reach the model."""
    return {"object": "list", "data": [{"id": "parrot", "object": "model", "owned_by": "me"}]}


@app.post("/v1/chat/completions")
def chat(body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of your model: a whole completion, as here, or a stream of chunks."""
    said = body["messages"][-1]["content"]
    message = {"role": "assistant", "content": f"You said: {said}"}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }


# Without `upstream.url`, chat requests go to the wrapped application. To call another server, set it:
# Settings(upstream={"url": "http://vllm:8000"}). Other settings come from the environment (RESPONSES_MW_REDIS_URL, ...).
app.add_middleware(ResponsesMiddleware, settings=Settings(upstream={"dialect": "openai"}))
