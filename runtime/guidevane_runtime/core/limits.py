"""The limits in force: what was asked for, and what can be said to hold while running requests drain."""

from guidevane_api.admin import LimitsSource, ShrinkMode
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.messages import SetLimits


class LimitsState:
    """One immutable snapshot at a time, fenced by its epoch."""

    def __init__(self, startup: SchedulerLimits) -> None:
        self.target = startup
        self.epoch = 0
        self.source = LimitsSource.STARTUP
        self._must_shrink = False

    def replace(self, command: SetLimits) -> bool:
        """Swap in newer limits. False, and nothing done, when their epoch is not above the present one."""
        if command.epoch <= self.epoch:
            return False
        self.target = command.limits
        self.epoch = command.epoch
        self.source = command.source
        self._must_shrink = command.mode is ShrinkMode.PREEMPT
        return True

    def take_shrink_order(self) -> bool:
        """Whether running requests above the limits are to be preempted now; asked for once per change."""
        ordered, self._must_shrink = self._must_shrink, False
        return ordered

    def effective(self, num_running: int) -> SchedulerLimits:
        """The target, with max_num_seqs as high as what still runs above it."""
        if num_running <= self.target.max_num_seqs:
            return self.target
        return self.target.model_copy(update={"max_num_seqs": num_running})
