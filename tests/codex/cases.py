"""What Codex is made to do, and what must have come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from .model import SUMMARY, ChatRequest, Delta, Turn, Unexpected, after, answer, call, long, write

UNKNOWN = "scripted"
"""A model that is not in Codex's catalogue: it gets functions, and namespaces of them."""
KNOWN = "gpt-5.5"
"""One that is, and gets ``apply_patch`` as free text with a grammar, and MCP tools behind ``tool_search``."""
LITE = "gpt-5.6-sol"
"""One that gets all its tools in an ``additional_tools`` item: among them ``exec``, which takes JavaScript that calls the others."""

PATCH = """\
*** Begin Patch
*** Add File: patched.txt
+first line
+"second" line, with a \\ and ünïcödé
*** End Patch
"""


@dataclass(frozen=True, slots=True)
class Case:
    """``check`` gets the directory that Codex worked in, and says what is wrong there."""

    prompt: str
    turns: tuple[Turn, ...]
    answer: str
    model: str = UNKNOWN
    mcp: bool = False
    websocket: bool = False
    breaks: bool = False
    """Whether the connection breaks in the first answer's text."""
    provider: str = "ours"
    """``OpenAI`` is the name by which Codex lets the server compact."""
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
    """Goes on with ``turn`` where the history has been summed up."""

    def checked(request: ChatRequest) -> Delta:
        messages = str(request["messages"])
        if SUMMARY not in messages:
            raise Unexpected("the history should have been summed up")
        if "<environment_context>" not in messages:
            raise Unexpected("what Codex keeps beside the summary should be there")
        return turn(request)

    return checked


LONG_WORK = (
    long(call("exec_command", cmd='echo "sum: $((40 + 2))" | tee sum.txt')),
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
    "breaks": Case("What is 40 + 2?", (answer("It is 42."),), "It is 42.", breaks=True),
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

CASES |= {
    f"ws-{name}": replace(CASES[name], websocket=True)
    for name in ("answer", "shell", "mcp", "apply_patch", "exec", "breaks", "compaction", "compaction-server")
}
