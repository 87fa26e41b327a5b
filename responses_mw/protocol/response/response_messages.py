"""Build vLLM's `input_messages` and `output_messages`, which show what the model received and wrote.

Clients request these members with `enable_response_messages` (vLLM's Responses API, "Extra parameters").

- For gpt-oss, the members contain Harmony messages. A message has its author both at the top level, where
  `openai_harmony.Message.from_dict` expects it, and under `author`, as in vLLM.
- For other models, they contain the prompts and answers as `raw_message_tokens`. Token ids that the upstream does not report
  are left empty. If text and tokens differ, the tokens are correct, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from ..chat.chunks import Text, choices_of, malformed
from ..chat.deltas import legacy_call
from ..parts import reasoning_text, texts_of
from ..tool_kinds.form import OfferedFunction, as_text, parse_arguments
from ..tool_kinds.registry import arguments_of, is_finished, output_of
from ..types import ChatRequest, Chunk, Item, Message, Part

_START = 200006  # the token `<|start|>`, which begins every prompt of gpt-oss
_EFFORTS = {"low": "Low", "medium": "Medium", "high": "High"}
_BROWSER, _PYTHON = "browser.search", "python"
_BUILT_IN_LABEL = "code_interpreter"  # vLLM treats an MCP server with this label as its built-in Python tool


def is_harmony(model: str, turns: Sequence[RawTurn] = ()) -> bool:
    """Return whether the name of a model, or a prompt in its `turns`, shows that it uses Harmony."""
    name = model.lower().replace("_", "-")
    return "gpt-oss" in name or any(turn.prompt_tokens[:1] == [_START] for turn in turns)


class ResponseMessages:
    """Collects the texts and tokens of a run, and builds its `input_messages` and `output_messages`."""

    def __init__(self) -> None:
        self._chat: ChatRequest | None = None
        self._offered: Sequence[OfferedFunction] = ()
        self._turns: list[RawTurn] = []

    def begin(self, chat: ChatRequest, offered: Sequence[OfferedFunction]) -> None:
        """Begin a turn. `chat` is its request without `raw_parameters`, and `offered` are the functions in the request."""
        if self._chat is None:
            self._chat, self._offered = chat, offered
        self._turns.append(RawTurn(chat["messages"]))

    def take(self, chunks: Iterable[Chunk | Text]) -> None:
        """Add the texts and tokens in `chunks` to the turn. Raises `UpstreamError` if choices or token ids are malformed."""
        for chunk in chunks:
            if isinstance(chunk, dict):
                self._turns[-1].take(chunk)
            else:
                self._turns[-1].pieces.append(chunk[1])

    def members(
        self, model: str, output: Sequence[Item], results: Mapping[str, str | list[Part]]
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the members `input_messages` and `output_messages` of the document.

        `results` maps the ids of call items in `output` to the results that the model saw.
        """
        if self._chat is not None and is_harmony(model, self._turns):
            given, made = harmony_input(self._chat, self._offered), harmony_output(output, results)
        else:
            given, made = raw_messages(self._turns)
        return {"input_messages": given, "output_messages": made}


# -- raw_message_tokens ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RawTurn:
    """One chat completion: the `messages` of its request, and the texts and tokens collected from its answer."""

    messages: Sequence[Message]
    prompt: str | None = None
    prompt_tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def take(self, chunk: Chunk) -> None:
        if isinstance(chunk.get("prompt_text"), str):
            self.prompt = chunk["prompt_text"]
        self.prompt_tokens += _token_ids(chunk, "prompt_token_ids")
        for choice in choices_of(chunk):
            if not choice.get("index"):
                self.tokens += _token_ids(choice, "token_ids")
                delta = choice.get("delta")
                self.pieces += _texts_of(delta) if isinstance(delta, dict) else []


def _token_ids(holder: Mapping[str, Any], name: str) -> list[int]:
    ids = holder.get(name) or []
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        malformed(name)
    return ids


def _texts_of(delta: Mapping[str, Any]) -> list[str]:
    texts = [delta.get("reasoning") or delta.get("reasoning_content"), delta.get("content")]
    for call in delta.get("tool_calls") or legacy_call(delta):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            texts += [function.get("name"), function.get("arguments")]
    return [text for text in texts if isinstance(text, str)]


def raw_messages(turns: Sequence[RawTurn]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the input, which is the first prompt, and the output, which consists of all answers and later prompts.

    If the upstream does not report a prompt, the JSON of the chat messages is used.
    """
    texts: list[tuple[str, list[int]]] = []
    for turn in turns:
        prompt = turn.prompt if turn.prompt is not None else orjson.dumps([*turn.messages]).decode()
        texts += [(prompt, turn.prompt_tokens), ("".join(turn.pieces), turn.tokens)]
    messages = [{"message": text, "tokens": tokens, "type": "raw_message_tokens"} for text, tokens in texts]
    return messages[:1], [one for one in messages[1:] if one["message"] or one["tokens"]]


# -- Harmony -------------------------------------------------------------------------------------------------------------


def harmony_input(chat: ChatRequest, offered: Sequence[OfferedFunction] = ()) -> list[dict[str, Any]]:
    """Convert the first chat request of a run to Harmony messages. `offered` determines the recipient of each function.

    The system message comes first. The developer message follows, with the instructions and the client functions, if there are
    any. If all tools are built in, the instructions are in the system message instead, as in vLLM with
    `VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS`.
    """
    messages: list[Message] = list(chat["messages"])
    first = next((at for at, one in enumerate(messages) if one["role"] not in ("system", "developer")), len(messages))
    instructions = "\n\n".join(filter(None, (_flat(one.get("content")) for one in messages[:first])))
    recipients = {one.name: _recipient(one.form.item, one.form.members) for one in offered}
    tools = [tool["function"] for tool in chat.get("tools", ())]
    clients = [tool for tool in tools if recipients.get(tool["name"], "functions.").startswith("functions.")]
    is_built_in = bool(tools) and not clients
    effort = _EFFORTS.get(chat.get("reasoning_effort", ""))
    made = [_content("system", reasoning_effort=effort, model_identity=instructions if is_built_in else "")]
    if clients or (instructions and not is_built_in):
        made.append(_content("developer", instructions=instructions, tools=_functions(clients)))
    names: dict[str, str] = {}
    for message in messages[first:]:
        made += _from_chat(message, recipients, names)
    return made


def _functions(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    tools = [
        {"name": one["name"], "description": one.get("description") or "", "parameters": one.get("parameters")}
        for one in functions
    ]
    return {"functions": {"name": "functions", "tools": tools}} if tools else None


def _from_chat(message: Message, recipients: Mapping[str, str], names: dict[str, str]) -> list[dict[str, Any]]:
    """Convert one chat message. `names` maps call ids to the authors of results. The message's calls are added to `names`."""
    role, text = message["role"], _flat(message.get("content"))
    if role == "tool":
        call_id = message["tool_call_id"]
        return [_tool(names.get(call_id, "functions."), text, call_id)]
    if role != "assistant":
        return [_message(role, text) if role == "user" else _content("developer", instructions=text)]
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    calls = message.get("tool_calls") or []
    made = [_message("assistant", reasoning, channel="analysis")] if reasoning else []
    if text:
        made.append(_message("assistant", text, channel="commentary" if calls else "final"))
    for call in calls:
        function = call["function"]
        names[call["id"]] = recipients.get(function["name"], f"functions.{function['name']}")
        made.append(_call(names[call["id"]], as_text(function["arguments"]), call["id"]))
    return made


def harmony_output(items: Sequence[Item], results: Mapping[str, str | list[Part]] | None = None) -> list[dict[str, Any]]:
    """Convert a response's `output` to Harmony messages. `results` maps ids of call items to the results that the model saw."""
    made: list[dict[str, Any]] = []
    last_call = max((at for at, item in enumerate(items) if _is_call(item)), default=-1)  # earlier text is a preamble
    for at, item in enumerate(items):
        if item["type"] == "reasoning":
            made.append(_message("assistant", reasoning_text(item), channel="analysis"))
        elif item["type"] == "message":
            texts = [part.get("text") or part.get("refusal") or "" for part in item["content"]]
            made.append(_message("assistant", *texts, channel="commentary" if at < last_call else "final"))
        elif _is_call(item):
            made += _from_call(item, (results or {}).get(item["id"]))
    return made


def _is_call(item: Item) -> bool:
    return str(item["type"]).endswith("_call") or item["type"] == "mcp_approval_request"


def _from_call(item: Item, result: str | list[Part] | None) -> list[dict[str, Any]]:
    to, call_id = _recipient(item["type"], item), str(item.get("call_id") or item["id"])
    made = [_call(to, arguments_of(item), call_id)]
    if "call_id" in item or item["type"] == "mcp_approval_request":
        return made  # executed by the client
    if result is None and is_finished(item):
        result = output_of(item)
    return made if result is None else [*made, _tool(to, _flat(result), call_id)]


def _recipient(kind: str, members: Mapping[str, Any]) -> str:
    """Return the Harmony recipient of a call whose item has the type `kind` and these `members`."""
    if kind == "web_search_call":
        return _BROWSER
    if kind == "code_interpreter_call" or members.get("server_label") == _BUILT_IN_LABEL:
        return _PYTHON
    name = members.get("name") or kind.removesuffix("_call")
    return f"{members['server_label']}.{name}" if "server_label" in members else f"functions.{name}"


def _flat(content: str | list[Part] | None) -> str:
    """Return the text of a message or a result. Images are left out, because Harmony does not support them."""
    if isinstance(content, str):
        return content
    return "\n".join(texts_of(content))


def _content(role: str, **members: Any) -> dict[str, Any]:
    """Return a system or developer message with the non-empty `members`."""
    return _of(role, [{"type": f"{role}_content", **{name: value for name, value in members.items() if value}}])


def _message(role: str, *texts: str, name: str | None = None, **members: str) -> dict[str, Any]:
    return _of(role, [{"type": "text", "text": text} for text in texts], name, **members)


def _of(role: str, content: list[dict[str, Any]], name: str | None = None, **members: str) -> dict[str, Any]:
    author = {"role": role, **({"name": name} if name else {})}
    return {**author, "author": author, "content": content, **members}


def _call(to: str, arguments: str, call_id: str) -> dict[str, Any]:
    """Return a message with a call. `call_id` is not part of Harmony. It links a later result to the call."""
    if to == _PYTHON:  # Python receives the plain code
        code = (parse_arguments(arguments) or {}).get("code")
        text = code if isinstance(code, str) else arguments
        return _message("assistant", text, channel="analysis", recipient=to, call_id=call_id)
    channel = "analysis" if to == _BROWSER else "commentary"
    return _message("assistant", arguments, channel=channel, recipient=to, content_type="json", call_id=call_id)


def _tool(name: str, text: str, call_id: str) -> dict[str, Any]:
    channel = "analysis" if name in (_PYTHON, _BROWSER) else "commentary"
    return _message("tool", text, name=name, channel=channel, recipient="assistant", call_id=call_id)
