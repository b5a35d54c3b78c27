"""What the door itself costs, on one core and without HTTP: `python -m guidevane_bench.door_cost`.

CPU time of the thread, so other processes don't count. Not part of the door: here there is a clock.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import thread_time

from guidevane_api.limits import MAX_TOKENS, SchedulerLimits
from guidevane_runtime.core.door import AdmissionGate, Capacity, Refused, Reported
from guidevane_runtime.core.leases import Lease, Standing
from guidevane_runtime.core.tenants import TenantPolicy, TenantTerms

MAX_REQUESTS = 65_536
NUM_PROMPT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    num_waiting: tuple[int, ...] = (0, 256, 10_000)
    num_tenants: tuple[int, ...] = (1, 64)
    num_admitted: int = 10_000
    num_rounds: int = 5


class DoorRig:
    """A door with so many tenants, all with caps, and so many requests waiting behind it."""

    def __init__(self, num_tenants: int, num_waiting: int) -> None:
        self.names = [f"tenant-{number}" for number in range(num_tenants)]
        self.limits = SchedulerLimits(max_queued_requests=MAX_REQUESTS, max_queued_tokens=MAX_TOKENS)
        policy = TenantPolicy(tuple(TenantTerms(name, 1, MAX_REQUESTS, MAX_TOKENS) for name in self.names))
        self.gate = AdmissionGate(limits=lambda: self.limits, clock=lambda: 0.0, policy=lambda: policy)
        self.gate.engine_ready(Capacity(MAX_TOKENS, 16), load_s=0.0)
        for _ in range(100):
            self.gate.observe(Reported(256, 1, 1000, 0.1))
        # The pace is known afterwards, so deadlines are looked at.
        self.serve(100)
        self.admit(num_waiting)

    def admit(self, count: int, deadline_s: float | None = None) -> list[Lease]:
        """Up the whole ladder, one tenant after the other."""
        names = self.names
        return [
            self.gate.admit(Standing(0.0, names[i % len(names)], deadline_s=deadline_s), NUM_PROMPT_TOKENS, 16)
            for i in range(count)
        ]

    def serve(self, count: int, deadline_s: float | None = None) -> None:
        """From the door over the first token to the end."""
        for lease in self.admit(count, deadline_s):
            lease.start()
            lease.release()

    def refuse(self, count: int) -> None:
        """With the queue full."""
        self.limits = self.limits.model_copy(update={"max_queued_requests": 1})
        self.gate.observe(Reported(0, 1))
        for _ in range(count):
            with suppress(Refused):
                self.admit(1)


def per_second(rounds: int, count: int, make: Callable[[], Callable[[], object]]) -> float:
    """Best of several rounds, each on a rig of its own."""

    def seconds() -> float:
        work = make()
        start_s = thread_time()
        work()
        return thread_time() - start_s

    return count / min(seconds() for _ in range(rounds))


def rows(sizes: Sizes) -> Iterator[str]:
    yield "| tenants | waiting | admitted and ended /s | with a deadline /s | refused /s |"
    yield "|---|---|---|---|---|"
    for num_tenants in sizes.num_tenants:
        for num_waiting in sizes.num_waiting:
            yield f"| {num_tenants} | {num_waiting} | " + " | ".join(_rates(sizes, num_tenants, num_waiting)) + " |"


def _rates(sizes: Sizes, num_tenants: int, num_waiting: int) -> Iterator[str]:
    def measured(work: Callable[[DoorRig, int], object], count: int) -> str:
        def make() -> Callable[[], object]:
            rig = DoorRig(num_tenants, max(num_waiting, 1))
            return lambda: work(rig, count)

        return f"{per_second(sizes.num_rounds, count, make):,.0f}"

    yield measured(lambda rig, count: rig.serve(count), sizes.num_admitted)
    # Fewer: each looks at all that its tenant has waiting.
    yield measured(lambda rig, count: rig.serve(count, deadline_s=1e9), sizes.num_admitted // 100)
    yield measured(lambda rig, count: rig.refuse(count), sizes.num_admitted)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: requests per second of one core, best of several rounds."""
    argparse.ArgumentParser(prog="python -m guidevane_bench.door_cost", description=main.__doc__).parse_args(arguments)
    for line in rows(Sizes()):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
