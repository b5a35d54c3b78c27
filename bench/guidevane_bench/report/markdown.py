"""A report for people to read."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from guidevane_bench.report.build import Report

LATENCIES = ("ttft", "itl", "tpot", "queue_wait", "e2e")
LATENCY_HEAD = ("TTFT p50", "TTFT p95", "ITL p95", "queue wait p95")
MAX_TENANTS = 50
"""Rows of the tenant table; the JSON has them all."""
MAX_MOVES = 40
"""Rows of the table of the guard's moves; the JSON has them all."""


def to_markdown(report: Report) -> str:
    """Summary, latencies, ends, then one line per class and per tenant, where there are several."""
    figures = report["all"]
    parts = [
        f"# {report.get('title', 'Run')}",
        _summary(report),
        "## Latency, ms\n\n" + table(("", "samples", "mean", "p50", "p95", "p99", "max"), _latency_rows(figures)),
        "## How requests ended\n\n" + table(("end", "requests"), figures["ends"].items()),
    ]
    if "guard" in report:
        parts.append("## Guard\n\n" + _guard(report["guard"]))
    if len(report["classes"]) > 1:
        parts.append("## Classes\n\n" + _groups("class", report["classes"]))
    if len(report["tenants"]) > 1:
        parts.append("## Tenants\n\n" + _groups("tenant", report["tenants"]))
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_text(cell) for cell in line) + " |" for line in lines)


def _summary(report: Report) -> str:
    figures, slo = report["all"], report["slo"]
    rows = [
        ("requests", figures["num_requests"]),
        ("duration, s", report["duration_s"]),
        ("output tokens per s", figures["output_tokens_per_s"]),
        ("finished per s", figures["finished_per_s"]),
        (f"good per s (TTFT <= {slo['ttft_ms']:g} ms, TPOT <= {slo['tpot_ms']:g} ms)", figures["goodput_per_s"]),
        ("good, %", figures["good_percent"]),
        ("preemptions", figures["preemptions"]),
        *((name.replace("_", " "), value) for name, value in report.get("engine", {}).items()),
        *((name.replace("_", " "), value) for name, value in report["fairness"].items()),
    ]
    return table(("", ""), rows)


def _latency_rows(figures: Mapping[str, Any]) -> list[list[Any]]:
    return [[name.replace("_", " "), *figures[name].values()] for name in LATENCIES]


def _guard(guard: Mapping[str, Any]) -> str:
    """Time per level, then the first moves, each with its reason."""
    shares = [(f"time at level {level}, %", share) for level, share in guard["share_of_time_percent"].items()]
    summary = [*shares, ("moves", len(guard["moves"])), ("longest recovery, s", guard["recovery_s"])]
    if guard["dry_run"]:
        summary.append(("dry run", "nothing was changed"))
    moves = [(move["time_s"], move["pod"], move["level"], move["reason"]) for move in guard["moves"][:MAX_MOVES]]
    return table(("", ""), summary) + "\n\n" + table(("time, s", "pod", "level", "move"), moves)


def _groups(kind: str, groups: Mapping[str, Any]) -> str:
    """One line each, the largest first. Latencies in ms."""
    largest = sorted(groups.items(), key=lambda item: -item[1]["num_requests"])[:MAX_TENANTS]
    head = (kind, "requests", "finished per s", "output tokens per s", "good, %", *LATENCY_HEAD)
    rows = [
        (
            name,
            of["num_requests"],
            of["finished_per_s"],
            of["output_tokens_per_s"],
            of["good_percent"],
            of["ttft"]["p50_ms"],
            of["ttft"]["p95_ms"],
            of["itl"]["p95_ms"],
            of["queue_wait"]["p95_ms"],
        )
        for name, of in largest
    ]
    return table(head, rows)


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    return f"{cell:g}" if isinstance(cell, float) and abs(cell) < 1e5 else str(cell)
