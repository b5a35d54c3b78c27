"""`guidevane-bench`, also `python -m guidevane_bench`. Exit status 2 for an option or a file that can't be used."""

import os
import sys
from collections.abc import Sequence

from guidevane_bench.cli import capacity, compare, fit, record, simulate
from guidevane_bench.cli.parser import Parser
from guidevane_bench.errors import BenchError

COMMANDS = {
    "simulate": (simulate, "the real scheduler in virtual time, against a trace or a generator"),
    "capacity": (capacity, "the highest request rate that each of several setups serves inside one SLO"),
    "record": (record, "play a load on the real engine in this process, and note its steps and latencies"),
    "fit": (fit, "a cost model from recorded steps"),
    "compare": (compare, "two reports side by side"),
}

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
"""128 and the number of SIGINT, as a shell says it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit status."""
    try:
        options = _parser().parse_args(arguments)
        print(COMMANDS[options.command][0].run(options), end="", flush=True)
    except BenchError as error:
        print(f"guidevane-bench: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("guidevane-bench: interrupted, nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the report has seen enough. What is left in the buffer must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> Parser:
    parser = Parser(prog="guidevane-bench", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (command, about) in COMMANDS.items():
        command.add_options(subparsers.add_parser(name, help=about, description=about))
    return parser


if __name__ == "__main__":
    sys.exit(main())
