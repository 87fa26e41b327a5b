"""Prompt templates from a directory."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import openai
import pytest

from responses_mw.asgi.prompt_templates import InvalidPrompt, Prompts
from responses_mw.errors import BadRequest
from tests.support.scripted import HELLO, completion

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours

SUPPORT = """
current = "2"

[versions.1]
instructions = "You sell {{product}}."

[versions.2]
instructions = "You help with {{product}}, {{ product }} and {{tone}}. {not} {{ this one }}"
model = "tiny"
temperature = 0.25
input = [{role = "developer", content = "Look at {{thing}} well."}]
"""
VALUES: Any = {"product": "Widget", "tone": "joy", "thing": "it"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
FILE = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,SGk="}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "support.toml").write_text(SUPPORT)
    (tmp_path / "plain.json").write_text(json.dumps({"instructions": "Be plain."}))
    (tmp_path / "README.md").write_text("no prompt")
    return tmp_path


@pytest.fixture
def prompts(directory: Path) -> Prompts:
    return Prompts(str(directory))


def resolved(prompts: Prompts, prompt: Any, **body: Any) -> Any:
    return prompts.resolve({"prompt": prompt, **body})


def refused(prompts: Prompts, prompt: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        prompts.resolve({"prompt": prompt, "input": "Hi"})
    assert caught.value.status == 400
    return caught.value


def texts(body: Any) -> list[str]:
    return [part["text"] for item in body["input"] for part in item["content"]]


# -- over HTTP ------------------------------------------------------------------------------------------------------------------


async def test_a_prompt_template_supplies_the_parameters_of_the_request(
    start_at: Callable[..., Ours], upstream: ScriptedUpstream, directory: Path
) -> None:
    upstream.whole(completion({"content": "Hello"}))
    ours = start_at("proxy", server__prompts_dir=str(directory))
    response = await ours.client.responses.create(prompt={"id": "support", "variables": VALUES}, input="Hi")
    assert response.output_text == "Hello"
    assert response.instructions == "You help with Widget, Widget and joy. {not} {{ this one }}"
    assert response.prompt is not None
    assert response.prompt.model_dump() == {"id": "support", "version": "2", "variables": VALUES}
    assert (await ours.client.responses.retrieve(response.id)).prompt == response.prompt
    asked = upstream.requests[0].json
    assert asked["temperature"] == 0.25
    assert [message["role"] for message in asked["messages"]] == ["system", "developer", "user"]
    assert asked["messages"][1]["content"] == "Look at it well."
    assert "prompt" not in asked


async def test_a_request_may_have_a_prompt_and_no_input(
    start_at: Callable[..., Ours], upstream: ScriptedUpstream, directory: Path
) -> None:
    upstream.stream(*HELLO)
    ours = start_at("proxy", server__prompts_dir=str(directory))
    responses: Any = ours.client.responses
    async with responses.stream(prompt={"id": "support", "variables": VALUES}, model="tiny") as stream:
        assert (await stream.get_final_response()).output_text == "Hello"


async def test_an_unknown_prompt_is_a_400_naming_the_parameter(start_at: Callable[..., Ours], directory: Path) -> None:
    client = start_at("proxy", server__prompts_dir=str(directory)).client
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(prompt={"id": "nobody"}, input="Hi", model="tiny")
    assert (caught.value.param, caught.value.code) == ("prompt.id", "prompt_not_found")


async def test_prompt_is_an_unsupported_parameter_without_a_prompts_directory(start_at: Callable[..., Ours]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await start_at("proxy").client.responses.create(prompt={"id": "support"}, input="Hi", model="tiny")
    assert (caught.value.param, caught.value.code) == ("prompt", "unsupported_parameter")


async def test_a_background_response_uses_its_prompt(
    start_at: Callable[..., Ours], upstream: ScriptedUpstream, directory: Path
) -> None:
    upstream.whole(completion({"content": "Hello"}))
    ours = start_at("proxy", server__prompts_dir=str(directory), auth__secret_keys=["x" * 32])
    created = await ours.client.responses.create(prompt={"id": "plain"}, input="Hi", model="tiny", background=True)
    *_, last = [event async for event in await ours.client.responses.retrieve(created.id, stream=True)]
    assert last.type == "response.completed", last
    assert last.response.instructions == "Be plain."
    assert upstream.requests[0].json["messages"][0]["content"] == "Be plain."


# -- resolution of templates ------------------------------------------------------------------------------------------------------


def test_parameters_of_the_request_override_those_of_the_template(prompts: Prompts) -> None:
    body = resolved(prompts, {"id": "support", "variables": VALUES}, input="Hi", temperature=1, instructions="Mine", top_p=None)
    assert (body["temperature"], body["instructions"], body["model"]) == (1, "Mine", "tiny")
    assert [item["role"] for item in body["input"]] == ["developer", "user"]


def test_a_version_is_selected_by_name(prompts: Prompts) -> None:
    body = resolved(prompts, {"id": "support", "version": "1", "variables": {"product": "{{tone}}"}}, input="Hi")
    assert body["instructions"] == "You sell {{tone}}."  # a value is never a placeholder
    assert body["input"] == "Hi"


@pytest.mark.parametrize("part", [IMAGE, FILE])
def test_an_image_or_a_file_replaces_its_placeholder(prompts: Prompts, part: dict[str, Any]) -> None:
    body = resolved(prompts, {"id": "support", "variables": {**VALUES, "thing": part}})
    assert body["input"][0]["content"] == [
        {"type": "input_text", "text": "Look at "},
        part,
        {"type": "input_text", "text": " well."},
    ]


def test_an_input_text_part_is_substituted_as_text(prompts: Prompts) -> None:
    value = {"type": "input_text", "text": "Widget"}
    body = resolved(prompts, {"id": "support", "variables": {**VALUES, "product": value, "thing": value}})
    assert "Widget, Widget" in body["instructions"]
    assert texts(body) == ["Look at Widget well."]


def test_a_null_counts_as_omitted(prompts: Prompts) -> None:
    assert resolved(prompts, None, input="Hi") == {"prompt": None, "input": "Hi"}
    assert resolved(prompts, {"id": "plain", "version": None, "variables": None}, input="Hi")["instructions"] == "Be plain."


@pytest.mark.parametrize(
    ("prompt", "param", "code"),
    [
        ({"id": "nobody"}, "prompt.id", "prompt_not_found"),
        ({"id": "support", "version": "9", "variables": VALUES}, "prompt.version", "prompt_version_not_found"),
        ({"id": "support", "version": 2}, "prompt.version", "invalid_type"),
        ({"id": "support", "variables": {"product": "x", "thing": "x"}}, "prompt.variables.tone", "missing_required_parameter"),
        ({"id": "support", "variables": {**VALUES, "tone": None}}, "prompt.variables.tone", "missing_required_parameter"),
        ({"id": "support", "variables": {**VALUES, "more": "x"}}, "prompt.variables.more", "unknown_parameter"),
        ({"id": "support", "variables": {**VALUES, "tone": 1}}, "prompt.variables.tone", "invalid_type"),
        ({"id": "support", "variables": {**VALUES, "tone": IMAGE}}, "prompt.variables.tone", "invalid_value"),
        ({"id": "support", "variables": {**VALUES, "thing": {"type": "x"}}}, "prompt.variables.thing.type", "invalid_value"),
        ({"id": "support", "variables": []}, "prompt.variables", "invalid_type"),
        ({"id": "support", "name": "x"}, "prompt.name", "unknown_parameter"),
        ({"version": "2"}, "prompt.id", "missing_required_parameter"),
        ("support", "prompt", "invalid_type"),
    ],
)
def test_an_invalid_prompt_is_a_400_naming_the_parameter(prompts: Prompts, prompt: Any, param: str, code: str) -> None:
    error = refused(prompts, prompt)
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(
    "name",
    ["../secret", "..", ".", "", "a/b", "/etc/passwd", "sub/../../secret", "secret\0", "..%2fsecret", "x" * 65, "README.md"],
)
def test_an_id_cannot_name_a_file_outside_the_directory(directory: Path, name: str) -> None:
    inner = directory / "prompts"
    (inner / "sub").mkdir(parents=True)
    (directory / "secret.toml").write_text('instructions = "secret"')
    error = refused(Prompts(str(inner)), {"id": name})
    assert (error.param, error.code) == ("prompt.id", "prompt_not_found")


# -- the directory ------------------------------------------------------------------------------------------------------------------


def test_a_file_that_changes_is_read_again(prompts: Prompts, directory: Path) -> None:
    path = directory / "plain.json"
    path.write_text(json.dumps({"instructions": "Be ornate now."}))
    assert resolved(prompts, {"id": "plain"})["instructions"] == "Be ornate now."
    path.unlink()
    assert refused(prompts, {"id": "plain"}).code == "prompt_not_found"
    path.write_text(json.dumps({"instructions": "Back."}))
    assert resolved(prompts, {"id": "plain"})["instructions"] == "Back."


def test_a_config_map_that_is_swapped_is_read_again(tmp_path: Path) -> None:
    """Kubernetes replaces the link `..data`; the files are links into its target."""
    for version in ("one", "two"):
        (tmp_path / f"..{version}").mkdir()
        (tmp_path / f"..{version}" / "plain.toml").write_text(f'instructions = "{version}"')
    (tmp_path / "..data").symlink_to("..one")
    (tmp_path / "plain.toml").symlink_to("..data/plain.toml")
    prompts = Prompts(str(tmp_path))
    assert resolved(prompts, {"id": "plain"})["instructions"] == "one"
    (tmp_path / "..tmp").symlink_to("..two")
    os.rename(tmp_path / "..tmp", tmp_path / "..data")  # noqa: PTH104
    assert resolved(prompts, {"id": "plain"})["instructions"] == "two"


def test_a_file_that_becomes_invalid_keeps_its_last_valid_content(
    prompts: Prompts, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (directory / "plain.json").write_text("{")
    assert resolved(prompts, {"id": "plain"})["instructions"] == "Be plain."
    assert "plain.json" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.toml", "= 1", "a.toml"),
        ("a.json", "[]", "expected an object"),
        ("a.json", '{"instructions": 1}', "instructions"),
        ("a.json", '{"input": [{"role": "nobody", "content": ""}]}', "input"),
        ("a.json", '{"stream": true}', "stream"),
        ("a.json", '{"versions": {}}', "versions"),
        ("a.json", '{"versions": {"1": {}, "2": {}}}', "current"),
        ("a.json", '{"versions": {"1": {}}, "current": "2"}', "current"),
    ],
)
def test_an_invalid_file_is_an_error_at_startup(tmp_path: Path, name: str, content: str, why: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidPrompt, match=why):
        Prompts(str(tmp_path))


def test_an_unreadable_file_is_an_error_at_startup(tmp_path: Path) -> None:
    (tmp_path / "support.toml").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidPrompt, match=r"prompts_dir: No such file .*support\.toml"):
        Prompts(str(tmp_path))


def test_a_missing_directory_is_an_error_at_startup(tmp_path: Path) -> None:
    with pytest.raises(InvalidPrompt, match="prompts_dir: No such file"):
        Prompts(str(tmp_path / "none"))
