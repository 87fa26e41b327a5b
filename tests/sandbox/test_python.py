"""The tool `python`: the results of cells, and the lifetime of containers."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import anyio
import httpx
import pytest
from pydantic import ValidationError

from responses_mw.sandbox import SandboxSettings
from tests.support.sandbox import Launch, Sandbox, command, environment, levels, time_of, until_descendants

BEST = levels()[0]


async def test_variables_persist_between_calls_of_a_container(sandbox: Sandbox) -> None:
    first = await sandbox.run("x = 41")
    assert await sandbox.value("x + 1", first["container_id"]) == "42"


async def test_containers_do_not_share_variables(sandbox: Sandbox) -> None:
    await sandbox.run("x = 41")
    assert "NameError" in (await sandbox.run("x"))["error"]


async def test_stdout_and_stderr_are_returned_separately(sandbox: Sandbox) -> None:
    outcome = await sandbox.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nNone")
    assert (outcome["stdout"], outcome["stderr"], outcome["result"]) == ("out\n", "err\n", None)


async def test_each_call_returns_only_its_own_output(best: Sandbox) -> None:
    first = await best.run("print('one')")
    second = await best.run("print('two')", first["container_id"])
    assert second["stdout"] == "two\n"


async def test_a_traceback_shows_the_cell_but_no_paths_of_the_host(sandbox: Sandbox) -> None:
    outcome = await sandbox.run("import json\ndef parse():\n    return json.loads('{')\nparse()")
    assert outcome["ended"] is None
    assert "File \"<cell 2>\", line 3, in parse\n    return json.loads('{')" in outcome["error"]
    assert 'File "<python>/json/decoder.py"' in outcome["error"]
    assert sys.base_prefix not in outcome["error"]
    assert "launch.py" not in outcome["error"]


@pytest.mark.parametrize("code", ["x = = 1", "print('a\n", "\0", "(" * 500])
async def test_code_that_cannot_be_compiled_is_an_error_of_the_cell(best: Sandbox, code: str) -> None:
    outcome = await best.run(code)
    assert outcome["error"].splitlines()[-1].startswith(("SyntaxError", "MemoryError", "ValueError"))
    assert outcome["ended"] is None


async def test_sys_exit_is_an_error_and_keeps_the_container(best: Sandbox) -> None:
    outcome = await best.run("x = 1\nexit(3)")
    assert outcome["error"].splitlines()[-1] == "SystemExit: 3"
    assert await best.value("x", outcome["container_id"]) == "1"


async def test_files_written_or_changed_are_listed_with_their_sizes(sandbox: Sandbox) -> None:
    first = await sandbox.run("import os\nos.mkdir('d')\nwritten = open('d/a.txt', 'w').write('hello'), open('b', 'w').close()")
    assert sorted((file["name"], file["size"]) for file in first["files"]) == [("b", 0), ("d/a.txt", 5)]
    second = await sandbox.run("written = open('d/a.txt', 'a').write('!')", first["container_id"])
    assert second["files"] == [{"name": "d/a.txt", "size": 6}]


async def test_event_loops_threads_and_pickles_of_classes_of_the_cell_work(sandbox: Sandbox) -> None:
    code = """
import asyncio, pickle, threading
class A: pass
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
async def main(): return await asyncio.to_thread(lambda: 7)
type(pickle.loads(pickle.dumps(A()))) is A, asyncio.run(main())
"""
    outcome = await sandbox.run(code)
    assert (outcome["result"], outcome["stdout"]) == ("(True, 7)", "thread\n")


async def test_child_processes_work_at_the_strongest_level(best: Sandbox) -> None:
    code = "import subprocess, multiprocessing\nsubprocess.run(['echo', 'hi'])\nmultiprocessing.Pool(2).map(abs, [-1, 2])"
    outcome = await best.run(code)
    assert (outcome["stdout"], outcome["result"]) == ("hi\n", "[1, 2]")


async def test_configured_packages_can_be_imported(launch: Launch, tmp_path: Any) -> None:
    (tmp_path / "a_package.py").write_text("answer = 42")
    tmp_path.chmod(0o755)  # so that the user of the container can read it
    sandbox = launch(BEST, packages=tmp_path)
    assert await sandbox.value("import a_package; a_package.answer") == "42"


async def test_the_text_for_the_model_has_output_result_and_files(best: Sandbox) -> None:
    result = await best.call("print('out')\nlen(open('f', 'w').name)")
    assert result.content[0].text == "out\n1\nFiles: f (0 bytes)"
    assert not result.is_error


async def test_a_call_over_the_timeout_is_an_error_that_reports_the_lost_container(hasty: Sandbox) -> None:
    result = await hasty.call("import time\nprint('before', flush=True)\ntime.sleep(1000)")
    outcome = result.structured_content
    assert result.is_error
    assert outcome["ended"] == "the call took longer than 3 seconds"
    assert outcome["stdout"] == "before\n"
    assert f"The container {outcome['container_id']} is lost" in result.content[0].text
    again = await hasty.call("1", outcome["container_id"])
    assert again.is_error
    assert f"Container with id '{outcome['container_id']}' not found" in again.content[0].text


async def test_threads_are_paused_between_calls(launch: Launch) -> None:
    sandbox = launch(BEST)
    code = """
import threading, time
count = 0
def counting():
    global count
    while True: count += 1
threading.Thread(target=counting, daemon=True).start()
"""
    first = await sandbox.run(code)
    _, _, running = await until_descendants(sandbox, 3)
    taken = 0
    with anyio.fail_after(20):  # the first measurements may include the end of the call
        while taken != (taken := time_of(running)):
            await anyio.sleep(0.5)
    counted = int(await sandbox.value("count", first["container_id"]) or 0)
    assert int(await sandbox.value("time.sleep(0.2) or count", first["container_id"]) or 0) > counted  # the thread continues


async def test_a_call_of_an_expired_container_is_an_error_naming_it(launch: Launch) -> None:
    sandbox = launch(BEST, keep=0.4)
    container = (await sandbox.run("x = 1"))["container_id"]
    await anyio.sleep(0.6)
    with anyio.fail_after(60):
        while not (result := await sandbox.call("x", container)).is_error:  # expired containers are removed periodically
            await anyio.sleep(0.6)
    assert f"Container with id '{container}' not found: it expired" in result.content[0].text


async def test_a_new_container_evicts_the_one_idle_for_longest(launch: Launch) -> None:
    sandbox = launch(BEST, max_containers=2)
    first, second = [(await sandbox.run("x = 1"))["container_id"] for _ in range(2)]
    await sandbox.run("x", first)
    assert await sandbox.is_well()
    assert (await sandbox.call("x", second)).is_error
    assert await sandbox.value("x", first) == "1"


async def test_an_owner_with_many_containers_evicts_their_own(launch: Launch) -> None:
    sandbox = launch(BEST, max_containers=3)
    first = (await sandbox.run("x = 1", owner="alice"))["container_id"]
    for _ in range(4):
        await sandbox.run("y = 1", owner="bob")
    assert (await sandbox.run("x", first, owner="alice"))["result"] == "1"


async def test_a_new_container_is_refused_if_all_are_in_use(launch: Launch) -> None:
    sandbox = launch(BEST, max_containers=1, call_timeout=50)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sandbox.run, "import time; time.sleep(45)")
        await until_descendants(sandbox, 3)
        result = await sandbox.call("1")
        tasks.cancel_scope.cancel()
    assert result.is_error
    assert "All 1 containers are in use" in result.content[0].text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to take rights away")
async def test_a_container_with_deeply_nested_directories_can_be_removed(launch: Launch) -> None:
    sandbox = launch("restricted", max_containers=1)
    nest = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\n"
    assert (await sandbox.run(f"{nest}os._exit(0)"))["ended"]
    assert await sandbox.is_well()


async def test_calls_of_one_container_run_one_after_another(best: Sandbox) -> None:
    container = (await best.run("import time; seen = []"))["container_id"]
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(best.run, "seen.append('in'); time.sleep(0.05); seen.append('out')", container)
    assert await best.value("seen == ['in', 'out'] * 4", container) == "True"


async def test_containers_run_concurrently(best: Sandbox) -> None:
    containers = [(await best.run("import time"))["container_id"] for _ in range(3)]
    async with anyio.create_task_group() as tasks:
        for container in containers:
            tasks.start_soon(best.run, "began = time.time(); time.sleep(2); ended = time.time()", container)
    began = [float(await best.value("began", container) or "nan") for container in containers]
    ended = [float(await best.value("ended", container) or "nan") for container in containers]
    assert max(began) < min(ended)


async def test_a_container_is_ended_if_the_caller_disconnects(launch: Launch) -> None:
    sandbox = launch(BEST, max_containers=1, call_timeout=50)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sandbox.run, "while True: pass")
        await until_descendants(sandbox, 3)
        tasks.cancel_scope.cancel()
    with anyio.fail_after(60):
        while (await sandbox.call("1")).is_error:
            await anyio.sleep(0.1)


async def test_requests_without_the_token_are_a_401(launch: Launch) -> None:
    sandbox = launch(BEST, token="0123456789abcdef")
    async with httpx.AsyncClient(base_url=sandbox.url, verify=False, trust_env=False) as http:
        assert (await http.get("/health")).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "0123456789abcdef"}):
            refused = await http.post("/mcp", json={}, headers=headers)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        allowed = await http.post("/mcp", json={}, headers={"authorization": "Bearer 0123456789abcdef"})
        assert allowed.status_code != 401


async def test_the_tool_declares_its_input_and_output_schemas(best: Sandbox) -> None:
    async with best.client() as client:
        (tool,) = (await client.list_tools()).tools
    assert tool.name == "python"
    assert set(tool.input_schema["properties"]) == {"code", "container_id", "memory_bytes"}
    assert tool.input_schema["required"] == ["code"]
    assert tool.output_schema is not None
    assert set(tool.output_schema["properties"]) >= {"container_id", "stdout", "result", "error", "files", "ended"}


def test_listening_on_other_than_loopback_requires_a_token() -> None:
    with pytest.raises(ValidationError, match="a token is required"):
        SandboxSettings(host="0.0.0.0")
    assert SandboxSettings(host="0.0.0.0", token="0123456789abcdef").host == "0.0.0.0"
    assert SandboxSettings(host="::1").host == "::1"


@pytest.mark.skipif("weak" not in levels(), reason="needs root, to take rights away")
def test_the_service_does_not_start_with_weak_isolation() -> None:
    refused = subprocess.run(
        command("weak"), env=environment("weak", {"port": 0}), capture_output=True, text=True, timeout=30, check=False
    )
    assert refused.returncode == 1
    assert "the kernel does not grant sufficient isolation" in refused.stderr
    assert "allow_weak_isolation" in refused.stderr
