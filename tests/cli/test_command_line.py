"""The command line of `responses-mw`: help, suggestions and one-line errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

from responses_mw.cli import COMMANDS, main
from responses_mw.settings import Settings, groups
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

NOBODY = "--upstream=http://127.0.0.1:1"
SECRET = "--auth.secret-keys=a secret that all the replicas of the deployment have"
FLAGS_OF_A_SERVER = [
    "--port",
    "--server.cors-origins",
    "--auth.api-keys",
    "--cache.mode",
    "--redis.data-dir",
    "--limits.streams",
]


def run(*arguments: str) -> str | int | None:
    """Run a command and return its exit status or error message."""
    try:
        main(arguments)
    except SystemExit as end:
        return end.code
    return 0


def test_the_version_flag_prints_the_version_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"responses-mw {version('responses-mw')}\n"


def test_the_installed_command_exempts_its_modules_from_garbage_collection() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["responses-mw"].partition(":")
    program = f"import gc, sys; from {module} import {function} as run; sys.argv = ['responses-mw', '--version']; run(); "
    program += "assert gc.get_freeze_count() > 10_000; assert gc.isenabled()"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


def test_help_lists_the_commands_and_prints_the_usage_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("help") == 0
    overview = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command} " in overview
        assert run("help", command) == 0
        assert capsys.readouterr().out.startswith(f"usage: responses-mw {command} ")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["srve"], "unknown command 'srve' (did you mean serve?)"),
        (["help", "wroker"], "unknown command 'wroker' (did you mean worker?)"),
        (["xyz"], "unknown command 'xyz'\n"),
        ([NOBODY], "the command comes before its flags"),
    ],
)
def test_an_unknown_command_is_an_error_with_a_suggestion(typed: list[str], said: str) -> None:
    message = run(*typed)
    assert isinstance(message, str)
    assert said in message
    assert "responses-mw help" in message


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--upstrem", "http://x"], "unknown flag --upstrem (did you mean --upstream?)"),
        (["--redi=redis://:secret@x"], "unknown flag --redi (did you mean --redis?)"),
        (["--cache.mod", "exact"], "unknown flag --cache.mod (did you mean --cache.mode?)"),
        (["--server.log_level", "error"], "(did you mean --server.log-level?)"),
        (["--xyz"], "unknown flag --xyz\n"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_an_unknown_flag_is_an_error_with_a_suggestion(capsys: pytest.CaptureFixture[str], typed: list[str], said: str) -> None:
    assert run("serve", NOBODY, *typed) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "secret" not in message
    assert message.endswith("Run responses-mw serve --help for its options.\n")


@pytest.mark.parametrize("command", ["worker", "cache"])
def test_a_command_lists_and_accepts_only_the_flags_that_it_uses(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run(command, "--help") == 0
    shown = capsys.readouterr().out
    assert re.search(r"--redis( URL)?, --redis\.url URL", shown)  # Python 3.13 names the value only once
    for flag in FLAGS_OF_A_SERVER:
        assert f" {flag} " not in shown
        assert run(command, *(["stats"] if command == "cache" else []), flag, "1") == 2
        assert flag in capsys.readouterr().err
    names = {name for line in shown.splitlines() for name in line.split() if line.lstrip().startswith("--")}
    assert (command == "worker") == ("--jobs.concurrency" in names)


@pytest.mark.parametrize("command", [one for one in COMMANDS.values() if hasattr(one, "uses")])
def test_every_settings_pattern_of_a_command_matches_a_setting(command: type[Settings]) -> None:
    from fnmatch import fnmatchcase

    known = [f"{group}.{name}" for group, kind in groups(Settings).items() for name in kind.model_fields]
    for pattern in command.uses.split():  # type: ignore[attr-defined]
        assert any(fnmatchcase(name, pattern) for name in [*known, *command.model_fields]), pattern


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "it must be redis://"),
        ("redis://:pa/ss@host:6379", "special characters of the password as %XX"),
        ("redis://127.0.0.1:1?frobnicate=1", "it has an unknown option (frobnicate)"),
        ("redis+cluster://127.0.0.1:1?frobnicate=1", "it has an unknown option (frobnicate)"),
        ("redis+ring://127.0.0.1:1", "unknown kind"),
    ],
)
def test_an_invalid_redis_url_is_reported_without_its_password(capfd: pytest.CaptureFixture[str], url: str, said: str) -> None:
    message = run("worker", NOBODY, SECRET, f"--redis={url}")
    assert isinstance(message, str)
    assert message.startswith("responses-mw: redis.url is not valid: ")
    assert said in message
    assert "pa" not in message.replace("password", "")
    assert "Traceback" not in capfd.readouterr().err


def test_a_data_directory_that_cannot_be_created_is_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run("serve", NOBODY, f"--redis.data-dir={tmp_path}/file/data", "--check") == 1
    assert f"state:    redis.data_dir {tmp_path}/file/data cannot be used: Not a directory." in capsys.readouterr().err
