"""A vLLM or llama.cpp server whose model always gives the same answer, which breaks off where a test wants.

A character is a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.scripted import (
    DONE,
    Answer,
    Asked,
    BrokenOff,
    Chunk,
    Piece,
    ScriptedUpstream,
    call,
    completion,
    delta,
    error,
    finish,
    frame,
    json_answer,
    reasoning,
    text,
    usage,
)

PIECE = 3
"""Characters in a delta."""


class Continuing(ScriptedUpstream):
    """Answers each chat request with `thought`, then `said`, then `calls` if the request has tools. It continues a message on request.

    An answer breaks off after the next number of deltas in `cuts`; -1 lets it end.
    """

    def __init__(self, said: str = "", thought: str = "", calls: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__()
        self.said, self.thought, self.calls = said, thought, calls
        self.cuts: deque[int] = deque()
        self.broken: Piece | bytes = BrokenOff()
        """How an answer breaks off; bytes are sent before the clean end of the body."""
        self.trims = False
        """Whether the chat template removes white space from the ends of messages."""
        self.hides = False
        """Whether `/tokenize` shows another prompt than the one that is used: the flags are ignored."""
        self.begins_anew: str | None = None
        """What the model answers instead of continuing a message, from the closed prompt, as another server behind a router would."""
        self.echoes = False
        """Whether the answer contains the message again before it continues. The server does not count these tokens."""
        self.counts_each_chunk = True
        """Whether the server reports the usage with each chunk on request."""
        self.hides_thought = False
        """Whether the chat template leaves out the reasoning of earlier messages."""
        self.refusals: list[dict[str, Any]] = []
        """Errors with which the requests after a break are answered."""
        self.overloaded: list[str] = []
        """Paths that answer 429, each once. Of the chat requests, this concerns samples."""
        self.as_reasoning = False
        """Whether the reasoning parser takes what continues a message for reasoning."""
        self.can_turn_reasoning_off = False
        """Whether `enable_thinking: false` makes the reasoning parser expect text."""

    # -- the prompt ------------------------------------------------------------------------------------------------------

    def prompt(self, body: dict[str, Any]) -> str:
        """Render the chat template."""
        prompt, last = "", len(body["messages"]) - 1
        for place, message in enumerate(body["messages"]):
            content = message.get("content") or ""
            content = content.rstrip() if self.trims else content
            is_open = place == last and body.get("continue_final_message")
            thought = "" if self.hides_thought else _thinking(message.get("reasoning"))
            prompt += f"<{message['role']}>{thought}{content}{'' if is_open else '</>'}"
        return prompt + ("<assistant>" if body.get("add_generation_prompt", True) else "")

    def page(self, asked: Asked) -> Answer:
        if asked.path in self.overloaded:
            return self._overload(asked)
        if asked.path == "/tokenize":
            given = asked.json.get("prompt", asked.json.get("content"))
            prompt = given if given is not None else self.prompt(asked.json)
            return json_answer({"tokens": [ord(one) for one in prompt], "count": len(prompt)})
        if asked.path == "/apply-template":
            return json_answer({"prompt": self.prompt(asked.json)})
        if asked.path == "/detokenize":
            return json_answer({"prompt": "".join(map(chr, asked.json["tokens"]))})
        return super().page(asked)

    def _overload(self, asked: Asked) -> Answer:
        self.overloaded.remove(asked.path)
        return json_answer(error("busy", 429), 429)

    # -- the answer ------------------------------------------------------------------------------------------------------

    def unscripted(self, asked: Asked) -> Answer:
        body = asked.json
        continues = bool(body.get("continue_final_message")) and not self.hides
        is_sample = 1 in (body.get("max_completion_tokens"), body.get("max_tokens")) and not body.get("stream")
        is_open = continues and (is_sample or self.begins_anew is None)
        prompt = self.prompt({**body, "continue_final_message": is_open, "add_generation_prompt": not is_open})
        if is_sample and asked.path in self.overloaded:
            return self._overload(asked)
        if is_sample:
            return json_answer(completion({"content": "x"}, counts=usage(len(prompt), 1)["usage"]))
        if continues and self.refusals:
            refusal = self.refusals.pop()
            return json_answer(refusal, refusal["error"]["code"])
        said = body["messages"][-1]["content"] if continues else None
        said = said.rstrip() if said is not None and self.trims else said
        calls = self.calls if "tools" in body else ()
        is_off = self.can_turn_reasoning_off and (body.get("chat_template_kwargs") or {}).get("enable_thinking") is False
        show = reasoning if self.as_reasoning and not is_off and said is not None else text
        chunks = list(self._chunks(said, calls, body.get("max_completion_tokens"), len(prompt), show))
        if not body.get("stream"):
            return json_answer(_whole(chunks))
        if self.counts_each_chunk and body["stream_options"].get("continuous_usage_stats"):
            chunks = list(_counted(chunks, len(prompt), len(said or "") if self.echoes else 0))
        cut = self.cuts.popleft() if self.cuts else -1
        frames: list[Piece] = [frame(chunk) for chunk in (chunks if cut < 0 else chunks[: cut + 1])]
        if cut < 0:
            return Answer([*frames, DONE])
        return Answer([*frames, self.broken])

    def _chunks(
        self,
        said: str | None,
        calls: tuple[tuple[str, str], ...],
        maximum: int | None,
        prompt: int,
        show: Callable[[str], Chunk],
    ) -> Iterator[Chunk]:
        yield delta(role="assistant", content="")
        thought = _thinking(self.thought) if said is None else ""
        rest = self.begins_anew or self.said.removeprefix(said) if said is not None else self.said
        left = rest if maximum is None else rest[: max(maximum - len(thought), 0)]
        echo = said if said is not None and self.echoes else ""
        yield from map(reasoning, _pieces(self.thought if said is None else ""))
        yield from map(show, _pieces(echo))
        yield from map(show, _pieces(left))
        for index, (name, arguments) in enumerate(calls if left == rest else ()):
            yield call("", name=name, call_id=f"call_{index}", index=index)
            yield from (call(piece, index=index) for piece in _pieces(arguments))
        yield finish("length" if left != rest else "tool_calls" if calls else "stop")
        counts = usage(prompt, len(thought) + len(left))
        counts["usage"]["completion_tokens_details"] = {"reasoning_tokens": len(self.thought) if said is None else 0}
        yield counts


def _whole(chunks: list[Chunk]) -> dict[str, Any]:
    """Return the completion that consists of `chunks`."""
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    message = {name: "".join(one.get(name) or "" for one in deltas) for name in ("content", "reasoning")}
    return completion(message, chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"])


def _counted(chunks: list[Chunk], prompt: int, echoed: int) -> Iterator[Chunk]:
    """Add the usage to each chunk. The first `echoed` characters were not generated."""
    generated = -echoed
    for chunk in chunks:
        deltas = [choice["delta"] for choice in chunk["choices"]]
        generated += sum(len(one.get("content") or one.get("reasoning") or "") for one in deltas)
        yield {**chunk, "usage": usage(prompt, max(generated, 0))["usage"]} if chunk["choices"] else chunk


def _thinking(thought: str | None) -> str:
    return f"[think]{thought}[/think]" if thought else ""


def _pieces(content: str) -> list[str]:
    return [content[at : at + PIECE] for at in range(0, len(content), PIECE)]
