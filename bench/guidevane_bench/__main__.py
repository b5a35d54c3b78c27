"""`guidevane-bench`, also `python -m guidevane_bench`. Exit status 2 for an option or a file that can't be used."""

import argparse
import sys
from collections.abc import Sequence

from guidevane_bench.cli import capacity, compare, fit, record, simulate
from guidevane_bench.errors import BenchError

COMMANDS = {
    "simulate": (simulate, "the real scheduler in virtual time, against a trace or a generator"),
    "capacity": (capacity, "the highest request rate that each of several setups serves inside one SLO"),
    "record": (record, "play a load on the real engine in this process, and note its steps and latencies"),
    "fit": (fit, "a cost model from recorded steps"),
    "compare": (compare, "two reports side by side"),
}

EXIT_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="guidevane-bench", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, (command, about) in COMMANDS.items():
        command.add_options(subparsers.add_parser(name, help=about, description=about))
    options = parser.parse_args(arguments)
    try:
        print(COMMANDS[options.command][0].run(options), end="")
    except BenchError as error:
        print(f"guidevane-bench: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
