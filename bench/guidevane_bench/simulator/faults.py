"""What goes wrong, and when: drawn from a seed before the run begins, so a run can be told again."""

import random
from dataclasses import asdict, dataclass
from enum import StrEnum

from guidevane_bench.errors import SpecError


class FaultKind(StrEnum):
    """What a fault does to its pod."""

    POD_DEATH = "pod_death"
    """Its requests are lost; it comes back empty after the duration."""
    SLOW_POD = "slow_pod"
    """Its steps take `factor` times as long for the duration."""
    METRICS_GAP = "metrics_gap"
    """A controller sees nothing of it for the duration."""


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """How long one kind of fault lasts, and how bad it is."""

    duration_s: float
    factor: float = 1.0


MAX_FAULTS = 100_000
"""Of one kind: more are a typing error."""
SPECS = {
    # A container restart with the weights in the page cache; a large model takes longer.
    FaultKind.POD_DEATH: FaultSpec(30.0),
    # What a noisy neighbour or thermal throttling does.
    FaultKind.SLOW_POD: FaultSpec(60.0, factor=3.0),
    # Longer than the operator's own tolerance for a scrape that failed.
    FaultKind.METRICS_GAP: FaultSpec(120.0),
}


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One thing that goes wrong with one pod."""

    at_s: float
    pod: int
    kind: FaultKind
    duration_s: float
    factor: float = 1.0

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "kind": str(self.kind), "at_s": round(self.at_s, 6)}


def parse_fault_counts(text: str) -> dict[FaultKind, int]:
    """`pod_death=2,slow_pod=1`: how many of each over the run."""
    counts = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if name not in list(FaultKind) or not number.isdecimal():
            raise SpecError(f"--faults has {part!r}; write KIND=COUNT with one of {', '.join(FaultKind)}")
        if FaultKind(name) in counts or int(number) > MAX_FAULTS:
            raise SpecError(f"--faults has {part!r}; give each kind once, and {MAX_FAULTS} of it at most")
        counts[FaultKind(name)] = int(number)
    return counts


def draw_faults(counts: dict[FaultKind, int], num_pods: int, duration_s: float, seed: int) -> tuple[Fault, ...]:
    """In order of time; each kind from a stream of its own, so that more of one kind do not move another."""
    faults = []
    for kind, count in counts.items():
        rng = random.Random(f"{seed}/faults/{kind}")  # noqa: S311
        spec = SPECS[kind]
        for _ in range(count):
            at_s, pod = rng.uniform(0, duration_s), rng.randrange(num_pods)
            faults.append(Fault(at_s, pod, kind, spec.duration_s, spec.factor))
    return tuple(sorted(faults))
