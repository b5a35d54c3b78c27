"""What a service's looks at its SLO add up to: whether it counts as missed now, and in how many looks it was met."""

from collections import deque
from dataclasses import dataclass, field

LOOKS = 2
"""Looks in a row that must agree before the SLO counts as missed, or as met again."""
WINDOW_S = 3600.0
"""Time over which attainment counts, seconds: the default of spec.slo.objectiveWindow."""
SLICE_S = 60.0
"""Looks are added up over slices of this many seconds."""


@dataclass
class SLOHistory:
    """Takes one verdict per look. In memory only: after a restart it counts from there."""

    missed: bool = False
    """Damped: one bad look is no breach, one good look no recovery."""
    _streak: int = 0
    _slices: deque[list[float]] = field(default_factory=deque)
    """Start, number of looks, number of good ones; oldest first."""

    def look(self, good: bool | None, now_s: float) -> None:
        """Take in whether every known latency is inside its line; None: there was nothing to judge."""
        while self._slices and self._slices[0][0] <= now_s - WINDOW_S:
            self._slices.popleft()
        if good is None:
            self._streak = 0
            return
        self._streak = self._streak + 1 if good is self.missed else 0
        if self._streak >= LOOKS:
            self.missed, self._streak = not good, 0
        if not self._slices or now_s - self._slices[-1][0] >= SLICE_S:
            self._slices.append([now_s, 0, 0])
        self._slices[-1][1] += 1
        self._slices[-1][2] += good

    @property
    def attainment_percent(self) -> int | None:
        """Share of good looks in the window; None without any. Rounded down: 100 means that none was bad."""
        looks = sum(num_looks for _, num_looks, _ in self._slices)
        return int(100 * sum(num_good for *_, num_good in self._slices) / looks) if looks else None
