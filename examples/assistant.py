"""A chat page with chains, a function, an MCP server with approval, and answers that outlive a lost connection.

uvicorn examples.assistant:app --port 8000
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from fastapi import FastAPI, HTTPException
from fastapi.responses import FileResponse, StreamingResponse
from openai import APIError, AsyncOpenAI
from pydantic import BaseModel

MODEL = os.environ.get("MODEL", "demo")
MCP_SERVER = os.environ.get("MCP_SERVER", "cities")  # a server in `tools.mcp_servers`; the demo has `cities`
client = AsyncOpenAI()


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with client:
        yield


app = FastAPI(lifespan=lifespan)


def get_time(zone: str = "UTC") -> str:
    return datetime.now(ZoneInfo(zone)).strftime("%H:%M")


FUNCTIONS = {"get_time": get_time}
TIME: dict[str, Any] = {
    "type": "function",
    "name": "get_time",
    "description": "Return the current time.",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": []},
}
TOOLS: list[Any] = [TIME, {"type": "mcp", "server_label": MCP_SERVER, "require_approval": "always"}]


class Message(BaseModel):
    input: list[dict[str, Any]]
    """What the user wrote, or the decision about an approval request."""
    previous: str | None = None


@app.get("/")
def page() -> FileResponse:
    return FileResponse(Path(__file__).with_suffix(".html"))


@app.post("/messages")
async def send(message: Message) -> StreamingResponse:
    """Start an answer. It runs in the background, and does not end if the browser leaves."""
    return await _stream(_create(message.input, message.previous))


@app.get("/responses/{response_id}")
async def resume(response_id: str, after: int = -1) -> StreamingResponse:
    """Stream an answer again, from the first event that the browser has not seen."""
    seen = {"starting_after": after} if after >= 0 else {}
    return await _stream(client.responses.retrieve(response_id, stream=True, **seen))


async def _create(items: list[Any], previous: str | None) -> Any:
    return await client.responses.create(
        model=MODEL, input=items, previous_response_id=previous, tools=TOOLS, background=True, stream=True
    )


async def _stream(opening: Any) -> StreamingResponse:
    try:
        return StreamingResponse(_events(await opening), media_type="text/event-stream")
    except APIError as error:
        raise HTTPException(502, error.message) from error


async def _events(stream: Any) -> AsyncIterator[str]:
    """Yield the events of an answer. If it calls functions, run them and go on with the next answer."""
    while stream is not None:
        async with stream:
            async for event in stream:
                yield f"data: {event.to_json(indent=None)}\n\n"
        outputs = [_run(item) for item in event.response.output if item.type == "function_call"]
        stream = await _create(outputs, event.response.id) if outputs else None


def _run(call: Any) -> dict[str, str]:
    try:
        output = FUNCTIONS[call.name](**json.loads(call.arguments))
    except (KeyError, TypeError, ValueError) as error:  # the model wrote the name and the arguments
        output = f"The call failed: {error!r}"
    return {"type": "function_call_output", "call_id": call.call_id, "output": output}
