"""``responses-mw serve --check``: whether what the settings name can be used."""

from __future__ import annotations

import sys

from ..app import open_state, open_upstream
from ..auth import APIKeys, InvalidKeys
from ..crypto import Sealer
from ..engine.prompt_templates import InvalidPrompt, Prompts
from ..errors import APIError, StartupError
from ..settings import Settings, origins
from ..upstream import Caller

_PATIENCE = 10.0
"""Maximum seconds that a check waits for an upstream that is connected and silent."""


async def check(settings: Settings, unknown: list[str]) -> int:
    """Print what the settings, the upstream and the state are, and return the exit status: 0 if all can be used.

    `unknown` are the variables that look like settings and are none.
    """
    timeouts = {name: min(getattr(settings.upstream, name), _PATIENCE) for name in ("first_byte_timeout", "idle_timeout")}
    hasty = settings.model_copy(update={"upstream": settings.upstream.model_copy(update=timeouts)})
    results = [_check_files(settings, unknown), await _check_upstream(hasty), await _check_state(settings)]
    return 0 if all(results) else 1


def _check_files(settings: Settings, unknown: list[str]) -> bool:
    try:
        APIKeys.of(settings.auth)
        Prompts(settings.server.prompts_dir)
    except (InvalidKeys, InvalidPrompt, OSError) as error:
        print(f"settings: {error}", file=sys.stderr)
        return False
    if unknown:
        print(f"settings: unknown in the environment: {', '.join(unknown)}", file=sys.stderr)
        return False
    print("settings: valid")
    for name, origin in origins(settings).items():
        if name != "check":
            print(f"          {name} from {origin}")
    return True


async def _check_upstream(settings: Settings) -> bool:
    caller = Caller()
    try:
        async with open_upstream(no_app, settings) as upstream:
            models = await upstream.models(caller)
            dialect = await upstream.dialect(caller)
    except APIError as error:
        advice = " (its key: --upstream.api-key)" if error.status in (401, 403) else ""
        print(f"upstream: {settings.upstream.url}: {error.message}{advice}", file=sys.stderr)
        return False
    print(f"upstream: {settings.upstream.url} answers")
    print(f"dialect:  {dialect.name}{'' if settings.upstream.dialect == 'auto' else ' (set)'}")
    print(f"models:   {', '.join(model['id'] for model in models) or 'none'}")
    return True


async def _check_state(settings: Settings) -> bool:
    try:
        async with open_state(settings) as state:
            if state is None:
                print("state:    none: responses are not stored")
                return True
            health = await state.check()
            keys = [secret.get_secret_value() for secret in settings.auth.secret_keys]
            agree = not keys or await state.check_keys(Sealer(keys).key_ids)
    except (APIError, StartupError) as error:
        print(f"state:    {error}", file=sys.stderr)
        return False
    kind = "" if settings.redis.url else " (embedded)"
    maximum = health.max_memory or "unlimited"
    print(f"state:    {health.server}{kind}, {health.policy}, {health.used_memory} of {maximum} bytes used")
    for warning in health.warnings:
        print(f"          {warning}", file=sys.stderr if warning == health.fault else sys.stdout)
    if not agree:
        print("          auth.secret_keys differ from those of other replicas", file=sys.stderr)
    return agree and not health.fault


async def no_app(*_: object) -> None:
    raise NotImplementedError("a check calls no application")
