"""The limits in force: what was asked for, and what can be said to hold while what is above it drains."""

from collections.abc import Callable, Collection, Mapping

from guidevane_api.admin import LimitsSource, ShrinkMode
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.admission import kv_limit_blocks
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import SetLimits
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.waiting import WaitingQueue


class LimitsState:
    """One immutable snapshot at a time, fenced by its epoch."""

    def __init__(self, startup: SchedulerLimits) -> None:
        self.target = startup
        self.epoch = 0
        self.source = LimitsSource.STARTUP
        self._shrink_order: SchedulerLimits | None = None
        self._has_converged = True

    def replace(self, command: SetLimits) -> bool:
        """Swap in newer limits. False, and nothing done, when their epoch is not above the present one."""
        if command.epoch <= self.epoch:
            return False
        self.target = command.limits
        self.epoch = command.epoch
        self.source = command.source
        if command.mode is ShrinkMode.PREEMPT:
            self._shrink_order = command.limits
        self._has_converged = False
        return True

    def take_shrink_order(self) -> SchedulerLimits | None:
        """What running requests are to be preempted down to now; given once per order.

        An order outlives changes that drain and come before the step: of its limits and theirs the higher ones hold.
        """
        order, self._shrink_order = self._shrink_order, None
        if order is None or order is self.target:
            return order
        return order.model_copy(update={name: max(getattr(order, name), value) for name, value in self.target})

    def effective(self, use: Callable[[], Mapping[str, int]]) -> SchedulerLimits:
        """The target; while use is above limits that were lowered, those as high as the use."""
        if self._has_converged:
            return self.target
        above = {name: value for name, value in use().items() if value > getattr(self.target, name)}
        return self.target.model_copy(update=above) if above else self.target

    def settle(self, use: Callable[[], Mapping[str, int]]) -> None:
        """Once use is within all limits they hold: a running request that grows above the KV limit later on may."""
        self._has_converged = self._has_converged or self.effective(use) is self.target


def use_of_limits(
    running: Collection[Request], waiting: WaitingQueue, pool: BlockPool, limits: SchedulerLimits
) -> dict[str, int]:
    """Present use of each limit that can be lowered below it, in the limit's own unit.

    All other limits hold from the next step on, or for requests that come from now on.
    """
    prefills = sorted(request.num_prompt_tokens for request in running if request.num_uncomputed_tokens > 1)
    is_above_line = pool.num_used > kv_limit_blocks(pool, limits)
    return {
        "max_num_seqs": len(running),
        "max_partial_prefills": len(prefills),
        # At most one long prompt is in prefill at a time: the second longest is not long yet.
        "long_context_threshold_tokens": prefills[-2] if len(prefills) > 1 else 0,
        "kv_cache_utilization_limit_percent": -(-100 * pool.num_used // pool.num_blocks) if is_above_line else 0,
        "max_queued_requests": len(waiting),
        "max_queued_tokens": waiting.num_tokens,
    }
