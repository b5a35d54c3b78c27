"""guidevane-bench compare: two reports side by side."""

import argparse
import json
from pathlib import Path

from guidevane_bench.errors import InputError, sentence_of
from guidevane_bench.report.build import Report
from guidevane_bench.report.compare import compare


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, help="JSON report")
    parser.add_argument("second", type=Path, help="JSON report; changes are its own against the first")


def run(options: argparse.Namespace) -> str:
    first, second = _read(options.first), _read(options.second)
    return compare(first, second, names=[f"{report['title']} ({report['kind']})" for report in (first, second)])


def _read(path: Path) -> Report:
    try:
        report: Report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"report {path} can't be read: {sentence_of(error)}; make one with --json") from error
    try:
        compare(report, report, names=[report["title"], report["kind"]])
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} is no report of this version of guidevane-bench; make one with --json") from error
    return report
