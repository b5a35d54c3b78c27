"""Two reports side by side: a simulation against a measurement, or one setting against another."""

from collections.abc import Sequence
from typing import Any

from guidevane_bench.report.build import Report
from guidevane_bench.report.markdown import table

ROWS = tuple((name, quantile) for name in ("ttft", "itl", "queue_wait", "e2e") for quantile in ("p50", "p95", "p99"))


def compare(first: Report, second: Report, names: Sequence[str]) -> str:
    """A table of latencies and rates; `change` is the second against the first."""
    rows: list[tuple[Any, ...]] = []
    for name, quantile in ROWS:
        key = f"{quantile}_ms"
        rows.append(_row(f"{name.replace('_', ' ')} {quantile}, ms", first["all"][name][key], second["all"][name][key]))
    for name in ("output_tokens_per_s", "finished_per_s", "goodput_per_s", "good_percent", "preemptions"):
        rows.append(_row(name.replace("_", " "), first["all"][name], second["all"][name]))
    return table(("", *names, "change, %"), rows) + "\n"


def _row(name: str, first: float | None, second: float | None) -> tuple[Any, ...]:
    change = round(100 * (second / first - 1), 1) if first and second is not None else None
    return name, first, second, change
