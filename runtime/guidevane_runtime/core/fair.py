"""Virtual Token Counter: who is served next when several share one engine.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv:2401.00588, with weights. It counts
what each was served; it doesn't know what is served, nor what is in line.
"""

from collections.abc import Iterator
from heapq import heapify, heappop
from typing import Generic, TypeVar


class Flow:
    """One of those that share: a tenant, or one class of a tenant's work."""

    def __init__(self, weight: int) -> None:
        self.weight = weight
        """Live: service so far keeps the weight that it was served at, so the counter never jumps."""
        self.counter = 0.0
        """Virtual service: price of the tokens served, each over the weight at its time."""
        self.entry_floor = 0.0
        """What the least served of the others had when this flow last got something to serve."""
        self.turn = 0
        """Orders flows with equal counters: who waits longest without a break goes first."""

    def charge(self, price: float) -> None:
        self.counter += price / self.weight

    def refund(self, virtual: float) -> None:
        """Not below the entry floor: what was not used before a break is no credit after it."""
        self.counter = max(self.counter - virtual, self.entry_floor)


FlowT = TypeVar("FlowT", bound=Flow)


class FairTurns(Generic[FlowT]):
    """The flows that have something to serve, the least served first. Costs are linear in these flows."""

    def __init__(self) -> None:
        self._flows: dict[FlowT, None] = {}
        self._last_to_leave: FlowT | None = None
        self._num_entered = 0

    def enter(self, flow: FlowT) -> None:
        """It has something to serve. Time without is no credit: its counter is lifted to the least of the others."""
        if flow in self._flows:
            return
        self._num_entered += 1
        flow.turn = self._num_entered
        flow.entry_floor = self._least()
        flow.counter = max(flow.counter, flow.entry_floor)
        self._flows[flow] = None

    def leave(self, flow: FlowT) -> None:
        """It has nothing to serve, or may not be served now."""
        if flow in self._flows:
            del self._flows[flow]
            self._last_to_leave = flow

    def in_turn(self) -> Iterator[FlowT]:
        """The least served first. Counters may not change meanwhile."""
        if len(self._flows) == 1:
            yield from self._flows
            return
        line = [(flow.counter, flow.turn, flow) for flow in self._flows]
        heapify(line)
        while line:
            yield heappop(line)[2]

    def _least(self) -> float:
        """With nobody there, the last one to leave says how far the service has got."""
        if self._flows:
            return min(flow.counter for flow in self._flows)
        return self._last_to_leave.counter if self._last_to_leave else 0.0
