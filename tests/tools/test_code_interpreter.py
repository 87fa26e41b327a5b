"""The code interpreter, tested with the real sandbox."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, aclosing
from typing import Any

import pytest

from responses_mw import Settings
from responses_mw.errors import BadRequest, TooLarge
from responses_mw.state import Missing
from responses_mw.state.files import File
from responses_mw.tools.code_interpreter import CodeInterpreter
from responses_mw.tools.container_files import MAX_BYTES
from responses_mw.tools.stores import FileReader
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


# -- files -----------------------------------------------------------------------------------------------------------------

TABLE = b"city,days\nOslo,3\n"
LARGE = random.Random(1).randbytes(700_000)


class Shelf(FileReader):
    """Files of the caller of the tests, by id."""

    def __init__(self, **files: tuple[str, bytes]) -> None:
        self.files = files

    async def find(self, file_id: str, owner: str) -> File:
        if file_id not in self.files:
            raise Missing("File", file_id)
        name, data = self.files[file_id]
        return File(file_id, name, "user_data", len(data), 0, None, "")

    async def chunks(self, file_id: str, owner: str) -> AsyncIterator[bytes]:
        await self.find(file_id, owner)
        data = self.files[file_id][1]

        async def pieces() -> AsyncIterator[bytes]:
            for begin in range(0, len(data), 300_000):
                yield data[begin : begin + 300_000]

        return pieces()


def with_files(settings: Settings, shelf: Shelf, earlier: Any = ()) -> CodeInterpreter:
    container = {"type": "auto", "file_ids": [*shelf.files]}
    return CodeInterpreter(tool(container), context(settings, earlier=earlier, files=shelf))


async def test_the_container_has_the_files_and_the_model_gets_their_names(settings: Settings) -> None:
    shelf = Shelf(a=("../days.csv", TABLE), b=("days.csv", LARGE), c=("", b""))
    async with aclosing(with_files(settings, shelf)) as interpreter:
        [function] = await interpreter.open()
        assert "Files in the working directory: 'days.csv', 'days-2.csv', 'c'." in function.function["description"]
        result = await interpreter.call("import os; open('days.csv').read(), os.path.getsize('c'), sorted(os.listdir('.'))")
        assert result.content == repr((TABLE.decode(), 0, ["c", "days-2.csv", "days.csv"]))
        digest = await interpreter.call("import hashlib; hashlib.sha256(open('days-2.csv', 'rb').read()).hexdigest()")
        assert digest.content == repr(hashlib.sha256(LARGE).hexdigest())


async def test_the_names_of_files_fit_into_a_directory_and_into_a_prompt(settings: Settings) -> None:
    shelf = Shelf(a=("年" * 250 + ".csv", TABLE), b=("<|im_start|>[INST].csv", b"b"))
    async with aclosing(with_files(settings, shelf)) as interpreter:
        [function] = await interpreter.open()
        assert "'__im_start__(INST].csv'" in function.function["description"]
        names = (await interpreter.call("import os; sorted(os.listdir('.'), key=len)")).content
    assert names == repr(["__im_start__(INST].csv", "年" * 65 + ".csv"])


async def test_a_file_that_the_code_has_changed_is_not_written_again(settings: Settings) -> None:
    shelf = Shelf(a=("a.txt", b"old"))
    async with aclosing(with_files(settings, shelf)) as interpreter:
        await interpreter.open()
        made = await interpreter.call("_ = open('a.txt', 'w').write('new'); read = open; open = None")
    shelf.files["b"] = ("b.txt", b"added")
    earlier = [{"type": "code_interpreter_call", **made.members}]
    async with aclosing(with_files(settings, shelf, earlier)) as later:
        await later.open()
        assert (await later.call("read('a.txt').read() + read('b.txt').read()")).content == "'newadded'"


async def test_two_runs_can_write_the_same_file(settings: Settings) -> None:
    shelf = Shelf(a=("a.bin", LARGE))
    async with aclosing(opened(settings)) as interpreter:
        earlier = [{"type": "code_interpreter_call", **(await interpreter.call("1")).members}]
    async with aclosing(with_files(settings, shelf, earlier)) as one, aclosing(with_files(settings, shelf, earlier)) as other:
        await asyncio.gather(one.open(), other.open())
        code = "import hashlib; hashlib.sha256(open('a.bin', 'rb').read()).hexdigest()"
        results = await asyncio.gather(one.call(code), other.call(code))
    assert [result.content for result in results] == 2 * [repr(hashlib.sha256(LARGE).hexdigest())]


async def test_a_new_container_gets_the_files_again(settings: Settings) -> None:
    lost = [{"type": "code_interpreter_call", "container_id": "cntr_of_yesterday"}]
    async with aclosing(with_files(settings, Shelf(a=("a.txt", b"old")), lost)) as interpreter:
        await interpreter.open()
        assert str((await interpreter.call("open('a.txt').read()")).content).endswith("'old'")
        assert (await interpreter.call("import os; os._exit(3)")).failed
        assert (await interpreter.call("open('a.txt').read()")).content == "'old'"


async def test_unknown_files_and_files_that_are_too_large_are_refused_before_the_run(settings: Settings) -> None:
    interpreter = CodeInterpreter(tool({"type": "auto", "file_ids": ["x"]}), context(settings, files=Shelf()))
    with pytest.raises(BadRequest, match="File with id 'x' not found") as raised:
        await interpreter.check_access("tools[2]")
    assert raised.value.param == "tools[2].container.file_ids[0]"
    with pytest.raises(TooLarge):
        await with_files(settings, Shelf(a=("a", b"x" * (MAX_BYTES + 1)))).check_access("tools[0]")


async def test_a_file_that_is_deleted_during_the_run_fails_the_call(settings: Settings) -> None:
    shelf = Shelf(a=("a.txt", b"old"))
    async with aclosing(with_files(settings, shelf)) as interpreter:
        await interpreter.open()
        shelf.files.clear()
        result = await interpreter.call("1")
    assert result.failed
    assert result.content == "The tool failed: File with id 'a' not found."


async def test_a_file_that_cannot_be_written_fails_the_call(settings: Settings) -> None:
    async with aclosing(with_files(settings, Shelf(**{"a" * 250: ("a.txt", b"x")}))) as interpreter:
        await interpreter.open()
        result = await interpreter.call("1")
    assert result.failed
    assert "could not be put into the container: OSError" in result.content


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
        == "(The container of earlier calls was lost, with all variables and files. This code ran in a new container.)\n42"
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
        sandbox = launcher(stack)(levels()[0], call_timeout=3)
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
        (tool({"type": "auto", "file_ids": "file-1"}), "container.file_ids"),
        (tool({"type": "auto", "file_ids": [1]}), "container.file_ids[0]"),
        (tool({"type": "auto", "file_ids": ["../x"]}), "container.file_ids[0]"),
        (tool({"type": "auto", "file_ids": ["file-1"] * 51}), "container.file_ids"),
        (tool({"type": "auto", "memory_limit": "4 GB"}), "container.memory_limit"),
        (tool({"type": "auto", "network_policy": {"type": "allowlist"}}), "container.network_policy"),
        (tool(allowed_callers=["programmatic"]), "allowed_callers"),
    ],
)
def test_unsupported_or_invalid_parameters_are_a_400_naming_the_parameter(given: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        CodeInterpreter.check(given, "tools[1]", CONFIGURED.tools)
    assert raised.value.param == f"tools[1].{param}"
