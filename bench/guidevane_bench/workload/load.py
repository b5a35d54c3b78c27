"""From options to the requests of one run."""

import random
from dataclasses import dataclass, field
from pathlib import Path

from guidevane_bench.errors import SpecError
from guidevane_bench.workload.arrivals import arrival_times
from guidevane_bench.workload.lengths import Lengths, lengths_of, parse_lengths
from guidevane_bench.workload.request import LoadRequest
from guidevane_bench.workload.traces import TraceCut, read_trace


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

    def requests(self) -> list[LoadRequest]:
        """In order of arrival. The same spec gives the same requests."""
        if not self.arrivals:
            if self.trace is None:
                raise SpecError("there is no load; give --trace FILE, or --arrivals KIND with --lengths KIND")
            return read_trace(self.trace, self.cut)
        # Streams of their own: another length does not move an arrival.
        times = arrival_times(self.arrivals, self.duration_s, random.Random(f"{self.seed}/arrivals"))  # noqa: S311
        rng, lengths = random.Random(f"{self.seed}/lengths"), self._lengths()  # noqa: S311
        return [lengths.request(number, arrival_s, rng) for number, arrival_s in enumerate(times)]

    def _lengths(self) -> Lengths:
        if (self.trace is None) == (not self.lengths):
            raise SpecError("--arrivals needs lengths from one place; give --trace FILE or --lengths KIND")
        return lengths_of(read_trace(self.trace, self.cut)) if self.trace else parse_lengths(self.lengths)
