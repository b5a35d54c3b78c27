"""guidevane-bench fit: a cost model from measured steps."""

import argparse
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from guidevane_bench.cli.outputs import ensure_file, write
from guidevane_bench.fit import fit_costs, read_steps
from guidevane_bench.report.markdown import table
from guidevane_bench.simulator.costs import costs_to_bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("steps", type=Path, metavar="STEPS", nargs="+", help="JSON lines of record")
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="the cost model, required")
    about = "where the steps were measured: goes into the file"
    parser.add_argument("--about", metavar="TEXT", default="", help=about)


def run(options: argparse.Namespace) -> str:
    ensure_file("--out", options.out)
    steps = list(chain.from_iterable(read_steps(path) for path in options.steps))
    fit = fit_costs(steps)
    write("--out", options.out, costs_to_bytes(fit.costs, fit=fit.to_json(), about=options.about))
    return (
        table(
            ("", "value"),
            [
                *((f"{name}, us", round(1e6 * value, 4)) for name, value in asdict(fit.costs).items()),
                *fit.to_json().items(),
            ],
        )
        + "\n"
    )
