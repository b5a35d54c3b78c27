"""guidevane-bench capacity: how much each of several setups serves inside one SLO, side by side."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from guidevane_bench.capacity import MAX_RATE, MIN_RATE, Figures, Setup, Trial, capacity, parse_setup
from guidevane_bench.cli.options import add_load, add_pod, limits_of_options, load_of_options, slo_option
from guidevane_bench.cli.parser import count, positive
from guidevane_bench.errors import SpecError
from guidevane_bench.report.markdown import table
from guidevane_bench.simulator.costs import read_costs
from guidevane_runtime.core.guard_steps import Line

LINES = {Line.TTFT: 1500.0, Line.ITL: 50.0}
"""The SLO by default, in ms."""
SETUPS = (
    "static-256,static-64,static-32,static-16,static-256+memory-aware,static-256+sla-aware,static-256+combined,"
    "peak-kv-256,guidevane,guidevane+guard"
)
HEAD = (
    "setup",
    "all at once: tokens/s",
    "change, %",
    "preemptions",
    "capacity, requests/s",
    "change, %",
    "tokens/s",
    "TTFT p95, ms",
    "ITL p95, ms",
    "preemptions",
)


class Row(NamedTuple):
    """One setup."""

    name: str
    saturated: Figures
    at_capacity: Figures


def add_options(parser: argparse.ArgumentParser) -> None:
    add_load(parser)
    add_pod(parser)
    group = parser.add_argument_group("comparison")
    group.add_argument("--costs", type=Path, metavar="FILE", required=True, help="cost model, required: a file of fit")
    group.add_argument(
        "--setups",
        metavar="NAME,...",
        default=SETUPS,
        help="static-N, peak-kv-N or guidevane, alone or with +guard, +memory-aware, +sla-aware or +combined; "
        "changes are against the first (default: %(default)s)",
    )
    at_once, start = "that come all at once (default: %(default)s)", "where the search begins (default: %(default)s)"
    group.add_argument("--requests", type=count, metavar="N", default=500, help=at_once)
    group.add_argument("--start-rate", type=positive, metavar="RATE", default=4.0, help=start)
    for line, bound in LINES.items():
        add, what = group.add_argument, "what has to hold (default: %(default)s)"
        add(slo_option(line), dest=line.name, type=positive, metavar="MS", default=bound, help=what)


def run(options: argparse.Namespace) -> str:
    """A row for each setup, when it is done also to stderr: a comparison takes minutes."""
    if options.arrivals:
        raise SpecError(f"--arrivals {options.arrivals}: capacity finds the rate itself, leave it out")
    if not MIN_RATE < options.start_rate < MAX_RATE:
        raise SpecError(
            f"--start-rate is {options.start_rate:g}; a capacity is looked for from {MIN_RATE:g} to {MAX_RATE:g}"
        )
    lines = {line: getattr(options, line.name) for line in LINES}
    limits = limits_of_options(options)
    setups = [parse_setup(name, limits, options.num_blocks, lines) for name in options.setups.split(",")]
    trial = Trial(load_of_options(options), read_costs(options.costs), lines)
    rows: list[Row] = []
    for setup in setups:
        start = rows[-1].at_capacity.rate if rows else options.start_rate
        rows.append(_row(trial, setup, options.requests, start))
    return table(HEAD, [_cells(row, rows[0]) for row in rows]) + "\n"


def _row(trial: Trial, setup: Setup, num_requests: int, start: float) -> Row:
    rate = capacity(lambda rate: trial.at_rate(setup, rate).holds(trial.lines), start)
    row = Row(setup.name, trial.saturated(setup, num_requests), trial.at_rate(setup, rate))
    sys.stderr.write(f"{setup.name}: {rate:.3f} requests/s\n")
    return row


def _cells(row: Row, first: Row) -> Sequence[Any]:
    saturated, at_capacity = row.saturated, row.at_capacity
    return (
        row.name,
        round(saturated.output_tokens_per_s),
        _change(saturated.output_tokens_per_s, first.saturated.output_tokens_per_s),
        saturated.num_preemptions,
        round(at_capacity.rate, 2),
        _change(at_capacity.rate, first.at_capacity.rate),
        round(at_capacity.output_tokens_per_s),
        _rounded(at_capacity.ttft_p95_ms),
        _rounded(at_capacity.itl_p95_ms),
        at_capacity.num_preemptions,
    )


def _change(value: float, first: float) -> float | None:
    # + 0.0: no minus sign at nothing.
    return round(100 * (value / first - 1), 1) + 0.0 if first else None


def _rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, 1)
