"""Print what happened to responses: one response, the last ones, or the jobs in the queue."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from ..inspector.report import ResponseReport, outline, report_of, text_of
from ..state import Damaged, NewerRecord, State
from ..state.job_list import JobFacts, list_jobs
from ..state.recent import RecentFilter, Summary
from ..telemetry.audit import audit

FOLLOW_INTERVAL = 0.5
NOT_FOUND = 1
"""Exit status if there is no such response."""

_CONTROL = dict.fromkeys((*range(32), *range(127, 160), *range(8234, 8239), *range(8294, 8298)), "�")


def printable(text: str, *, lines: bool = False) -> str:
    """Replace control characters, which could change what a terminal shows. With `lines`, keep line feeds and tabs."""
    kept = {ord("\n"), ord("\t")} if lines else set[int]()
    return text.translate({code: mark for code, mark in _CONTROL.items() if code not in kept})


def show(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=True, separators=(",", ":")), flush=True)


# -- one response ----------------------------------------------------------------------------------------------------------


async def inspect_response(state: State, response_id: str, *, content: bool, as_json: bool) -> int:
    """Print what is known about a response. Return the exit status."""
    if not response_id.startswith("resp_"):
        response_id = await state.recent.of_request(response_id) or response_id
    report = await report_of(state, response_id)
    if report is None:
        print(f"inspect: nothing is known about {printable(response_id)}", file=sys.stderr)
        return NOT_FOUND
    captured = await _captured(state, response_id) if content else None
    if content and (report.document is not None or captured is not None):
        audit("content shown by a command", response_id)
    if as_json:
        show(report.as_json(content=content) | ({"captured": captured} if captured is not None else {}))
        return 0
    for name, value in _facts(report):
        print(f"{name:10} {printable(value)}")
    if report.document is not None:
        _print_items("input", report.input, content=content)
        _print_items("output", report.document.get("output") or (), content=content)
    for turn in (captured or {}).get("turns", ()):
        _print_turn(turn)
    return 0


async def _captured(state: State, response_id: str) -> dict[str, Any] | None:
    try:
        return await state.captures.read(response_id)
    except (Damaged, NewerRecord) as error:
        print(f"inspect: {printable(error.message)}", file=sys.stderr)
        return None


def _print_turn(turn: dict[str, Any]) -> None:
    """Print what was sent to the upstream in a turn, and what came back."""
    details = (_named("status", turn.get("status")), _seconds("took", turn.get("seconds")))
    print(f"\nturn {turn.get('number', 1)}: {_joined(*details)}".rstrip(": "))
    texts = {
        "sent to the upstream": json.dumps(turn.get("sent"), ensure_ascii=False, indent=2),
        "error": str(turn.get("error", "")),
        "came back": str(turn.get("answer", "")),
    }
    for title, text in texts.items():
        if text:
            print(f"  {title}")
            print("".join(f"    {line}\n" for line in printable(text, lines=True).splitlines()), end="")


def _facts(report: ResponseReport) -> Iterator[tuple[str, str]]:
    known, record = report.summary, report.record
    document = report.document or {}
    facts = {
        "response": report.id,
        "status": _joined(report.status, known.get("kind")),
        "error": _joined(report.error.get("code"), _named("upstream status", known.get("upstream_status")), known.get("cause")),
        "model": _joined(known.get("model") or document.get("model"), _named("at", known.get("endpoint"))),
        "owner": _joined(report.owner, _named("key", known.get("key"))),
        "ended": _joined(time_text(known.get("ended")), _seconds("took", known.get("seconds")), _first_token(known)),
        "tokens": _tokens(known) or _tokens_of(document.get("usage") or {}),
        "turns": _joined(known.get("turns"), _tools(known), _named("continuations", known.get("continuations"))),
        "cache": _joined(known.get("cache"), known.get("cache_reason")),
        "stored": f"no: {report.hidden}" if report.hidden else f"for {_duration(record.seconds_left)}" if record else "",
        "events": _joined(record.events, f"{record.log_bytes} bytes") if record is not None and record.events else "",
        "attempts": _joined(record.attempts, _named("retries", record.retries)) if record is not None and record.worker else "",
        "previous": report.previous,
        "next": ", ".join(str(child["id"]) for child in report.children),
        "replica": str(known.get("replica", "")),
        "request": str(known.get("request", "")),
        "trace": str(known.get("trace_id", "")),
    }
    return ((name, value) for name, value in facts.items() if value)


def _print_items(title: str, items: Sequence[dict[str, Any]], *, content: bool) -> None:
    print(f"\n{title}")
    for item in items:
        facts = outline(item)
        details = [facts.get("role", ""), facts.get("name", ""), facts.get("call_id", ""), f"{facts['characters']} characters"]
        print(printable(f"  {facts.get('type', 'item')}: {', '.join(filter(None, details))}"))
        if content:
            print("".join(f"    {line}\n" for line in printable(text_of(item), lines=True).splitlines()), end="")


# -- the last responses ----------------------------------------------------------------------------------------------------


async def tail(state: State, wanted: RecentFilter, *, number: int, follow: bool, as_json: bool) -> int:
    """Print the last `number` responses that match and, with `follow`, further ones as they end. Return the exit status."""
    ends = await state.recent.ends()
    page = await state.recent.page(wanted, limit=number)
    if not page.summaries and not follow:
        print("tail: there are no such responses. Servers and workers add them if ui.mode is not off.", file=sys.stderr)
    _print_summaries(page.summaries[::-1], as_json=as_json)
    shown = {summary["id"] for summary in page.summaries}  # some may have been added after `ends`
    while follow:
        summaries, ends = await state.recent.after(ends, wanted)
        _print_summaries([summary for summary in summaries if summary["id"] not in shown], as_json=as_json)
        await asyncio.sleep(FOLLOW_INTERVAL)
        shown.clear()
    return 0


def _print_summaries(summaries: Sequence[Summary], *, as_json: bool) -> None:
    for summary in summaries:
        if as_json:
            show(summary)
        else:
            print(printable(_line(summary)), flush=True)


def _line(summary: Summary) -> str:
    cause = _joined(summary.get("error_code"), _named("upstream", summary.get("upstream_status")))
    details = [
        f"{summary.get('seconds', 0.0):.2f} s",
        _tokens(summary),
        _named("cache", summary.get("cache")) if summary.get("cache") != "miss" else "",
        _tools(summary),
        _named("not stored:", summary.get("unstored")),
        cause,
    ]
    head = f"{time_text(summary.get('ended'))}  {summary.get('status', ''):10} {summary.get('kind', ''):10} {summary['id']}"
    return f"{head}  {summary.get('model', '')}  {', '.join(filter(None, details))}"


# -- jobs ------------------------------------------------------------------------------------------------------------------


async def show_jobs(state: State, *, as_json: bool) -> int:
    """Print the jobs that run or wait. Return the exit status."""
    found = await list_jobs(state.client)
    replicas = {report["worker"]: report["name"] for report in await state.replicas.running() if "worker" in report}
    if as_json:
        show({**asdict(found), "replicas": replicas})
        return 0
    print(f"{found.waiting} waiting, {found.claimed} claimed by workers, of {len(found.owners)} owners")
    for owner, count in found.owners.items():
        print(printable(f"  {owner}: {count}"))
    for job in found.jobs:
        print(printable(_job_line(job, replicas)))
    return 0


def _job_line(job: JobFacts, replicas: dict[str, str]) -> str:
    details = [
        _seconds("for", job.waited) if job.state == "waiting" else "",
        _named("worker", replicas.get(job.worker, job.worker)),
        _seconds("lease", job.lease) if job.state != "waiting" else "",
        _named("attempt", job.attempt),
        _named("retries", job.retries),
        _named("continuations", job.continuations),
        _named("events", job.events),
    ]
    return f"{job.state:8} {job.id}  owner {job.owner}  {', '.join(filter(None, details))}".rstrip()


# -- texts -----------------------------------------------------------------------------------------------------------------


def _joined(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part)


def _named(name: str, value: Any) -> str:
    return f"{name} {value}" if value else ""


def _seconds(name: str, value: float | None) -> str:
    return "" if value is None else f"{name} {value:.2f} s"


def time_text(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _duration(seconds: int) -> str:
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    parts = [f"{days} d" if days else "", f"{hours} h" if hours else "", f"{minutes} min" if minutes and not days else ""]
    return " ".join(filter(None, parts)) or f"{seconds} s"


def _first_token(summary: Summary) -> str:
    return _seconds("first token after", summary.get("first_token"))


def _tokens(summary: Summary) -> str:
    if "tokens_in" not in summary:
        return ""
    text = f"{summary['tokens_in']} in, {summary.get('tokens_out', 0)} out"
    return _joined(text, _named("cached", summary.get("tokens_cached")), _named("reasoning", summary.get("tokens_reasoning")))


def _tokens_of(usage: dict[str, Any]) -> str:
    return f"{usage['input_tokens']} in, {usage['output_tokens']} out" if usage else ""


def _tools(summary: Summary) -> str:
    calls = summary.get("tool_calls")
    if not calls:
        return ""
    failed = f", {summary['tool_errors']} failed" if summary.get("tool_errors") else ""
    return f"{calls} calls of {', '.join(summary.get('tools', ()))}{failed}"
