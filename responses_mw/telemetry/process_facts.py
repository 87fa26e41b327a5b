"""Read facts for the inspector from the metrics of this process: verdicts of the cache's judge, and calls of tools."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from .conventions import CANCELLED
from .metrics import CACHE_ALIASES, CACHE_AUDIT, CACHE_JUDGE_TOKENS, CACHE_JUDGED, CACHE_RACES, TOOL_DURATION

MAX_TOOLS = 40
"""Maximum number of rows about tools, so that the facts fit into the report of a process."""


def process_facts() -> dict[str, Any]:
    """Return the facts since the start of the process, without those that are zero."""
    return {name: facts for name, facts in (("judge", _judge()), ("tools", _tools())) if facts}


def _judge() -> dict[str, int]:
    """Return the judgements by verdict, the aliases and tokens, races that the judge won, and audits by verdict."""
    counts = {verdict: count for (verdict,), count in CACHE_JUDGED.read("total").items()}
    counts |= {"aliases": sum(CACHE_ALIASES.read("total").values()), "tokens": sum(CACHE_JUDGE_TOKENS.read("total").values())}
    counts |= {f"race_{result}": count for (result,), count in CACHE_RACES.read("total").items()}
    counts |= {f"audit_{verdict}": count for (verdict,), count in CACHE_AUDIT.read("total").items()}
    return {name: int(count) for name, count in counts.items() if count}


def _tools() -> list[dict[str, Any]]:
    """Return the number of calls and errors, and the total duration, by kind of tool and configured server."""
    rows: defaultdict[tuple[str, str], dict[str, Any]] = defaultdict(lambda: {"calls": 0, "errors": 0, "seconds": 0.0})
    seconds = TOOL_DURATION.read("sum")
    for labels, count in TOOL_DURATION.read("count").items():
        kind, server, error = labels
        row = rows[kind, server]
        row["calls"] += int(count)
        row["errors"] += int(count) if error not in ("", CANCELLED) else 0
        row["seconds"] = round(row["seconds"] + seconds.get(labels, 0.0), 3)
    named = [{"kind": kind, "server": server[:64], **row} for (kind, server), row in rows.items()]
    return sorted(named, key=lambda row: -int(row["calls"]))[:MAX_TOOLS]
