"""The bare relay that responses_mw is compared with: Starlette and httpx in textbook style, without translation.

`--transport httpx` uses httpx's own transport, `--transport aiohttp` uses `httpx_aiohttp`. Everything else (uvicorn, uvloop,
httptools, no access log) is the same as in `responses-mw serve`.
"""

import argparse
import contextlib
from collections.abc import AsyncIterator, Callable

import httpx
import uvicorn
from httpx_aiohttp import AiohttpTransport
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

# Neither transport may queue streams, because a thousand streams are open at once. In aiohttp, 0 means no limit, and None means
# its default of 100.
TRANSPORTS: dict[str, Callable[[], httpx.AsyncBaseTransport]] = {
    "httpx": lambda: httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None)),
    "aiohttp": lambda: AiohttpTransport(limits=httpx.Limits(max_connections=0)),
}


def create_app(upstream: str, transport: str) -> Starlette:
    """Create an app that relays GET and POST for every path to `upstream`, over the named transport."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with httpx.AsyncClient(base_url=upstream, transport=TRANSPORTS[transport](), timeout=None) as client:
            app.state.client = client
            yield

    return Starlette(routes=[Route("/{path:path}", relay, methods=["GET", "POST"])], lifespan=lifespan)


async def relay(request: Request) -> StreamingResponse:
    """Forward the request and stream the response back."""
    client: httpx.AsyncClient = request.app.state.client
    outgoing = client.build_request(
        request.method,
        request.url.path,
        content=await request.body(),
        headers={"content-type": request.headers.get("content-type", "application/json")},
    )
    response = await client.send(outgoing, stream=True)
    return StreamingResponse(
        response.aiter_raw(),
        status_code=response.status_code,
        headers={"content-type": response.headers["content-type"]},
        background=BackgroundTask(response.aclose),
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="A bare relay based on Starlette and httpx.")
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--transport", choices=sorted(TRANSPORTS), default="httpx")
    options = parser.parse_args()
    uvicorn.run(
        create_app(options.upstream, options.transport),
        port=options.port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
        server_header=False,
        date_header=False,
    )


if __name__ == "__main__":
    main()
