"""From a ledger to a report: plain JSON values, rounded, in a fixed order. The same run gives the same bytes."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from guidevane_bench.report.latency import LatencyHistogram
from guidevane_bench.simulator.ledger import End, Entry, Group, Ledger
from guidevane_bench.simulator.series import Series

Report = dict[str, Any]

MAX_POINTS = 720
"""Points of the series in a report: an hour at 5 s."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What a client is promised. A request is good when it finished and both held."""

    ttft_ms: float = 1500.0
    tpot_ms: float = 120.0
    """Mean gap between the tokens of one request."""

    def holds_for(self, entry: Entry) -> bool:
        """What was refused, timed out or lost is never good: dropping must not look like serving (arXiv 2410.14257)."""
        ttft_s, tpot_s = entry.ttft_s, entry.tpot_s
        if entry.end is not End.FINISHED or ttft_s is None or tpot_s is None:
            return False
        return ttft_s * 1000 <= self.ttft_ms and tpot_s * 1000 <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class Part:
    """Requests that a report speaks of together."""

    entries: list[Entry] = field(default_factory=list)
    itl: LatencyHistogram = field(default_factory=LatencyHistogram)


def build_report(ledger: Ledger, slo: Slo, duration_s: float, **about: Any) -> Report:
    """The figures of a run; `about` says what was run and goes in as it is."""
    everything = _parts(ledger, lambda _: "").get("", Part())
    classes = _parts(ledger, lambda group: group.request_class)
    tenants = _parts(ledger, lambda group: group.tenant)
    return {
        **about,
        "slo": asdict(slo),
        "duration_s": round(duration_s, 6),
        "all": _figures(everything, slo, duration_s),
        "fairness": _fairness(tenants),
        "classes": {name: _figures(part, slo, duration_s) for name, part in sorted(classes.items())},
        "tenants": {name or "(none)": _figures(part, slo, duration_s) for name, part in sorted(tenants.items())},
    }


def series_json(series: Series) -> list[dict[str, float | int]]:
    """The series, thinned evenly to MAX_POINTS."""
    stride = -(-len(series.points) // MAX_POINTS) or 1
    return [
        {
            "time_s": round(point.time_s, 3),
            "pods": point.num_pods,
            "running": point.num_running,
            "waiting": point.num_waiting,
            "kv_use_percent": round(100 * point.num_blocks_used / point.num_blocks, 2) if point.num_blocks else 0.0,
        }
        for point in series.points[::stride]
    ]


def to_bytes(report: Report) -> bytes:
    """The file; NaN has no place in it."""
    return (json.dumps(report, indent=1, allow_nan=False) + "\n").encode()


def _parts(ledger: Ledger, name_of: Callable[[Group], str]) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    for entry in ledger.entries:
        parts.setdefault(name_of(entry.group), Part()).entries.append(entry)
    for group, itl in ledger.itl_by_group.items():
        parts.setdefault(name_of(group), Part()).itl.merge(itl)
    return parts


def _figures(part: Part, slo: Slo, duration_s: float) -> Report:
    entries, itl = part.entries, part.itl
    good = [entry for entry in entries if slo.holds_for(entry)]
    num_output_tokens = sum(entry.num_tokens for entry in entries)
    return {
        "num_requests": len(entries),
        "ends": _ends(entries),
        "preemptions": sum(entry.num_preemptions for entry in entries),
        "prompt_tokens": sum(entry.request.num_prompt_tokens for entry in entries if entry.num_tokens),
        "output_tokens": num_output_tokens,
        "output_tokens_per_s": _rate(num_output_tokens, duration_s),
        "finished_per_s": _rate(sum(entry.end is End.FINISHED for entry in entries), duration_s),
        "goodput_per_s": _rate(len(good), duration_s),
        "good_percent": round(100 * len(good) / len(entries), 3) if entries else 0.0,
        "ttft": _histogram(entry.ttft_s for entry in entries).summary(),
        "itl": itl.summary(),
        "tpot": _histogram(entry.tpot_s for entry in entries).summary(),
        "queue_wait": _histogram(entry.queue_wait_s for entry in entries).summary(),
        "e2e": _histogram(entry.e2e_s for entry in entries if entry.end is End.FINISHED).summary(),
        "ttft_curve": _histogram(entry.ttft_s for entry in entries).curve(),
        "itl_curve": itl.curve(),
    }


def _ends(entries: Iterable[Entry]) -> Mapping[str, int]:
    """`rejected/concurrency` and the like: an end, and its reason where it has one."""
    counts = Counter(f"{entry.end}/{_label(entry)}".rstrip("/") for entry in entries)
    return dict(sorted(counts.items()))


def _label(entry: Entry) -> str:
    # Reasons are labels; what the scheduler says about a prompt that can never run is a sentence for people.
    return entry.reason if " " not in entry.reason else "never_runs"


def _rate(count: int, duration_s: float) -> float:
    return round(count / duration_s, 4) if duration_s > 0 else 0.0


def _histogram(seconds: Iterable[float | None]) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for value in seconds:
        if value is not None:
            histogram.add(value)
    return histogram


def _fairness(tenants: Mapping[str, Part]) -> Report:
    """Jain's index over the share of asked-for tokens that each tenant got: 1 is even, 1/n is one tenant only."""
    shares, waits = [], {}
    for tenant, part in tenants.items():
        entries = part.entries
        asked = sum(entry.request.num_output_tokens for entry in entries)
        shares.append(sum(entry.num_tokens for entry in entries) / asked)
        waits[tenant] = max((entry.queue_wait_s or 0.0 for entry in entries), default=0.0)
    squares = sum(share * share for share in shares)
    worst = max(sorted(waits), key=lambda tenant: waits[tenant], default="")
    return {
        "jain_index": round(sum(shares) ** 2 / (len(shares) * squares), 6) if squares else None,
        "longest_queue_wait_ms": round(1000 * waits.get(worst, 0.0), 3),
        "longest_queue_wait_tenant": worst or "(none)",
    }
