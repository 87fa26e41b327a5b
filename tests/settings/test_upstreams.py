"""The settings of several upstreams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from pydantic_settings import SettingsError

from responses_mw.auth import APIKeys
from responses_mw.cli import main
from responses_mw.cli.commands import WorkerCommand
from responses_mw.cli.serve import ServeSettings, summary
from responses_mw.redaction import Redactor
from responses_mw.settings import Settings, origins
from responses_mw.upstream import Upstream
from responses_mw.upstream.discovery import Address
from responses_mw.upstream.pool import Pool
from tests.support.paths import ROOT

CONFIG = """
[upstreams.llama]
url = "dns+http://vllm-llama-headless:8000/v1/"
aliases = { "llama" = "meta-llama/Llama-3.3-70B-Instruct" }
fallbacks = ["hosted:gpt-oss-120b", "qwen"]

[upstreams.qwen]
url = ["http://qwen-0:8000", "http://qwen-1:8000"]
think_tag = "think"
models = "qwen, qwen-small"
session_header = "X-Session-ID"

[upstreams.hosted]
url = "https://api.example.com"
api = "responses"
api_key = "hosted-secret-key"
headers = { "x-token" = "hosted-secret-token" }

[auth]
api_keys = ["alice:sha256:0000000000000000000000000000000000000000000000000000000000000000"]
"""

A, B = {"url": "http://a"}, {"url": "http://b"}


def from_file(directory: Path, content: str) -> Settings:
    path = directory / "upstreams.toml"
    path.write_text(content)
    return ServeSettings(config=str(path))


def settings_of(**upstreams: dict[str, Any]) -> Settings:
    return Settings.model_validate({"upstreams": upstreams})


def test_each_table_describes_an_upstream(tmp_path: Path) -> None:
    settings = from_file(tmp_path, CONFIG)
    llama, qwen, hosted = settings.named_upstreams.values()
    assert list(settings.named_upstreams) == ["llama", "qwen", "hosted"]
    assert llama.url == ("dns+http://vllm-llama-headless:8000",)
    assert llama.aliases == {"llama": "meta-llama/Llama-3.3-70B-Instruct"}
    assert llama.fallbacks == ["hosted:gpt-oss-120b", "qwen"]
    assert qwen.url == ("http://qwen-0:8000", "http://qwen-1:8000")
    assert (qwen.models, qwen.session_header) == (["qwen", "qwen-small"], "x-session-id")
    assert hosted.has_credential


@pytest.mark.parametrize(
    "given", ["http://a/v1, dns+https://b:1/x/", ["http://a", "dns+https://b:1/x"], '["http://a/", "dns+https://b:1/x/"]']
)
def test_one_upstream_may_have_several_urls(given: str | list[str]) -> None:
    settings = Settings.model_validate({"upstream": {"url": given}})
    assert settings.upstream.url == ("http://a", "dns+https://b:1/x")
    assert settings.named_upstreams == {"default": settings.upstream}


def test_without_a_url_the_wrapped_application_is_the_default_upstream() -> None:
    assert (Settings().upstream.url, list(Settings().named_upstreams)) == ((), ["default"])


def test_the_unnamed_upstream_is_the_first() -> None:
    settings = Settings.model_validate({"upstream": A, "upstreams": {"b": B}})
    assert [(name, upstream.url) for name, upstream in settings.named_upstreams.items()] == [
        ("default", ("http://a",)),
        ("b", ("http://b",)),
    ]


def test_upstreams_are_json_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESPONSES_MW_UPSTREAMS", json.dumps({"a": A, "b": {"url": "http://b", "aliases": {"x": "y"}}}))
    settings = Settings()
    assert settings.upstreams["b"].aliases == {"x": "y"}
    assert origins(settings) == dict.fromkeys(("upstreams.a", "upstreams.b"), "RESPONSES_MW_UPSTREAMS")


def test_aliases_and_fallbacks_of_the_unnamed_upstream_are_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESPONSES_MW_UPSTREAM_URL", "http://a,http://b")
    monkeypatch.setenv("RESPONSES_MW_UPSTREAM_ALIASES", '{"llama": "meta/llama"}')
    monkeypatch.setenv("RESPONSES_MW_UPSTREAM_FALLBACKS", "c")
    monkeypatch.setenv("RESPONSES_MW_UPSTREAMS", '{"c": {"url": "http://c"}}')
    upstream = Settings().upstream
    assert (upstream.url, upstream.aliases, upstream.fallbacks) == (("http://a", "http://b"), {"llama": "meta/llama"}, ["c"])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://a,http://a/v1/", "contains http://a twice"),
        ("http://a,http://A:80", "twice"),
        ("dns+http://a,dns+http://a:80", "twice"),
        ("dns+http://10.0.0.1:8000", "a name, not of an IP address"),
        ("dns+http://[::1]:8000", "a name, not of an IP address"),
        ("dns+ftp://a", "http:// or https:// URL"),
        ("srv+http://a", "http:// or https:// URL"),
        ("http://a,http://user:secret@b", "must not contain credentials"),
        ("http://a:port", "port"),
    ],
)
def test_a_url_that_cannot_be_an_endpoint_is_an_error(url: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings_of(a={"url": url})


@pytest.mark.parametrize(
    ("upstreams", "message"),
    [
        ({"a": {}}, "upstreams.a needs a url"),
        ({"A": A}, "pattern"),
        ({"a.b": A}, "pattern"),
        ({"a" * 65: A}, "pattern"),
        ({"a": A | {"fallbacks": ["b"]}}, r"upstreams.a.fallbacks contains 'b', which is none of: a"),
        ({"a": A | {"fallbacks": "a:other"}}, r"upstreams.a.fallbacks contains the upstream itself"),
        ({"a": A | {"fallbacks": "b:"}, "b": B}, "pattern"),
        ({"a": A | {"aliases": {"x": "1"}}, "b": B | {"aliases": {"x": "2"}}}, "upstreams.b.aliases contains 'x', as does"),
        ({"a": A | {"aliases": {"x": "1"}}, "b": B | {"models": ["x"]}}, "upstreams.a.aliases contains 'x', which is in"),
        ({"a": A | {"aliases": {"": "1"}}}, "at least 1 character"),
        ({"a": A | {"session_header": "Authorization"}}, "authorization, which has another meaning"),
        ({"a": A | {"session_header": "content-length"}}, "content-length, which has another meaning"),
        ({"a": A | {"session_header": "x session"}}, "must be the name of a header"),
        ({"a": A | {"session_header": "x-a", "headers": {"X-A": "1"}}}, "contain the same header"),
        ({"a": A | {"api_key": "secret"}, "b": B}, "upstreams.a has a credential.*auth.api_keys is required"),
        ({"a": A, "b": B | {"headers": {"api-key": "secret"}}}, "upstreams.b has a credential.*auth.api_keys is required"),
    ],
)
def test_contradictory_settings_are_errors(upstreams: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings_of(**upstreams)


def test_the_name_default_is_reserved_for_the_unnamed_upstream() -> None:
    assert list(settings_of(default=A).named_upstreams) == ["default"]
    with pytest.raises(ValidationError, match=r"upstreams.default: .*upstream.url"):
        Settings.model_validate({"upstream": A, "upstreams": {"default": B}})


def test_two_upstreams_may_be_the_fallbacks_of_each_other() -> None:
    settings = settings_of(a=A | {"fallbacks": "b"}, b=B | {"fallbacks": ["a:small"]})
    assert [upstream.fallbacks for upstream in settings.upstreams.values()] == [["b"], ["a:small"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[upstreams.a]\nurll = "http://a"', r"upstreams\.a\.urll \(did you mean url\?\)"),
        ('upstreams = "http://a"', r"upstreams must be tables: \[upstreams\.NAME\]"),
    ],
)
def test_an_unknown_key_in_a_table_is_an_error_with_a_hint(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        from_file(tmp_path, content)


def test_the_secrets_of_every_upstream_are_removed(tmp_path: Path) -> None:
    redact = Redactor.of(from_file(tmp_path, CONFIG))
    assert redact("hosted-secret-key hosted-secret-token") == "<redacted> <redacted>"


def test_the_example_is_valid() -> None:
    settings = ServeSettings(config=str(ROOT / "examples" / "upstreams.toml"))
    assert list(settings.named_upstreams) == ["llama", "qwen", "hosted"]
    keys = APIKeys.of(settings.auth)
    assert keys is not None
    assert keys.names == {"alice"}


def test_a_worker_needs_no_api_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESPONSES_MW_UPSTREAMS", json.dumps({"a": A | {"api_key": "secret"}, "b": B}))
    assert len(WorkerCommand().named_upstreams) == 2
    with pytest.raises(ValidationError, match=r"auth\.api_keys is required"):
        ServeSettings()


def test_the_start_message_names_every_upstream() -> None:
    settings = settings_of(a={"url": "http://a,http://b"}, c={"url": "dns+http://c"})
    pools = Pool("vllm"), Pool("sglang")
    pools[0].update([Address(url, "", "") for url in settings.upstreams["a"].url])
    pools[0].endpoints[0].fail("away")
    transport = httpx.MockTransport(lambda _: httpx.Response(200))
    opened = [Upstream(transport, *one) for one in zip(pools, settings.upstreams.values(), settings.upstreams, strict=True)]
    assert summary(settings, opened, has_state=False)["upstream"] == (
        "a: http://a, http://b (vllm, 1 of 2 endpoints available); "
        "c: dns+http://c (dialect not detected yet, 0 of 0 endpoints available)"
    )


def test_the_flag_for_upstreams_is_json() -> None:
    with pytest.raises(SystemExit) as exit_of:
        main(["serve", '--upstreams={"a": {"url": "http://a", "timeout": -1}}'])
    assert "upstreams.a.timeout" in str(exit_of.value)
