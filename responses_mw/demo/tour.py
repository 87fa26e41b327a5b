"""A guided tour that calls `responses-mw` with the official `openai` client and checks the answers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal, NoReturn

import openai
from pydantic import BaseModel

from .deployment import Deployment, ModelServer, OurServer, ServerFailed, deployment

PACE = 0.02  # seconds per token: slow enough to see answers stream


class CheckFailed(Exception):
    """A check failed. The message describes what it expected."""


def run_tour(once: bool, host: str, port: int | None) -> int:
    """Run the tour, and return the exit status. The first replica listens on `host` and `port` (see `our_server`).

    If `once` is false, the servers keep running after the tour until Ctrl-C is pressed.
    """
    _end_on_signals()
    try:
        with ModelServer(PACE) as model, deployment(model, host, port) as (ours, site):
            print(_styled("responses-mw, a guided tour"))
            print(f"A demo model speaks Chat Completions at {model.url}.")
            print(f"responses-mw serves OpenAI's Responses API in front of it, at {ours.url}.")
            print("A second replica shares its Redis but leaves background work to the first. An MCP server offers a tool.")
            status = run_steps(site)
            print(_OWN_DEPLOYMENT.format(title=_styled("To run your own deployment")))
            return status if once else _stay(ours, site.inspector_url, status)
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
        except (CheckFailed, ServerFailed, openai.OpenAIError) as fault:
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
    events, text = _follow(site.client.responses.create(model="demo", input=question, stream=True))
    first, last = events[0], events[-1]
    _expect(first.type == "response.created", f"response.created as the first event, not {first.type}")
    _expect(last.type == "response.completed", f"response.completed as the last event, not {last.type}")
    deltas = sum(event.type == "response.output_text.delta" for event in events)
    _expect(deltas > 5, f"an answer in many deltas, not in {deltas}")
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


_HANDBOOK = b"""# Handbook

Working hours are from nine to five, and the office dog is called Rex.

## Leave

Every employee has 28 days of annual leave. Leave that is not taken by March expires.

## Salary

Salaries are paid on the last working day of a month.
"""


def file_search(site: Deployment) -> str:
    _show('store = replica_2.vector_stores.create(name="handbook")')
    store = site.other.vector_stores.create(name="handbook")
    _show('replica_2.vector_stores.files.upload_and_poll(vector_store_id=store.id, file=open("handbook.md", "rb"))')
    upload: Any = {"vector_store_id": store.id, "file": ("handbook.md", _HANDBOOK)}
    file = site.other.vector_stores.files.upload_and_poll(**upload)
    _expect(file.status == "completed", f"the file to be completed, not {file.status}: {file.last_error}")
    question = "How many days of annual leave do I have?"
    _show(f'replica_1.responses.create(tools=[{{"type": "file_search", "vector_store_ids": [store.id]}}], input="{question}")')
    tools: list[Any] = [{"type": "file_search", "vector_store_ids": [store.id]}]
    response = site.client.responses.create(model="demo", input=question, tools=tools)
    print(f"   answer   {response.output_text}")
    _expect("28 days" in response.output_text, f"the number of days, 28, in the answer, not “{response.output_text}”")
    texts = [part for item in response.output if item.type == "message" for part in item.content if part.type == "output_text"]
    cited = [one.filename for text in texts for one in text.annotations if one.type == "file_citation"]
    print(f"   cites    {', '.join(cited)}")
    _expect(cited == ["handbook.md"], f"a citation of handbook.md, not {cited}")
    return "one replica took the file, and the other searched it for the model"


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
    events, begun = _follow(
        site.other.responses.create(model="demo", input="Count to 100", background=True, stream=True), until=" 20"
    )
    site.kill_other()
    print("            (replica 2 is killed)")
    seen = events[-1].sequence_number
    _show(f"replica_1.responses.retrieve(id, stream=True, starting_after={seen})")
    more, rest = _follow(site.client.responses.retrieve(events[0].response.id, stream=True, starting_after=seen))
    numbers = [event.sequence_number for event in events + more]
    _expect(numbers == list(range(len(numbers))), "every event exactly once")
    _expect(begun + rest == " ".join(map(str, range(1, 101))), "all numbers from 1 to 100")
    return f"{len(numbers)} events, none lost and none repeated"


def continued_after_a_kill(site: Deployment) -> str:
    _show('client.responses.create(model="demo", stream=True, input="Count to 60")')
    stream = site.client.responses.create(model="demo", input="Count to 60", stream=True)
    _, begun = _follow(stream, until=" 20")
    site.restart_model()
    print("            (the model server was killed, and another one was started)")
    events, rest = _follow(stream)
    last = events[-1]
    _expect(last.type == "response.completed", f"response.completed as the last event, not {last.type}")
    _expect(begun + rest == " ".join(map(str, range(1, 61))), "all numbers from 1 to 60")
    _expect(last.response.usage.output_tokens == 60, f"60 output tokens, not {last.response.usage.output_tokens}")
    return "the client read one stream: no number is missing or repeated, and each token is counted once"


STEPS: tuple[tuple[str, Callable[[Deployment], str]], ...] = (
    ("A streamed answer", streamed_answer),
    ("A function call and its follow-up", function_call),
    ("Structured output", structured_output),
    ("A chain across two replicas", chain_across_replicas),
    ("A tool of an MCP server", mcp_tool),
    ("An answer from a file", file_search),
    ("A cache hit", cache_hit),
    ("Metrics", metrics),
    ("A background response that outlives a replica", resumed_after_a_kill),
    ("An answer that outlives the model server", continued_after_a_kill),
)


# -- after the tour ---------------------------------------------------------------------------------------------------------

_OWN_DEPLOYMENT = """
{title}
   beside it          responses-mw serve --upstream http://your-vllm:8000
   inside vLLM        vllm serve MODEL --middleware responses_mw.ResponsesMiddleware
   inside your app    app.add_middleware(ResponsesMiddleware, settings=...)"""


def _stay(ours: OurServer, inspector_url: str, status: int) -> int:
    """Wait for Ctrl-C and return `status`, or return 1 if the server exits first."""
    try:
        print(f"\nTry this one:\n   curl {ours.url}/v1/responses -H 'content-type: application/json' \\")
        print("""     -d '{"model": "demo", "input": "Count to 5"}'""")
        print(f"\nSee what happened to each response of the tour:\n   {inspector_url}")
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


def _follow(stream: Iterable[Any], until: str | None = None) -> tuple[list[Any], str]:
    """Print a stream's text, up to `until`. Return the events and the text."""
    events, text = [], ""
    print("   answer   ", end="")
    for event in stream:
        events.append(event)
        if event.type != "response.output_text.delta":
            continue
        print(event.delta, end="", flush=True)
        text += event.delta
        if until is not None and text.endswith(until):
            break
    print()
    return events, text


def _styled(text: str, code: int = 1) -> str:
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    return text if plain else f"\x1b[{code}m{text}\x1b[0m"
