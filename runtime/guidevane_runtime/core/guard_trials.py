"""Steps back are trials: one that fails is over at once, and the next one waits longer.

As in a circuit breaker that is half open, with exponential back-off: what a trial costs is paid less and less often
while the load stays. Times come in as arguments.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from guidevane_runtime.core.guard_steps import Step


@dataclass(frozen=True, slots=True)
class _Trial:
    """A step that is taken back, and not known yet to hold."""

    since_s: float
    shares: Mapping[str, float]
    """What the step had left of its limits."""


class StepTrials:
    """Knows of each step when it was taken or taken back, and how long it waits before it is taken back again."""

    def __init__(self, shortest_wait_s: float, longest_wait_s: float) -> None:
        self._shortest_wait_s = shortest_wait_s
        self._longest_wait_s = longest_wait_s
        self._waits_s: dict[Step, float] = {}
        """Of steps that were taken before; the others wait for the shortest time."""
        self._taken_s: dict[Step, float] = {}
        self._trials: dict[Step, _Trial] = {}

    def may_begin(self, step: Step, now_s: float) -> bool:
        """Whether a step that is taken has waited for long enough."""
        return now_s - self._taken_s.get(step, -inf) >= self._wait_s(step)

    def begin(self, step: Step, shares: Mapping[str, float], now_s: float) -> None:
        """The step is taken back."""
        self._trials[step] = _Trial(now_s, shares)

    def is_running(self, step: Step, now_s: float) -> bool:
        """Whether a step is taken back, and not yet for as long as it had waited for it: then it has held."""
        trial = self._trials.get(step)
        return trial is not None and now_s - trial.since_s < self._wait_s(step)

    def end(self, step: Step, now_s: float) -> Mapping[str, float]:
        """The step is taken. What it had left of its limits before a trial that fails with this; else nothing."""
        has_failed = self.is_running(step, now_s)
        trial = self._trials.pop(step, None)
        self._taken_s[step] = now_s
        if trial is None or not has_failed:
            self._waits_s[step] = self._shortest_wait_s
            return {}
        self._waits_s[step] = min(2 * self._wait_s(step), self._longest_wait_s)
        return trial.shares

    def _wait_s(self, step: Step) -> float:
        return self._waits_s.get(step, self._shortest_wait_s)
