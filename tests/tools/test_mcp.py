"""The `mcp` entries of `tools`: validation, allowed tools, approval and credentials."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from responses_mw import Settings
from responses_mw.crypto import Sealer
from responses_mw.errors import BadRequest
from responses_mw.tools.mcp import MCPServer
from responses_mw.tools.toolbox import Tools
from tests.support.configured import make_settings
from tests.support.mcp_servers import TOKEN, Bearer, Watched, weather

from .context import context

if TYPE_CHECKING:
    from tests.support.servers import Serve

URL = "https://mcp.example/mcp"
OPERATOR = {
    "url": "http://10.0.0.1/mcp",
    "authorization": "operators",
    "allowed_tools": ["a", "b"],
    "require_approval": "never",
}
SETTINGS = make_settings(
    tools__mcp_servers={"own": OPERATOR, "open": {**OPERATOR, "allowed_tools": ["*"]}, "connector_x": OPERATOR},
    tools__sandbox_url="http://10.0.0.2",
)


def tool(**members: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "weather", "server_url": URL, **members}


def configured(**members: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "own", **members}


def check(given: dict[str, Any], path: str = "tools[0]", settings: Settings = SETTINGS) -> dict[str, Any]:
    return MCPServer.check(given, path, settings.tools)


def server(given: dict[str, Any], settings: Settings = SETTINGS, **members: Any) -> MCPServer:
    return MCPServer(given, context(settings, **members))


@pytest.mark.parametrize(
    ("labels", "code"), [(["a", "b", "a"], "invalid_value"), ([f"s{index}" for index in range(65)], "array_above_max_length")]
)
def test_duplicate_or_too_many_servers_in_a_request_are_refused(labels: list[str], code: str) -> None:
    tools = Tools(SETTINGS.tools, SETTINGS.search, httpx.AsyncClient(verify=False), Sealer([]))
    assert tools.check([tool(server_label=label) for label in labels[:2]])
    with pytest.raises(BadRequest) as caught:
        tools.check([tool(server_label=label) for label in labels])
    assert (caught.value.param, caught.value.code) == ("tools", code)


def test_too_many_tool_names_are_refused() -> None:
    for members in ({"allowed_tools": ["a"] * 1001}, {"require_approval": {"never": {"tool_names": ["a"] * 1001}}}):
        with pytest.raises(BadRequest, match="array too long"):
            check(tool(**members))


# -- validation -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        tool(),
        tool(allowed_tools=["a"], require_approval="never", server_description="The weather."),
        tool(allowed_tools={"tool_names": ["a"], "read_only": True}),
        tool(require_approval={"always": {"tool_names": ["a"]}, "never": {"read_only": True}}),
        tool(headers={"X-Key": "k", "Authorization": "Basic x"}),
        tool(authorization="token", defer_loading=False),
        configured(),
        configured(authorization="mine"),
        {"type": "mcp", "server_label": "mail", "connector_id": "connector_x"},
        {"type": "mcp", "server_label": "code_interpreter"},
    ],
)
def test_documented_parameters_are_accepted_unchanged(given: dict[str, Any]) -> None:
    assert check(given) == given


def test_null_parameters_are_treated_as_absent() -> None:
    assert check(tool(headers=None, tunnel_id=None, require_approval=None)) == tool()


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"type": "mcp", "server_url": URL}, "server_label", "missing_required_parameter"),
        (tool(server_label="a b"), "server_label", "invalid_value"),
        (tool(server_label="a" * 65), "server_label", "string_above_max_length"),
        (tool(server_label=1), "server_label", "invalid_type"),
        ({"type": "mcp", "server_label": "other"}, "server_url", "missing_required_parameter"),
        (tool(connector_id="connector_x"), "connector_id", "invalid_value"),
        ({"type": "mcp", "server_label": "a", "connector_id": "connector_y"}, "connector_id", "unsupported_parameter"),
        (tool(server_url="ftp://a.example"), "server_url", "invalid_value"),
        (tool(server_url="http://127.0.0.1/mcp"), "server_url", "invalid_value"),
        (tool(server_url="https://user:secret@a.example/"), "server_url", "invalid_value"),
        (tool(tunnel_id="t"), "tunnel_id", "unsupported_parameter"),
        (tool(defer_loading=True), "defer_loading", "unsupported_parameter"),
        (tool(allowed_callers=["programmatic"]), "allowed_callers", "unsupported_parameter"),
        (tool(allowed_tools="a"), "allowed_tools", "invalid_type"),
        (tool(allowed_tools=["a", 1]), "allowed_tools[1]", "invalid_type"),
        (tool(allowed_tools={"names": ["a"]}), "allowed_tools.names", "unknown_parameter"),
        (tool(require_approval="sometimes"), "require_approval", "invalid_value"),
        (tool(require_approval={"always": ["a"]}), "require_approval.always", "invalid_type"),
        (tool(headers={"Host": "a"}), "headers.Host", "invalid_value"),
        (tool(headers={"Mcp-MCPSession-Id": "a"}), "headers.Mcp-MCPSession-Id", "invalid_value"),
        (tool(headers={"X-Responses-MW-Owner": "a"}), "headers.X-Responses-MW-Owner", "invalid_value"),
        (tool(headers={"a b": "c"}), "headers.a b", "invalid_value"),
        (tool(headers={"x": "secret\r\nHost: a"}), "headers.x", "invalid_value"),
        (tool(headers={"x": "secret" * 3000}), "headers.x", "string_above_max_length"),
        (tool(headers={f"x{n}": "" for n in range(65)}), "headers", "invalid_value"),
        (tool(headers={f"x{n}": "secret" * 2000 for n in range(2)}), "headers", "invalid_value"),
        (tool(authorization="secret\n"), "authorization", "invalid_value"),
        (tool(authorization="secret", headers={"authorization": "secret"}), "authorization", "invalid_value"),
    ],
)
def test_an_invalid_parameter_is_a_400_with_its_path_and_without_secrets(given: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequest) as raised:
        check(given, "tools[3]")
    assert (raised.value.param, raised.value.code) == (f"tools[3].{param}", code)
    assert "secret" not in raised.value.message


def test_private_urls_can_be_allowed() -> None:
    given = tool(server_url="http://127.0.0.1:8000/mcp")
    assert check(given, settings=make_settings(tools__allow_private_urls=True)) == given


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://mcp.example:8443/secret/mcp?key=secret#secret", "https://mcp.example:8443/<redacted>"),
        ("https://user:secret@mcp.example/", "https://mcp.example/"),
        ("http://[::1", "<redacted>"),
        (5, "<redacted>"),
        ("https://mcp.example", "https://mcp.example/"),
    ],
)
def test_the_echo_has_no_secrets(url: Any, shown: str) -> None:
    given = tool(server_url=url, headers={"X": "secret"}, authorization="secret", allowed_tools=["a"])
    assert MCPServer.echo(given) == tool(server_url=shown, allowed_tools=["a"])


# -- allowed tools and approval -------------------------------------------------------------------------------------------------

READ_ONLY = {"readOnlyHint": True}


@pytest.mark.parametrize(
    ("given", "name", "annotations", "allowed"),
    [
        (tool(), "a", None, True),
        (tool(allowed_tools=["a"]), "a", None, True),
        (tool(allowed_tools=["a"]), "b", None, False),
        (tool(allowed_tools=[]), "a", None, False),
        (tool(allowed_tools=["*"]), "a", None, True),
        (tool(allowed_tools={"tool_names": ["*"], "read_only": True}), "a", READ_ONLY, True),
        (tool(allowed_tools={"tool_names": ["*"], "read_only": True}), "a", None, False),
        (configured(allowed_tools=["*"]), "a", None, True),
        (configured(allowed_tools=["*"]), "c", None, False),
        ({"type": "mcp", "server_label": "open"}, "c", None, True),
        (tool(allowed_tools={"tool_names": ["a"]}), "b", None, False),
        (tool(allowed_tools={"read_only": True}), "a", READ_ONLY, True),
        (tool(allowed_tools={"read_only": True}), "a", None, False),
        (tool(allowed_tools={"read_only": False}), "a", READ_ONLY, False),
        (tool(allowed_tools={"read_only": True, "tool_names": ["b"]}), "a", READ_ONLY, False),
        (configured(), "a", None, True),
        (configured(), "c", None, False),
        (configured(allowed_tools=["b", "c"]), "a", None, False),
        (configured(allowed_tools=["b", "c"]), "b", None, True),
        (configured(allowed_tools=["b", "c"]), "c", None, False),
        (configured(server_url=URL), "c", None, True),
    ],
)
def test_a_tool_is_allowed_by_the_request_and_the_operator(
    given: dict[str, Any], name: str, annotations: dict[str, Any] | None, allowed: bool
) -> None:
    assert server(given).is_allowed({"name": name, "annotations": annotations}) is allowed


@pytest.mark.parametrize(
    ("given", "annotations", "needed"),
    [
        (tool(), None, True),
        (tool(require_approval="always"), None, True),
        (tool(require_approval="never"), None, False),
        (tool(require_approval={"never": {"tool_names": ["a"]}}), None, False),
        (tool(require_approval={"never": {"tool_names": ["b"]}}), None, True),
        (tool(require_approval={"always": {"tool_names": ["b"]}}), None, True),
        (tool(require_approval={"always": {"tool_names": ["a"]}, "never": {"tool_names": ["a"]}}), None, True),
        (tool(require_approval={"never": {"read_only": True}}), READ_ONLY, False),
        (tool(require_approval={"never": {"read_only": True}}), None, True),
        (configured(), None, False),
        (configured(require_approval="always"), None, True),
        (configured(server_url=URL), None, True),
        ({"type": "mcp", "server_label": "code_interpreter"}, None, False),
    ],
)
def test_approval_is_required_unless_the_request_or_the_operator_waives_it(
    given: dict[str, Any], annotations: dict[str, Any] | None, needed: bool
) -> None:
    assert server(given).needs_approval({"name": "a", "annotations": annotations}) is needed


# -- connections ----------------------------------------------------------------------------------------------------------------


async def test_a_configured_server_is_called_by_label_with_the_operators_credentials(serve: Serve) -> None:
    url = serve(Bearer(weather().streamable_http_app())) + "/mcp"
    servers = {"own": {"url": url, "headers": {"X-Key": "k"}, "authorization": TOKEN}}
    settings = make_settings(tools__mcp_servers=servers)
    async with aclosing(server(configured(), settings, trace_headers={"traceparent": "t"})) as own:
        result = await own.call("headers", {}, approved=True)
    assert isinstance(result.content, str)
    received = json.loads(result.content)
    assert (received["x-key"], received["traceparent"]) == ("k", "t")


async def test_a_request_can_send_its_own_credentials_to_a_configured_server(serve: Serve) -> None:
    url = serve(Bearer(weather().streamable_http_app())) + "/mcp"
    settings = make_settings(tools__mcp_servers={"own": {"url": url, "authorization": "of nobody"}})
    async with aclosing(server(configured(authorization=TOKEN), settings)) as own:
        assert await own.list_tools()


async def test_a_request_cannot_replace_other_headers_of_the_operator(serve: Serve) -> None:
    url = serve(weather().streamable_http_app()) + "/mcp"
    settings = make_settings(tools__mcp_servers={"own": {"url": url, "headers": {"X-User": "operator"}}})
    async with aclosing(server(configured(headers={"x-user": "admin", "X-Other": "o"}), settings)) as own:
        result = await own.call("headers", {}, approved=True)
    assert isinstance(result.content, str)
    received = json.loads(result.content)
    assert (received["x-user"], received["x-other"]) == ("operator", "o")


async def test_the_operators_credentials_are_not_sent_to_a_url_from_the_request(serve: Serve) -> None:
    url = serve(weather().streamable_http_app()) + "/mcp"
    settings = make_settings(tools__mcp_servers={"own": OPERATOR}, tools__allow_private_urls=True)
    async with aclosing(server(configured(server_url=url), settings)) as other:
        result = await other.call("headers", {}, approved=True)
    assert isinstance(result.content, str)
    assert "authorization" not in json.loads(result.content)


async def test_a_url_from_the_request_that_resolves_to_a_private_address_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(weather().streamable_http_app())
    url = serve(watched).replace("127.0.0.1", "public.example")

    async def resolve(host: str, port: int, *, trusted: bool) -> list[str]:
        return ["127.0.0.1"]

    monkeypatch.setattr("responses_mw.tools.guarded_transport.resolve", resolve)
    async with aclosing(server(check(tool(server_url=url)))) as public:
        with pytest.raises(BadRequest, match="weather"):
            await public.list_tools()
    assert watched.methods == []


def test_settings_and_their_errors_show_no_secrets() -> None:
    assert "operators" not in repr(SETTINGS)
    with pytest.raises(ValueError, match="mcp_servers") as raised:
        make_settings(tools__mcp_servers={"own": {"url": "http://a", "authorisation": "operators"}})
    assert "operators" not in str(raised.value)


def test_the_error_without_the_sdk_names_the_missing_extra() -> None:
    program = f"""if True:
        import sys; sys.modules["mcp"] = None
        from responses_mw.tools.mcp import MCPServer
        try: MCPServer.check({tool()!r}, "tools[0]", None)
        except Exception as error: print(error)
    """
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "'tools[0].type' is not supported: the extra responses-mw[mcp] is not installed."


def test_the_sdk_is_loaded_only_when_it_is_needed() -> None:
    program = "import sys, responses_mw.tools.toolbox; print('mcp' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"
