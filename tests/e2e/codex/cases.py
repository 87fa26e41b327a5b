"""Tasks for Codex, and checks of the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tests.e2e.codex.model import SUMMARY, Turn, Unexpected, after, answer, call, long, told, without, write
from tests.support.strict import ChatRequest, Delta

UNKNOWN = "scripted"
"""A model that is not in Codex's catalogue: it gets functions, and namespaces of them."""
KNOWN = "gpt-5.5"
"""One that is, and gets `apply_patch` as free text with a grammar, and MCP tools behind `tool_search`."""
LITE = "gpt-5.6-sol"
"""One that gets all its tools in an `additional_tools` item: among them `exec`, which takes JavaScript that calls the others."""

PATCH = """\
*** Begin Patch
*** Add File: patched.txt
+first line
+"second" line, with a \\ and ünïcödé
*** End Patch
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A task for Codex. `check` gets the directory that Codex worked in, and returns what is wrong there."""

    prompt: str
    turns: tuple[Turn, ...]
    answer: str
    model: str = UNKNOWN
    mcp: bool = False
    searches: bool = False
    """Whether the server has a search provider. Codex always offers a web search."""
    websocket: bool = False
    trouble: Literal["", "connection breaks", "server is killed", "Codex is killed"] = ""
    """What happens in the first answer's text."""
    sequel: str = ""
    """The prompt with which the session is resumed when Codex has ended, or has been killed."""
    provider: str = "ours"
    """`OpenAI` is the name by which Codex lets the server compact."""
    summed_up: str | None = None
    """By which words the model is asked for a summary, after the first result."""
    check: Callable[[Path], str | None] = lambda _: None


def has(name: str, content: str) -> Callable[[Path], str | None]:
    def check(directory: Path) -> str | None:
        path = directory / name
        if not path.exists():
            return f"{name} was not written"
        written = path.read_text()
        return None if written == content else f"{name} should be {content!r}, but is {written!r}"

    return check


def summed_up(turn: Turn) -> Turn:
    """Continue with `turn` if the history has been summarized."""

    def checked(request: ChatRequest) -> Delta:
        messages = str(request["messages"])
        if SUMMARY not in messages:
            raise Unexpected("the history should have been summed up")
        if "<environment_context>" not in messages:
            raise Unexpected("what Codex keeps beside the summary should be there")
        return turn(request)

    return checked


SEQUEL = "How much is it, again?"
WRITES = call("exec_command", cmd='echo "sum: $((40 + 2))" | tee sum.txt')
KILLS_CODEX = call("exec_command", cmd='echo "sum: $((40 + 2))" > sum.txt; kill -9 $PPID; sleep 9')
REMEMBERS = after("sum: 42", told(SEQUEL, answer("It was 42."), before=answer("It is written.")), last=False)

LONG_WORK = (
    long(WRITES),
    summed_up(answer("It is written, I am told.")),
)

CASES: dict[str, Case] = {
    "answer": Case(
        "What is 40 + 2?",
        (answer("It is 42: ünïcödé, “quotes” and\n\n    an indented line."),),
        "It is 42: ünïcödé, “quotes” and\n\n    an indented line.",
    ),
    "shell": Case(
        "Write the sum of 40 and 2 to sum.txt.",
        (
            call("exec_command", cmd='echo "sum: $((40 + 2))" > sum.txt && cat sum.txt'),
            after("sum: 42", answer("It is written.")),
        ),
        "It is written.",
        check=has("sum.txt", "sum: 42\n"),
    ),
    "mcp": Case(
        "Add 40 and 2.",
        (call("add", a=40, b=2), after("the sum is 42", answer("The calculator says 42."))),
        "The calculator says 42.",
        mcp=True,
    ),
    "search": Case(
        "What is the capital of France?",
        (call("web_search", query="capital of France"), after("Paris is the capital", answer("Paris, as I have read [1]."))),
        "Paris, as I have read [1].",
        searches=True,
    ),
    "search-known": Case(
        "What is the capital of France?",
        (call("web_search", query="capital of France"), after("Paris is the capital", answer("Paris, as I have read [1]."))),
        "Paris, as I have read [1].",
        model=KNOWN,
        searches=True,
    ),
    "no-search": Case(
        "What is the capital of France?",
        (without("web_search", answer("Paris, as I recall.")),),
        "Paris, as I recall.",
        model=KNOWN,
    ),
    "apply_patch": Case(
        "Write patched.txt.",
        (write("apply_patch", PATCH), after("patched.txt", answer("It is patched."))),
        "It is patched.",
        model=KNOWN,
        check=has("patched.txt", 'first line\n"second" line, with a \\ and ünïcödé\n'),
    ),
    "tool_search": Case(
        "Find a tool that adds, and add 40 and 2.",
        (
            call("tool_search", query="add two numbers"),
            after("add", call("add", a=40, b=2)),
            after("the sum is 42", answer("What I found says 42.")),
        ),
        "What I found says 42.",
        model=KNOWN,
        mcp=True,
    ),
    "exec": Case(
        "Write the sum of 40 and 2 to sum.txt.",
        (
            write("exec", 'text(await tools.exec_command({cmd: "echo sum: $((40 + 2)) | tee sum.txt"}));'),
            after("sum: 42", answer("It is written, too.")),
        ),
        "It is written, too.",
        model=LITE,
        check=has("sum.txt", "sum: 42\n"),
    ),
    "breaks": Case("What is 40 + 2?", (answer("It is 42."),), "It is 42.", trouble="connection breaks"),
    "restart": Case("What is 40 + 2?", (answer("It is 42."),), "It is 42.", trouble="server is killed"),
    "resume": Case("Write the sum of 40 and 2 to sum.txt.", (WRITES, REMEMBERS), "It was 42.", sequel=SEQUEL),
    "resume-killed": Case(
        "Write the sum of 40 and 2 to sum.txt.",
        (WRITES, REMEMBERS),
        "It was 42.",
        trouble="Codex is killed",
        sequel=SEQUEL,
    ),
    "resume-killed-in-call": Case(
        "Write the sum of 40 and 2 to sum.txt.",
        (KILLS_CODEX, told(SEQUEL, answer("I was interrupted."))),
        "I was interrupted.",
        sequel=SEQUEL,
        check=has("sum.txt", "sum: 42\n"),
    ),
    "compaction": Case(
        "Write the sum of 40 and 2 to sum.txt.",
        LONG_WORK,
        "It is written, I am told.",
        summed_up="CONTEXT CHECKPOINT COMPACTION",
        check=has("sum.txt", "sum: 42\n"),
    ),
    "compaction-server": Case(
        "Write the sum of 40 and 2 to sum.txt.",
        LONG_WORK,
        "It is written, I am told.",
        provider="OpenAI",
        summed_up="Write a summary",
        check=has("sum.txt", "sum: 42\n"),
    ),
}

CASES |= {f"ws-{name}": replace(CASES[name], websocket=True) for name in CASES}
