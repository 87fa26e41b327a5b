"""The code interpreter, tested with the real sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, aclosing
from typing import Any

import pytest

from responses_mw import Settings
from responses_mw.errors import BadRequest
from responses_mw.tools.code_interpreter import CodeInterpreter
from tests.support.configured import make_settings
from tests.support.sandbox import launcher, levels

from .context import context

TOKEN = "a-token-of-the-sandbox"
CONFIGURED = make_settings(tools__sandbox_url="http://sandbox:8090")


@pytest.fixture(scope="session")
def settings() -> Iterator[Settings]:
    """Settings with the URL of a running sandbox that requires a token."""
    with ExitStack() as stack:
        sandbox = launcher(stack)(levels()[0], token=TOKEN, memory_bytes=1536 * 1024**2)
        yield make_settings(tools__sandbox_url=sandbox.url, tools__sandbox_token=TOKEN)


def tool(container: Any = None, **members: Any) -> dict[str, Any]:
    return {"type": "code_interpreter", "container": {"type": "auto"} if container is None else container, **members}


def opened(settings: Settings, container: Any = None) -> CodeInterpreter:
    return CodeInterpreter(tool(container), context(settings))


def logs(text: str) -> list[dict[str, str]]:
    return [{"type": "logs", "logs": text}]


async def test_a_call_runs_the_code_and_returns_its_output(settings: Settings) -> None:
    async with aclosing(opened(settings)) as interpreter:
        result = await interpreter.call("print('hello'); 6 * 7")
    assert result.content == "hello\n42"
    assert result.members == {"container_id": interpreter.container_id, "outputs": logs("hello\n42")}
    assert not result.failed


async def test_variables_persist_within_a_run_and_in_later_runs_with_the_same_container(settings: Settings) -> None:
    async with aclosing(opened(settings)) as interpreter:
        result = await interpreter.call("n = 6")
        assert result.members["outputs"] == []
        assert (await interpreter.call("n * 7")).content == "42"
    async with aclosing(opened(settings, result.members["container_id"])) as later:
        assert (await later.call("n + 1")).content == "7"


async def test_memory_limit_caps_the_memory_of_a_new_container(settings: Settings) -> None:
    async with aclosing(opened(settings, {"type": "auto", "memory_limit": "1g"})) as interpreter:
        assert "MemoryError" in (await interpreter.call("len(bytearray(1200 * 1024**2))")).content
        assert (await interpreter.call("len(bytearray(1024**2))")).content == str(1024**2)
    async with aclosing(opened(settings, {"type": "auto", "memory_limit": "64g"})) as interpreter:
        assert (await interpreter.call("len(bytearray(1200 * 1024**2))")).content == str(1200 * 1024**2)
        assert "MemoryError" in (await interpreter.call("len(bytearray(2 * 1024**3))")).content


async def test_concurrent_calls_share_one_container(settings: Settings) -> None:
    async with aclosing(opened(settings)) as interpreter:
        results = await asyncio.gather(*(interpreter.call(f"x{n} = {n}") for n in range(3)))
        assert (await interpreter.call("x0 + x1 + x2")).content == "3"
    assert len({result.members["container_id"] for result in results}) == 1


async def test_an_exception_in_the_code_is_not_a_failed_call(settings: Settings) -> None:
    async with aclosing(opened(settings)) as interpreter:
        result = await interpreter.call("1 / 0")
    assert "ZeroDivisionError" in result.content
    assert not result.failed


async def test_the_output_lists_the_files_that_the_code_wrote(settings: Settings) -> None:
    async with aclosing(opened(settings)) as interpreter:
        result = await interpreter.call("_ = open('a.txt', 'w').write('abc')")
    assert result.members["outputs"] == logs("Files: a.txt (3 bytes)")


async def test_a_lost_container_is_replaced_and_the_model_is_informed(settings: Settings) -> None:
    async with aclosing(opened(settings, "cntr_of_yesterday")) as interpreter:
        result = await interpreter.call("6 * 7")
    assert (
        result.content
        == "(The container of earlier calls is lost, with its variables and files. This code ran in a new one.)\n42"
    )
    assert result.members == {"container_id": interpreter.container_id, "outputs": logs("42")}
    assert interpreter.container_id != "cntr_of_yesterday"


async def test_code_that_kills_its_container_fails_and_the_next_call_works(settings: Settings) -> None:
    async with aclosing(opened(settings)) as interpreter:
        result = await interpreter.call("import os; os._exit(3)")
        assert result.failed
        assert "is lost, with its variables and files" in result.content
        assert "container_id" in result.members
        assert (await interpreter.call("6 * 7")).content == "42"


async def test_code_that_prints_the_container_not_found_message_is_not_run_again(settings: Settings) -> None:
    async with aclosing(opened(settings)) as interpreter:
        await interpreter.call("1")
        says = f"Container with id '{interpreter.container_id}' not found"
        result = await interpreter.call(f'import os; print("{says}", flush=True); os._exit(3)')
    assert result.failed
    assert str(result.content).startswith(says)


async def test_code_that_times_out_is_a_failed_call() -> None:
    with ExitStack() as stack:
        sandbox = launcher(stack)(levels()[0], call_timeout=1)
        async with aclosing(opened(make_settings(tools__sandbox_url=sandbox.url))) as interpreter:
            result = await interpreter.call("while True: pass")
    assert result.failed
    assert "is lost" in result.content


async def test_an_unreachable_sandbox_is_a_failed_call(free_url: str) -> None:
    async with aclosing(opened(make_settings(tools__sandbox_url=free_url))) as interpreter:
        result = await interpreter.call("6 * 7")
    assert result.failed
    assert "cannot be reached" in result.content
    assert "container_id" not in result.members


async def test_a_rejected_sandbox_token_is_a_failed_call_that_does_not_reveal_the_token(settings: Settings) -> None:
    wrong = make_settings(tools__sandbox_url=settings.tools.sandbox_url, tools__sandbox_token="wrong")
    async with aclosing(opened(wrong)) as interpreter:
        result = await interpreter.call("6 * 7")
    assert result.failed
    assert "refused the credentials" in result.content
    assert "wrong" not in result.content


@pytest.mark.parametrize(
    ("given", "container"),
    [
        (tool(), None),
        (tool("cntr_1"), "cntr_1"),
        (tool({"type": "auto", "file_ids": [], "network_policy": {"type": "disabled"}}), None),
    ],
)
def test_the_container_id_is_taken_from_the_tool_or_unset(given: dict[str, Any], container: str | None) -> None:
    checked = CodeInterpreter.check(given, "tools[0]", CONFIGURED.tools)
    assert CodeInterpreter(checked, context(CONFIGURED)).container_id == container


@pytest.mark.parametrize(("given", "container"), [(None, "cntr_2"), ("auto", "cntr_2"), ("cntr_1", "cntr_1")])
def test_the_container_of_the_last_call_is_reused_unless_the_tool_names_one(given: str | None, container: str) -> None:
    earlier = [{"type": "code_interpreter_call", "container_id": name} for name in ("cntr_0", "cntr_2")]
    assert CodeInterpreter(tool(given), context(CONFIGURED, earlier=earlier)).container_id == container


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "code_interpreter"}, "container"),
        (tool(1), "container"),
        (tool("c" * 129), "container"),
        (tool({}), "container.type"),
        (tool({"type": "manual"}), "container.type"),
        (tool({"type": "auto", "file_ids": ["file_1"]}), "container.file_ids"),
        (tool({"type": "auto", "memory_limit": "4 GB"}), "container.memory_limit"),
        (tool({"type": "auto", "network_policy": {"type": "allowlist"}}), "container.network_policy"),
        (tool(allowed_callers=["programmatic"]), "allowed_callers"),
    ],
)
def test_unsupported_or_invalid_parameters_are_a_400_naming_the_parameter(given: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        CodeInterpreter.check(given, "tools[1]", CONFIGURED.tools)
    assert raised.value.param == f"tools[1].{param}"


def test_the_error_without_a_sandbox_names_the_missing_setting() -> None:
    with pytest.raises(BadRequest, match="sandbox_url"):
        CodeInterpreter.check(tool(), "tools[0]", make_settings().tools)
