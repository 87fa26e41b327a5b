"""The scenarios. Each is a function that accepts a `Bench` and returns an `Outcome`.

`@scenario` registers the function under its name. The first line of the function's docstring is printed as the title. The
limits of figures are the project's targets.
"""

import contextlib
import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.background import measure_background, measure_cancel
from benchmarks.collector import Watched, watching
from benchmarks.load import Plan, Report
from benchmarks.processes import Server, machine_cpu_seconds, running, usage

DIRECT = "direct"
RELAY = "relay (httpx)"
AIOHTTP_RELAY = "relay (aiohttp)"
OURS = "responses-mw"
OBSERVED = "responses-mw, observed"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: the API that the load uses, and the server's command. Without a command, the upstream is measured.

    An `observed` subject sends spans and metrics to a collector, which also scrapes its admin port.
    """

    api: str
    command: tuple[str, ...] = ()
    observed: bool = False


SUBJECTS = {
    DIRECT: Subject("chat"),
    RELAY: Subject("chat", ("benchmarks.relay", "--transport=httpx")),
    AIOHTTP_RELAY: Subject("chat", ("benchmarks.relay", "--transport=aiohttp")),
    OURS: Subject("responses", ("responses_mw", "serve")),
    OBSERVED: Subject("responses", ("responses_mw", "serve"), observed=True),
}
COMPARED = (DIRECT, RELAY, AIOHTTP_RELAY, OURS)


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
    """Run `plan` in a separate process against `server`, or against `upstream` if `server` is None.

    Return the figures and the report of the load. Raises `RuntimeError` if the load itself fails. Failed answers are counted.
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
    """Run `plan` against `server`. Return the load's report, and the server's maximum resident memory during the load in bytes.

    Raises `RuntimeError` if the load fails.
    """
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
    """Return the medians over the rounds, except that answers and failures are added up.

    For memory, return the maximum, because later rounds reuse what the process allocated in the first round.
    """
    ways: dict[str, Callable[[list[float]], float]] = {"answers": sum, "failed": sum, "memory_kb_per_stream": max}
    names = [field.name for field in dataclasses.fields(Measurement)]
    return Measurement(**{name: ways.get(name, statistics.median)([getattr(each, name) for each in rounds]) for name in names})


def per(amount: float, number: float) -> float:
    """Return `amount / number`, or NaN if `number` is 0."""
    return amount / number if number else float("nan")


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure derived from measurements. `limit` is its target maximum, if it has one."""

    name: str
    value: float
    unit: str
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a scenario: the measured rows, the relevant columns, and the figures derived from them."""

    rows: dict[str, Measurement]
    columns: Sequence[str]
    figures: Sequence[Figure]


class Bench:
    """Runs plans against subjects in interleaved rounds, so that changes on the machine affect all subjects equally."""

    def __init__(self, *, rounds: int, quick: bool, note: Callable[[str], None]) -> None:
        """`quick` shortens every load; `note` is called with progress messages."""
        self.quick = quick
        self._rounds = rounds
        self._note = note

    def compare(
        self,
        plan: Plan,
        subjects: Sequence[str] = COMPARED,
        *,
        tokens_per_second: float = 0,
        first_byte_delay: float = 0,
        together: bool = False,
    ) -> dict[str, Measurement]:
        """Run `plan` against each subject in turn, with one upstream for all. Return each subject's medians over the rounds.

        `tokens_per_second` is the rate of each stream, where 0 is full speed. `first_byte_delay` is in seconds. `together`
        measures all subjects at the same time.
        """
        pace = (f"--tokens-per-second={tokens_per_second}", f"--first-byte-delay={first_byte_delay}")
        with contextlib.ExitStack() as stack:
            upstream = stack.enter_context(running("benchmarks.upstream", *pace))
            servers = {name: self._start(stack, name, upstream) for name in subjects}
            for name, server in servers.items():
                measure(server, upstream, SUBJECTS[name].api, warm_up(plan))
            rounds: dict[str, list[Measurement]] = {name: [] for name in subjects}
            with ThreadPoolExecutor(len(servers) if together else 1) as threads:
                for number in range(self._rounds):
                    self._note(f"round {number + 1} of {self._rounds}: {', '.join(servers)}")
                    for name, measurement in threads.map(
                        lambda name: self._round(name, servers[name], upstream, plan), servers
                    ):
                        rounds[name].append(measurement)
        return {name: combine(measurements) for name, measurements in rounds.items()}

    def _round(self, name: str, server: Server | None, upstream: Server, plan: Plan) -> tuple[str, Measurement]:
        measurement, report = measure(server, upstream, SUBJECTS[name].api, plan)
        if report.failed:
            self._note(f"failed: {name}: {report.reasons}")
        return name, measurement

    def _start(self, stack: contextlib.ExitStack, name: str, upstream: Server) -> Server | None:
        subject = SUBJECTS[name]
        if not subject.command:
            return None
        watched = stack.enter_context(watching()) if subject.observed else Watched()
        flags = (f"--upstream={upstream.url}", *watched.flags)
        return stack.enter_context(running(*subject.command, *flags, environment=watched.environment))


def warm_up(plan: Plan) -> Plan:
    """Return a short load of the plan's kind, so that one-time imports and allocations are not measured."""
    return Plan(streams=5, tokens=10, repeat=2, stream=plan.stream)


SCENARIOS: dict[str, Callable[[Bench], Outcome]] = {}
SHARES = ("cpu_share", "upstream_cpu_share", "load_cpu_share", "machine_cpu_share")


def scenario(run: Callable[[Bench], Outcome]) -> Callable[[Bench], Outcome]:
    """Register `run` in `SCENARIOS` under its name."""
    SCENARIOS[run.__name__.replace("_", "-")] = run
    return run


@scenario
def steady(bench: Bench) -> Outcome:
    """CPU per streamed token at 50 streams of 40 tokens/s each, which does not saturate the machine."""
    plan = Plan(streams=50, tokens=120 if bench.quick else 400, ramp=1.0)
    rows = bench.compare(plan, tokens_per_second=40)
    columns = ("cpu_us_per_token", "tokens_per_second", *SHARES, "first_token_ms", "lag_ms", "lag_p99_ms", "failed")
    return Outcome(rows, columns, [cpu_ratio(rows, limit=0.5)])


@scenario
def observed(bench: Bench) -> Outcome:
    """CPU per answer with and without spans, metrics and the admin port: two servers at once, each with 50 streams."""
    # Spans and metrics cost CPU per answer, not per token. Because two processes of the same program differ by 3 %, their cost
    # is measured with short answers, and compared with the CPU of long ones.
    steady = Plan(streams=50, tokens=120 if bench.quick else 400, ramp=1.0)
    long = bench.compare(steady, (OURS,), tokens_per_second=40)[OURS]
    # A round takes longer than the default export interval of metrics, which is a minute.
    short = Plan(streams=50, tokens=50, repeat=2 if bench.quick else 50, ramp=1.0, timeout=150)
    rows = bench.compare(short, (OURS, OBSERVED), tokens_per_second=40, together=True)
    added = rows[OBSERVED].cpu_us_per_answer - rows[OURS].cpu_us_per_answer
    figures = [
        Figure("additional CPU per answer", added, "us"),
        Figure(f"additional CPU, share of an answer of {steady.tokens} tokens", added / long.cpu_us_per_answer * 100, "%", 5),
    ]
    columns = ("cpu_us_per_token", "cpu_us_per_answer", "cpu_share", "machine_cpu_share", "lag_ms", "lag_p99_ms", "failed")
    return Outcome(rows, columns, figures)


@scenario
def flat_out(bench: Bench) -> Outcome:
    """CPU per streamed token at 50 streams at full speed, where a slow reader gets many tokens in one read."""
    plan = Plan(streams=50, tokens=400 if bench.quick else 1500, timeout=120)
    rows = bench.compare(plan)
    return Outcome(rows, ("cpu_us_per_token", "tokens_per_second", *SHARES, "failed"), [cpu_ratio(rows, limit=0.4)])


@scenario
def first_token(bench: Bench) -> Outcome:
    """Time to first token, compared with direct, for one stream at a time."""
    plan = Plan(streams=1, tokens=5, repeat=50 if bench.quick else 300)
    rows = bench.compare(plan, tokens_per_second=1000)
    added = rows[OURS].first_token_ms - rows[DIRECT].first_token_ms
    columns = ("first_event_ms", "first_token_ms", "first_token_p99_ms", "answer_ms", "failed")
    return Outcome(rows, columns, [Figure("additional time to first token, compared with direct (median)", added, "ms", 2.0)])


@scenario
def crowd(bench: Bench) -> Outcome:
    """1,000 concurrent streams of 5 tokens/s each: failures, token lag, memory per stream."""
    plan = Plan(streams=1000, tokens=60 if bench.quick else 100, ramp=8.0, timeout=180)
    rows = bench.compare(plan, tokens_per_second=5)
    ours = rows[OURS]
    columns = ("cpu_us_per_token", "tokens_per_second", *SHARES, "memory_kb_per_stream", "first_token_ms")
    figures = [
        Figure("failed streams", ours.failed, "", 0),
        Figure("token lag (99th percentile)", ours.lag_p99_ms, "ms", 50),
        Figure("memory per stream", ours.memory_kb_per_stream, "kB", 60),
        cpu_ratio(rows, limit=0.25),
    ]
    return Outcome(rows, (*columns, "lag_ms", "lag_p99_ms", "failed"), figures)


@scenario
def create(bench: Bench) -> Outcome:
    """CPU per answer without streaming: 4 clients, each with one request of 20 tokens at a time."""
    plan = Plan(streams=4, tokens=20, repeat=100 if bench.quick else 500, stream=False)
    rows = bench.compare(plan)
    ratio = rows[OURS].cpu_us_per_answer / rows[RELAY].cpu_us_per_answer
    figure = Figure("CPU per answer, ratio to the bare relay", ratio, "", 0.7)
    return Outcome(rows, ("cpu_us_per_answer", *SHARES, "answer_ms", "failed"), [figure])


@scenario
def slow_model(bench: Bench) -> Outcome:
    """Time to `response.created` when the upstream waits 2 s before its first byte."""
    plan = Plan(streams=10, tokens=5, repeat=1 if bench.quick else 3, ramp=1.0)
    rows = bench.compare(plan, (DIRECT, OURS), tokens_per_second=40, first_byte_delay=2)
    figure = Figure("time to response.created (median)", rows[OURS].first_event_ms, "ms", 100)
    return Outcome(rows, ("first_event_ms", "first_token_ms", "answer_ms", "failed"), [figure])


@scenario
def background(bench: Bench) -> Outcome:
    """1,000 background streams of 5 tokens/s each, 300 of them followed at another replica: CPU of the worker, lag."""
    plan = Plan(streams=1000, tokens=60 if bench.quick else 150, ramp=8.0, timeout=180)
    rows = bench.compare(plan, (RELAY,), tokens_per_second=5)
    measured = measure_background(streams=plan.streams, followers=300, tokens=plan.tokens)
    ratio = measured.writer_cpu_us_per_token / rows[RELAY].cpu_us_per_token
    # httpx's pool is slow with a thousand streams. The relay with 50 streams is a harder target.
    few = bench.compare(Plan(streams=50, tokens=120, ramp=1.0), (RELAY,), tokens_per_second=40)
    ratio_to_few = measured.writer_cpu_us_per_token / few[RELAY].cpu_us_per_token
    figures = [
        Figure("failed responses", measured.failed, "", 0),
        Figure("CPU per token in the worker", measured.writer_cpu_us_per_token, "us"),
        Figure("CPU per token in the worker, ratio to the bare relay", ratio, "", 0.7),
        Figure("CPU per token in the worker, ratio to the bare relay with 50 streams", ratio_to_few, "", 0.7),
        Figure("CPU per token of a follower in the other replica", measured.reader_cpu_us_per_follower_token, "us"),
        Figure("a follower's lag (median)", measured.lag_ms, "ms"),
        Figure("a follower's lag (99th percentile)", measured.lag_p99_ms, "ms", 150),
        *(Figure(f"CPU while all responses ran: {name}", share, "%") for name, share in measured.shares.items()),
    ]
    return Outcome(rows, ("cpu_us_per_token", "tokens_per_second", *SHARES, "lag_ms", "lag_p99_ms", "failed"), figures)


@scenario
def cancel(bench: Bench) -> Outcome:
    """Time until the upstream's connection is closed when a background response is cancelled at another replica."""
    measured = measure_cancel(responses=10 if bench.quick else 40)
    figures = [
        Figure("failed cancels", measured.failed, "", 0),
        Figure("time to the answer (median)", measured.answer_ms, "ms"),
        Figure("time until the upstream's connection is closed (median)", measured.median_ms, "ms", 300),
        Figure("time until the upstream's connection is closed (maximum)", measured.longest_ms, "ms", 1000),
    ]
    return Outcome({}, (), figures)


def cpu_ratio(rows: dict[str, Measurement], limit: float) -> Figure:
    """Return the CPU per token, relative to the bare httpx relay."""
    ratio = rows[OURS].cpu_us_per_token / rows[RELAY].cpu_us_per_token
    return Figure("CPU per token, ratio to the bare relay", ratio, "", limit)
