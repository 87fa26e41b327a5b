"""Measures a load: what its clients saw, and what the server and the upstream used meanwhile according to the kernel."""

import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.load import Plan, Report
from benchmarks.processes import Server, machine_cpu_seconds, usage

SAMPLE_SECONDS = 0.5
# Seconds that the load's process may take to exit after the plan's timeout.
EXIT_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The figures of one round, or the medians of several. CPU shares are in percent of one core."""

    cpu_us_per_token: float
    cpu_us_per_answer: float
    cpu_share: float
    upstream_cpu_share: float
    load_cpu_share: float
    machine_cpu_share: float
    tokens_per_second: float
    first_event_ms: float
    first_token_ms: float
    first_token_p99_ms: float
    answer_ms: float
    lag_ms: float
    lag_p99_ms: float
    memory_kb_per_stream: float
    answers: float
    failed: float


def measure(server: Server | None, upstream: Server, api: str, plan: Plan) -> tuple[Measurement, Report]:
    """Run `plan` against `server` (None: against the upstream itself) in a separate process.

    Raises `RuntimeError` if the load itself fails. Failed answers are counted, not raised.
    """
    watched = server or upstream
    before, upstream_before = usage(watched.pid), usage(upstream.pid)
    started, machine_before = time.monotonic(), machine_cpu_seconds()
    report, rss_bytes = run_load(watched, api, plan)
    machine_share = per((machine_cpu_seconds() - machine_before) * 100, time.monotonic() - started)
    cpu_seconds = usage(watched.pid).cpu_seconds - before.cpu_seconds if server else 0.0
    upstream_cpu_seconds = usage(upstream.pid).cpu_seconds - upstream_before.cpu_seconds
    return Measurement(
        cpu_us_per_token=per(cpu_seconds * 1e6, report.tokens),
        cpu_us_per_answer=per(cpu_seconds * 1e6, report.answers),
        cpu_share=per(cpu_seconds * 100, report.seconds),
        upstream_cpu_share=per(upstream_cpu_seconds * 100, report.seconds),
        load_cpu_share=per(report.cpu_seconds * 100, report.seconds),
        machine_cpu_share=machine_share,
        tokens_per_second=per(report.tokens, report.seconds),
        first_event_ms=report.first_event.median,
        first_token_ms=report.first_token.median,
        first_token_p99_ms=report.first_token.p99,
        answer_ms=report.answer.median,
        lag_ms=report.lag.median,
        lag_p99_ms=report.lag.p99,
        memory_kb_per_stream=per((rss_bytes - before.rss_bytes) / 1000, plan.streams) if server else 0.0,
        answers=report.answers,
        failed=report.failed,
    ), report


def run_load(server: Server, api: str, plan: Plan) -> tuple[Report, int]:
    """Run `plan` against `server`. Return its report and the server's maximum resident memory meanwhile, in bytes."""
    options = dataclasses.asdict(plan)
    flags = ["--stream" if options.pop("stream") else "--no-stream"]
    flags += [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "benchmarks.load", server.url, f"--api={api}", *flags]
    deadline = time.monotonic() + plan.timeout + EXIT_SECONDS
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as load:
        try:
            rss_bytes = usage(server.pid).rss_bytes
            while load.poll() is None and time.monotonic() < deadline:
                time.sleep(SAMPLE_SECONDS)
                rss_bytes = max(rss_bytes, usage(server.pid).rss_bytes)
        finally:
            load.kill()
        printed = load.stdout.read() if load.stdout else ""
    if load.returncode:
        raise RuntimeError(f"the load against {server.url} ended with status {load.returncode}")
    return Report.from_json(printed), rss_bytes


def combine(rounds: Sequence[Measurement]) -> Measurement:
    """Return the medians over the rounds. Answers and failures are added up.

    For memory, return the maximum: later rounds reuse what the process allocated in the first one.
    """
    ways: dict[str, Callable[[list[float]], float]] = {"answers": sum, "failed": sum, "memory_kb_per_stream": max}
    names = [field.name for field in dataclasses.fields(Measurement)]
    return Measurement(**{name: ways.get(name, statistics.median)([getattr(each, name) for each in rounds]) for name in names})


def per(amount: float, number: float) -> float:
    """Return `amount / number`, or NaN if `number` is 0."""
    return amount / number if number else float("nan")
