"""What the guards of a fleet did: every move with its reason, time per level, and how fast they recovered."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from guidevane_runtime.core.guard import GuardConfig, GuardDecision


@dataclass(frozen=True, slots=True)
class GuardMove:
    """One step of one pod, taken or taken back."""

    time_s: float
    pod: int
    level: int
    """After it."""
    reason: str


class GuardLog:
    """Hears every tick of every pod."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self.moves: list[GuardMove] = []
        self.highest: list[tuple[float, int]] = [(0.0, 0)]
        """(time, highest level of any pod) whenever it changes."""
        self._levels: dict[int, int] = {}
        self._last_breach_s: dict[int, float] = {}
        self._num_ticks: Counter[int] = Counter()
        self._longest_recovery_s = 0.0

    def note(self, pod: int, now_s: float, decision: GuardDecision) -> None:
        self._num_ticks[decision.level] += 1
        if decision.line is not None:
            self._last_breach_s[pod] = now_s
        if decision.reason:
            self.moves.append(GuardMove(now_s, pod, decision.level, decision.reason))
        if self._levels.get(pod, 0) and not decision.level:
            recovery_s = now_s - self._last_breach_s.get(pod, now_s)
            self._longest_recovery_s = max(self._longest_recovery_s, recovery_s)
        self._set_level(pod, now_s, decision.level)

    def forget(self, pod: int, now_s: float) -> None:
        """The pod died, and its guard with it."""
        self._last_breach_s.pop(pod, None)
        self._set_level(pod, now_s, 0)

    @property
    def level(self) -> int:
        """The highest of any pod now."""
        return self.highest[-1][1]

    @property
    def recovery_s(self) -> float | None:
        """From the last second in which a line was over to level 0, the longest of all pods; None: one is not back."""
        return None if self.level else self._longest_recovery_s

    def share_of_time_percent(self) -> dict[int, float]:
        """Time of all pods by level."""
        total = self._num_ticks.total()
        return {level: round(100 * count / total, 3) for level, count in sorted(self._num_ticks.items())}

    def to_json(self) -> dict[str, Any]:
        return {
            "dry_run": self._config.dry_run,
            "lines": {str(line): bound for line, bound in self._config.lines.items()},
            "share_of_time_percent": {str(level): share for level, share in self.share_of_time_percent().items()},
            "recovery_s": self.recovery_s,
            "highest_level": self.highest,
            "moves": [asdict(move) for move in self.moves],
        }

    def _set_level(self, pod: int, now_s: float, level: int) -> None:
        self._levels[pod] = level
        highest = max(self._levels.values())
        if highest != self.level:
            self.highest.append((now_s, highest))
