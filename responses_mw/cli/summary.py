"""The start message: the server's address, and what it is configured to do."""

from __future__ import annotations

import logging
from typing import Any

from ..auth import APIKeys
from ..settings import Settings
from ..state import without_credentials
from ..telemetry.report import log_facts
from ..version import VERSION

__all__ = ["announce", "summary"]

logger = logging.getLogger("responses_mw")


def announce(settings: Settings, started: str, facts: dict[str, Any]) -> None:
    """Print a headline that ends with ``started`` (what the process does), and the facts. JSON logs get a record instead."""
    headline = f"responses-mw {VERSION} {started}"
    if settings.server.log_format == "json":
        log_facts(logger, headline, {"version": VERSION, **facts})
        return
    width = max(map(len, facts))
    lines = [f"  {name.replace('_', ' '):{width}}  {value}" for name, value in facts.items()]
    print("\n".join([headline, *lines]), flush=True)


def summary(settings: Settings, dialect: str | None, *, has_state: bool, processes: int = 1) -> dict[str, str]:
    """Return the facts for the start message. ``dialect`` is None if the upstream has not answered yet."""
    upstream = f"{settings.upstream.url} ({dialect or 'does not answer yet'})"
    facts = {
        "upstream": upstream,
        "store": _store(settings, has_state=has_state),
        "tools": _tools(settings),
        "cache": settings.cache.mode,
        "keys": _keys(settings),
        "limits": _limits(settings),
        "background": f"up to {settings.jobs.concurrency} responses at a time"
        if settings.jobs.concurrency
        else "run by workers",
        "admin_port": f"http://{settings.server.admin_host}:{settings.server.admin_port}"
        if settings.server.admin_port
        else "off",
    }
    return {**({"processes": str(processes)} if processes > 1 else {}), **facts}


def _store(settings: Settings, *, has_state: bool) -> str:
    if settings.redis.url is not None:
        return without_credentials(settings.redis.url.get_secret_value())
    if not has_state:
        return "none: responses are not stored"
    if settings.redis.data_dir is not None:
        return f"embedded Valkey in {settings.redis.data_dir}"
    return "embedded Valkey in memory: its data is lost when the server stops"


def _tools(settings: Settings) -> str:
    search = settings.search.provider
    found = [f"MCP {', '.join(settings.tools.mcp_servers)}"] if settings.tools.mcp_servers else []
    found += [f"web search ({search})"] if search != "none" else []
    found += ["code interpreter"] if settings.tools.sandbox_url else []
    return "; ".join(found) or "none"


def _keys(settings: Settings) -> str:
    keys = APIKeys.of(settings.auth)
    callers = f"API keys of {_count(len(keys.names), 'owner')}" if keys is not None else "none: the upstream checks credentials"
    return callers + (f"; {_count(len(settings.auth.secret_keys), 'secret key')}" if settings.auth.secret_keys else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _limits(settings: Settings) -> str:
    limits = settings.limits
    units = {
        "requests a minute": limits.requests_per_minute,
        "streams": limits.streams,
        "background responses": limits.background,
        "stored bytes": limits.stored_bytes,
    }
    found = ", ".join(f"{maximum} {unit}" for unit, maximum in units.items() if maximum)
    return f"{found} per owner" if found else "none per owner"
