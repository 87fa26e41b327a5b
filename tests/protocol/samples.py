"""Items of every type that a request can have, as the official client returns them. Calls are followed by their outputs."""

from __future__ import annotations

from typing import Any

Item = dict[str, Any]


def _call(kind: str, **members: Any) -> Item:
    return {"type": kind, "id": "x_1", "call_id": "c", "status": "completed", **members}


def _output(kind: str, output: Any, **members: Any) -> Item:
    return {"type": kind, "id": "y_1", "call_id": "c", "output": output, **members}


_FUNCTION = {"type": "function", "name": "found", "parameters": {"type": "object"}, "defer_loading": True}
_PARTS = [
    {"type": "input_text", "text": "Look"},
    {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low", "file_id": None},
    {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGk=", "file_url": None},
]
_ANNOTATION = {"type": "url_citation", "start_index": 0, "end_index": 1, "url": "https://a", "title": "A"}
_WROTE = [
    {"type": "output_text", "text": "Well", "annotations": [_ANNOTATION], "logprobs": None},
    {"type": "refusal", "refusal": "No."},
]
_EXEC = {"type": "exec", "command": ["ls"], "env": {"A": "b"}, "timeout_ms": 5, "user": None, "working_directory": None}
_RAN = {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
_MCP = {"server_label": "docs", "name": "find", "arguments": "{}"}
_RESULT = {"number": 1, "title": "A", "url": "https://a", "excerpt": "a"}

SAMPLES: list[list[Item]] = [
    [{"role": "user", "content": "Hi"}],
    [{"type": "message", "role": "user", "content": _PARTS, "status": None}],
    [{"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": None, "content": _WROTE}],
    [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Hm"}],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
            "encrypted_content": None,
            "status": None,
        }
    ],
    [_call("function_call", name="f", arguments='{"a": 1}', namespace=None), _output("function_call_output", "ok")],
    [_call("function_call", name="g", namespace="n", arguments="{not json"), _output("function_call_output", _PARTS)],
    [_call("custom_tool_call", name="c", input="x"), _output("custom_tool_call_output", "ok")],
    [
        _call("tool_search_call", execution="client", arguments={"query": "x"}),
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [_FUNCTION]},
    ],
    [_call("local_shell_call", action=_EXEC), _output("local_shell_call_output", "{}")],
    [
        _call("shell_call", action={"commands": ["ls"], "timeout_ms": None, "max_output_length": 9}),
        _output("shell_call_output", [_RAN], max_output_length=9),
    ],
    [
        _call("apply_patch_call", operation={"type": "update_file", "path": "a", "diff": "@@"}),
        _output("apply_patch_call_output", "ok", status="completed"),
    ],
    [{"type": "configuration_update", "reasoning": {"effort": "high"}, "text": {"verbosity": "low"}}],
    [{"type": "additional_tools", "role": "developer", "tools": [_FUNCTION]}],
    [{"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "docs", "tools": [{"name": "find", "input_schema": {}}]}],
    [
        {"type": "mcp_approval_request", "id": "mcpr_1", **_MCP},
        {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": False, "reason": "no"},
    ],
    [{"type": "mcp_call", "id": "mcp_1", **_MCP, "output": "found", "error": None, "approval_request_id": None}],
    [{"type": "mcp_call", "id": "mcp_1", **_MCP, "error": {"type": "http_error", "code": 500, "message": "no"}}],
    [
        {
            "type": "code_interpreter_call",
            "id": "ci_1",
            "code": "1",
            "container_id": "cntr_1",
            "status": "completed",
            "outputs": [{"type": "logs", "logs": "1"}, {"type": "image", "url": "https://a/b.png"}],
        }
    ],
    [
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "completed",
            "action": {"type": "search", "query": "q", "queries": ["q"], "sources": [{"type": "url", "url": "https://a"}]},
        }
    ],
    [{"type": "web_search_call", "id": "ws_1", "action": {"type": "open_page", "url": "https://a"}, "results": [_RESULT]}],
    [
        {
            "type": "file_search_call",
            "id": "fs_1",
            "status": "completed",
            "queries": ["q", "r"],
            "results": [
                {"file_id": "file-1", "filename": "a.md", "score": 0.5, "attributes": {"year": 2026}, "text": "t", "number": 1}
            ],
        }
    ],
    [{"type": "file_search_call", "id": "fs_1", "queries": ["q"], "results": None}],
    [{"type": "compaction_trigger"}],
    [{"type": "item_reference", "id": "msg_1"}],
    [{"type": "compaction", "id": "cmp_1", "encrypted_content": "sealed"}],
]
