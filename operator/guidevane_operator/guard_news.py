"""When a service's guard is worth an event: as soon as it gives way, and when it has been back at 0 for a while."""

from dataclasses import dataclass

from guidevane_api.conditions import EventReason

CALM_S = 60.0
"""Under a steady overload the guard tries a step back every 40 s or so, and takes it again: that is no recovery."""


@dataclass
class GuardNews:
    """What was told last. In memory only: after a restart a guard that gives way is told again."""

    told: bool = False
    _calm_since_s: float | None = None

    def look(self, level: float | None, now_s: float) -> EventReason | None:
        """The event that this level calls for. None, for a level that is not known, is neither calm nor news."""
        if level != 0:
            self._calm_since_s = None
            is_news = bool(level) and not self.told
            self.told = self.told or bool(level)
            return EventReason.GUARD_GAVE_WAY if is_news else None
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        if not self.told or now_s - self._calm_since_s < CALM_S:
            return None
        self.told = False
        return EventReason.GUARD_RECOVERED
