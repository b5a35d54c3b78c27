"""Who set which limits, and until when: the epoch fence and the lease of PATCH /admin/limits. Pure, on a given clock.

The wire epoch is the operator's. The engine gets a number of our own that grows with every change, as going back to the
start-up limits is a change too, and no operator has an epoch for it.
"""

import math
from collections.abc import Callable

from guidevane_api.admin import LimitsPatch, LimitsSource, LimitsView, ShrinkMode
from guidevane_api.limits import Envelope, SchedulerLimits, limit_violations
from guidevane_runtime.core.messages import EngineReady, EngineStats, SetLimits
from guidevane_runtime.errors import Conflict, EngineUnavailable, InvalidRequest


class RefusedLimits(InvalidRequest):
    """Limits that can't be obeyed; `errors` says why, field by field."""

    def __init__(self, errors: dict[str, str]) -> None:
        super().__init__("; ".join(errors.values()), code="invalid_limits", param=next(iter(errors)))
        self.errors = errors


class LimitsKeeper:
    """Limits as asked for. What is obeyed comes from the engine's reports."""

    def __init__(
        self,
        startup: SchedulerLimits,
        envelope: Envelope,
        clock: Callable[[], float],
        guarded: Callable[[SchedulerLimits], SchedulerLimits] = lambda target: target,
    ) -> None:
        """guarded: what is to be obeyed of target limits while the guard acts."""
        self._clock = clock
        self._guarded = guarded
        self.startup = self.target = self.effective = startup
        self.in_force = startup
        """What the engine is told to obey: the target, as the guard leaves it."""
        self.ceiling = envelope
        self.epoch = 0
        self.source = LimitsSource.STARTUP
        self.boot_id = ""
        self.command: SetLimits | None = None
        """What the engine was told last."""
        self._sequence = 0
        self._last_patch: LimitsPatch | None = None
        self._lease_end_s: float | None = None

    def engine_ready(self, ready: EngineReady) -> None:
        """The first engine says what the start-up limits are; a later one was started with the present target."""
        if not self.boot_id:
            self.startup = self.target = ready.limits
        self.effective = self.in_force = ready.limits
        self.ceiling = self.ceiling.model_copy(update={"max_model_len": ready.max_model_len})
        self.boot_id = ready.boot_id

    def change(self, patch: LimitsPatch) -> SetLimits:
        """Accept a PATCH. The one in force renews its lease, and its command comes back unchanged.

        Raises Conflict for an epoch that is behind, or equal with another body; RefusedLimits for what can't be;
        EngineUnavailable before the first engine has said how long the model's context is.
        """
        if not self.boot_id:
            raise EngineUnavailable("the model is being loaded; its context length bounds the limits", code="not_ready")
        if patch.epoch < self.epoch:
            raise Conflict(f"epoch {patch.epoch} is below the stored {self.epoch}; read GET /admin/limits first")
        if patch.epoch == self.epoch and self._last_patch is not None and self.command is not None:
            if _content(patch) != _content(self._last_patch):
                raise Conflict(f"epoch {patch.epoch} was used with another body; use a higher one")
            if self.source is not LimitsSource.LEASE_EXPIRED:
                self._renew(patch)
                return self.command
        target = self.target.merged(patch.limits)
        if errors := limit_violations(target, self.ceiling):
            raise RefusedLimits(errors)
        self.target, self.epoch, self.source = target, patch.epoch, patch.source
        self._last_patch = patch
        self._renew(patch)
        return self._command(patch.mode)

    def expire(self) -> SetLimits | None:
        """Back to the start-up limits if the lease ran out; None if it did not."""
        if self._lease_end_s is None or self._clock() < self._lease_end_s:
            return None
        self._lease_end_s = None
        self.target, self.source = self.startup, LimitsSource.LEASE_EXPIRED
        return self._command(ShrinkMode.DRAIN)

    def follow_guard(self) -> SetLimits | None:
        """The limits that the guard leaves of the target now; None if they are in force already."""
        return None if self._guarded(self.target) == self.in_force else self._command(ShrinkMode.DRAIN)

    def view(self, stats: EngineStats) -> LimitsView:
        """As GET /admin/limits shows it."""
        return LimitsView(
            target=self.target,
            effective=self.effective,
            startup=self.startup,
            ceiling=self.ceiling,
            epoch=self.epoch,
            source=self.source,
            lease_remaining_seconds=self._lease_remaining_seconds(),
            boot_id=self.boot_id,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
        )

    def _renew(self, patch: LimitsPatch) -> None:
        self._lease_end_s = self._clock() + patch.lease_seconds

    def _command(self, mode: ShrinkMode) -> SetLimits:
        self._sequence += 1
        self.in_force = self._guarded(self.target)
        self.command = SetLimits(self.in_force, self._sequence, self.source, mode)
        return self.command

    def _lease_remaining_seconds(self) -> int | None:
        return None if self._lease_end_s is None else max(0, math.ceil(self._lease_end_s - self._clock()))


def _content(patch: LimitsPatch) -> LimitsPatch:
    """What makes two patches the same: not how long they are to hold."""
    return patch.model_copy(update={"lease_seconds": 1})
