"""From options to the requests of one run."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from guidevane_bench.errors import SpecError
from guidevane_bench.workload.arrivals import arrival_times
from guidevane_bench.workload.lengths import DrawRequest, lengths_of, parse_lengths
from guidevane_bench.workload.request import LoadRequest
from guidevane_bench.workload.traces import MAX_SPAN_S, TraceCut, read_trace
from guidevane_runtime.core.tenants import RequestClass

MAX_REQUESTS = 5_000_000
"""Of a generator: 2 GB of them, hours of simulation."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """A trace as recorded; or a generator's arrivals with the lengths of a trace, or with lengths that are drawn."""

    trace: Path | None = None
    cut: TraceCut = field(default_factory=TraceCut)
    arrivals: str = ""
    lengths: str = ""
    duration_s: float = 60.0
    """Of a generator."""
    seed: int = 0
    offline_share: float = 0.0
    """Of the requests, drawn: they are of the offline class."""
    offline_tenants: tuple[str, ...] = ()
    """All their requests are of the offline class."""

    def requests(self) -> list[LoadRequest]:
        """In order of arrival. The same spec gives the same requests."""
        self._ensure_consistent()
        if self.arrivals:
            return self._with_classes(self._generated(self._lengths()))
        if self.trace is None:
            raise SpecError("there is no load; give --trace FILE, or --arrivals KIND with --lengths KIND")
        return self._with_classes(read_trace(self.trace, self.cut))

    def _ensure_consistent(self) -> None:
        """What would be ignored is refused."""
        if self.lengths and not self.arrivals:
            raise SpecError("--lengths says nothing of when requests come; give --arrivals KIND too, or --trace FILE")
        if self.trace is None and self.cut != TraceCut():
            raise SpecError(
                "there is no trace to cut; give --trace FILE, or leave out --limit, --time-scale, --length-scale, "
                "--max-prompt and --max-output"
            )
        if self.arrivals and self.cut.time_scale != 1.0:
            raise SpecError(
                "--arrivals says when requests come; leave out --time-scale, which is about the trace's times"
            )
        if self.duration_s > MAX_SPAN_S:
            raise SpecError(f"--duration is {self.duration_s} s; give {MAX_SPAN_S} at most, which is a year")

    def _lengths(self) -> DrawRequest:
        if (self.trace is None) == (not self.lengths):
            raise SpecError("--arrivals needs lengths from one place; give --trace FILE or --lengths KIND")
        return lengths_of(read_trace(self.trace, self.cut)) if self.trace else parse_lengths(self.lengths)

    def _generated(self, draw: DrawRequest) -> list[LoadRequest]:
        # Streams of their own: another length does not move an arrival.
        times = arrival_times(self.arrivals, self.duration_s, self._stream("arrivals"))
        rng = self._stream("lengths")
        requests = [
            replace(draw(rng), number=number, arrival_s=arrival_s)
            for number, arrival_s in enumerate(islice(times, MAX_REQUESTS + 1))
        ]
        if not 0 < len(requests) <= MAX_REQUESTS:
            raise SpecError(
                f"--arrivals {self.arrivals} gives {'no request' if not requests else f'over {MAX_REQUESTS} requests'} "
                f"in {self.duration_s:g} s; change the rate or --duration"
            )
        return requests

    def _with_classes(self, requests: list[LoadRequest]) -> list[LoadRequest]:
        if not self.offline_share and not self.offline_tenants:
            return requests
        if any(request.request_class is RequestClass.OFFLINE for request in requests):
            raise SpecError("the trace says itself which requests are offline; leave out --offline-share/-tenants")
        tenants = {request.tenant for request in requests}
        if strangers := sorted(set(self.offline_tenants) - tenants):
            raise SpecError(f"--offline-tenants has {strangers[0]!r}, of whom no request is; take of {_some(tenants)}")
        # A stream of its own, one number a request: a larger share only adds to a smaller one.
        rng = self._stream("classes")
        return [
            replace(request, request_class=RequestClass.OFFLINE)
            if rng.random() < self.offline_share or request.tenant in self.offline_tenants
            else request
            for request in requests
        ]

    def _stream(self, what: str) -> random.Random:
        return random.Random(f"{self.seed}/{what}")  # noqa: S311


def _some(names: Iterable[str]) -> str:
    """The first few."""
    ordered = sorted(map(repr, names))
    return ", ".join(ordered[:10]) + (", ..." if len(ordered) > 10 else "")
