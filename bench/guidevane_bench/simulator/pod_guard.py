"""The guard of one simulated pod: the core's own, unchanged, fed with what its server feeds it, at the same moments."""

from collections.abc import Iterable, Mapping

from guidevane_api.limits import SchedulerLimits
from guidevane_bench.simulator.ledger import Entry
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.door import OVERLOAD, Rejection
from guidevane_runtime.core.guard import Guard, GuardDecision, Sample
from guidevane_runtime.core.guard_steps import Line
from guidevane_runtime.core.messages import EngineStats, FinishReason, RequestOutput
from guidevane_runtime.core.tenants import RequestClass

TICK_S = 1.0
"""As in the server."""


class PodGuard:
    """Listens to one pod; what it decides is for the pod to obey."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    @property
    def level(self) -> int:
        return self._guard.level

    @property
    def long_context_pause_s(self) -> float:
        """After which long prompts, once refused, may come in again: no step is taken back earlier."""
        return self._guard.config.t_down_s

    def obeyed(self, target: SchedulerLimits) -> SchedulerLimits:
        """What is left of the target limits as things stand."""
        return self._guard.effect(target).limits

    def tick(self, now_s: float, target: SchedulerLimits, stats: EngineStats) -> GuardDecision:
        return self._guard.tick(now_s, target, stats.oldest_interactive_waiting_s)

    def hear_door(self, why: Rejection | None, now_s: float) -> None:
        """A request was let in (None) or refused."""
        if why is None or why in OVERLOAD:
            self._observe(Line.REJECTS, now_s, 100.0 if why else 0.0)

    def hear_outputs(self, outputs: Iterable[RequestOutput], live: Mapping[str, Entry], now_s: float) -> None:
        """What a step brought, before it is noted on the entries."""
        for output in outputs:
            entry = live[output.request_id]
            if output.finish_reason is FinishReason.TIMEOUT:
                # With an error its own deadline passed, which says nothing of the load.
                if not output.error:
                    self._observe(Line.REJECTS, now_s, 100.0)
            elif entry.request.request_class is RequestClass.OFFLINE:
                # Nobody waits for it: no latency of it is protected.
                continue
            elif entry.num_tokens:
                self._observe(Line.ITL, now_s, 1000 * (now_s - entry.last_token_s))
            elif output.first_scheduled_s is not None:
                self._observe(Line.QUEUE_WAIT, now_s, 1000 * (output.first_scheduled_s - entry.request.arrival_s))
                self._observe(Line.TTFT, now_s, 1000 * (now_s - entry.request.arrival_s))

    def hear_kv_use(self, pool: BlockPool, now_s: float) -> None:
        self._observe(Line.KV_USE, now_s, 100 * pool.num_used / pool.num_blocks)

    def _observe(self, line: Line, now_s: float, value: float) -> None:
        self._guard.observe(Sample(line, now_s, value))
