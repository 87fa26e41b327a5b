"""The benchmark's command line: `python -m benchmarks.run [--quick] [--scenario NAME ...] [--json FILE]`."""

import argparse
import inspect
import math
import os
import platform
import signal
import sys
from importlib import metadata
from pathlib import Path
from types import FrameType

import orjson

from benchmarks.processes import raise_open_files
from benchmarks.scenarios import SCENARIOS, Bench, Figure, Outcome

# The headings of the columns, each with two lines.
HEADS = {
    "cpu_us_per_token": ("CPU/token", "us"),
    "cpu_us_per_answer": ("CPU/answer", "us"),
    "cpu_share": ("CPU", "%"),
    "upstream_cpu_share": ("upstream", "CPU %"),
    "load_cpu_share": ("load", "CPU %"),
    "machine_cpu_share": ("machine", "CPU %"),
    "tokens_per_second": ("tokens", "/s"),
    "first_event_ms": ("1st event", "ms"),
    "first_token_ms": ("1st token", "ms"),
    "first_token_p99_ms": ("p99", "ms"),
    "answer_ms": ("answer", "ms"),
    "lag_ms": ("lag", "ms"),
    "lag_p99_ms": ("lag p99", "ms"),
    "memory_kb_per_stream": ("memory", "kB/stream"),
    "failed": ("failed", ""),
}
WHOLE = {"failed", "tokens_per_second"}
PACKAGES = ("responses-mw", "starlette", "uvicorn", "uvloop", "httptools", "httpx", "httpx-aiohttp", "aiohttp", "orjson")


def table(outcome: Outcome) -> str:
    """Format the rows of the outcome as a table."""
    lines = [("", *(HEADS[name][line] for name in outcome.columns)) for line in (0, 1)]
    for subject, measurement in outcome.rows.items():
        lines.append((subject, *(cell(name, getattr(measurement, name)) for name in outcome.columns)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def cell(name: str, value: float) -> str:
    """Format a value of the column `name`."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if name in WHOLE else f"{value:.1f}"


def sentence(figure: Figure) -> str:
    """Return a line of text with a figure, its limit, and whether the figure meets the limit."""
    text = f"{figure.name}: {figure.value:.2f} {figure.unit}".rstrip()
    if figure.limit is None:
        return text
    return f"{text} (at most {figure.limit:g}: {'met' if figure.value <= figure.limit else 'MISSED'})"


def machine() -> dict[str, str | int | None]:
    """Return the system, the number of cores, and the versions of Python and of the packages."""
    versions: dict[str, str | int | None] = {name: metadata.version(name) for name in PACKAGES}
    return {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()} | versions


def run(name: str, bench: Bench) -> Outcome:
    """Run the named scenario, and print its table and figures."""
    about = (inspect.getdoc(SCENARIOS[name]) or "").partition("\n")[0]
    print(f"\n{name}: {about}", flush=True)
    outcome = SCENARIOS[name](bench)
    print(*([table(outcome)] if outcome.rows else []), *map(sentence, outcome.figures), sep="\n", flush=True)
    return outcome


def leave(signum: int, frame: FrameType | None) -> None:
    """Raise SystemExit, so that all processes that were started are ended."""
    sys.exit(128 + signum)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Compare responses_mw with a bare relay.")
    parser.add_argument("--quick", action="store_true", help="one short round of each scenario, as a smoke test")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each subject (default 3)")
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="may be repeated; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, leave)
    raise_open_files()
    bench = Bench(
        rounds=1 if options.quick else options.rounds,
        quick=options.quick,
        note=lambda text: print(f"  {text}", file=sys.stderr, flush=True),
    )
    outcomes: dict[str, Outcome] = {}
    for name in options.scenario or list(SCENARIOS):
        outcomes[name] = run(name, bench)
        if options.json:  # after each scenario, so that no figures are lost if a later one fails
            document = {"machine": machine(), "scenarios": outcomes}
            options.json.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
