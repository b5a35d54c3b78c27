"""One pod: the real door and the real scheduler, what is in its mailbox, and the step that is under way."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from guidevane_api.admin import LimitsSource, ShrinkMode
from guidevane_api.limits import MAX_TOKENS, SchedulerLimits
from guidevane_bench.simulator.costs import CostModel, StepLoad, load_of
from guidevane_bench.simulator.ledger import Entry, PodMeter
from guidevane_bench.simulator.pod_guard import PodGuard
from guidevane_bench.workload.request import LoadRequest
from guidevane_runtime.core.admission import OutputForecast
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.budget import SHORT_RESERVE
from guidevane_runtime.core.door import AdmissionGate, Capacity, Refused, Rejection, Reported
from guidevane_runtime.core.guard import Guard, GuardConfig, GuardDecision
from guidevane_runtime.core.leases import Lease
from guidevane_runtime.core.messages import (
    EngineStats,
    RequestOutput,
    SamplingParams,
    SetLimits,
    SetTargets,
    SetTenants,
    Submit,
)
from guidevane_runtime.core.plan import SampledToken, ScheduledBatch, StepOutput
from guidevane_runtime.core.prefix_cache import PrefixCache
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.core.tenants import EQUAL_TERMS, TenantPolicy

TOKEN = SampledToken(0)


@dataclass(frozen=True, slots=True)
class PodShape:
    """What a pod is started with."""

    limits: SchedulerLimits
    num_blocks: int
    block_size: int = 16
    max_model_len: int = MAX_TOKENS
    """Positions of the model; unbounded, as limits bound it anyway."""
    tenants: TenantPolicy = EQUAL_TERMS
    itl_target_s: float | None = None
    """Prefill beside decodes is cut to it. None: to the guard's ITL line, if it may act."""
    short_reserve: float = SHORT_RESERVE
    is_static: bool = False
    """Static batching, for comparison only: a batch comes in when the last one has ended, and nothing in between."""
    enable_prefix_caching: bool = True
    is_optimistic: bool = False
    """Let in whatever fits now, for comparison only: no output is expected to get longer, so growth preempts."""
    guard: GuardConfig | None = None
    """None: it is off."""

    @property
    def target_s(self) -> float | None:
        """What steps are kept to, as in the server."""
        if self.itl_target_s is not None:
            return self.itl_target_s
        return self.guard.itl_target_s if self.guard else None


class NoGrowth(OutputForecast):
    """Expects every output to be complete as it is."""

    def num_more_tokens(self, num_so_far: int) -> int:
        return 0


class SimPod:
    """Started anew after it died: nothing of the old one is left."""

    def __init__(
        self,
        shape: PodShape,
        costs: CostModel,
        limits: SchedulerLimits,
        clock: Callable[[], float],
        meter: PodMeter | None,
    ) -> None:
        """clock: virtual time, for the door."""
        pool = BlockPool(shape.num_blocks, shape.block_size)
        self.scheduler = Scheduler(
            pool,
            limits,
            max_model_len=shape.max_model_len,
            eos_token_ids=frozenset(),
            prefix_cache=PrefixCache(pool, is_enabled=shape.enable_prefix_caching),
            forecast=NoGrowth() if shape.is_optimistic else None,
            short_reserve=shape.short_reserve,
        )
        self._terms = SetTenants(shape.tenants, epoch=1)
        self.scheduler.set_tenants(self._terms)
        self.scheduler.set_targets(SetTargets(shape.target_s))
        self.door = AdmissionGate(
            limits=lambda: self.limits,
            clock=clock,
            policy=lambda: self._terms.policy,
            target=lambda: self._target,
        )
        self.door.engine_ready(Capacity(shape.num_blocks, shape.block_size), load_s=0.0)
        self.guard = PodGuard(Guard(shape.guard)) if shape.guard else None
        self._target = limits
        self.live: dict[str, Entry] = {}
        self._leases: dict[str, Lease] = {}
        self._unreported = Reported()
        self.is_plan_due = False
        self.slowdown = 1.0
        """Step times are multiplied by it: a neighbour on the same host, or a clock that is throttled."""
        self.num_steps = 0
        self.busy_s = 0.0
        self.meter = meter
        self._costs = costs
        self._held: list[Submit] | None = [] if shape.is_static else None
        self._batch: ScheduledBatch | None = None
        self._load = StepLoad(0, 0, 0, 0)
        self._step_s = 0.0

    @property
    def is_stepping(self) -> bool:
        return self._batch is not None

    @property
    def limits(self) -> SchedulerLimits:
        """In force: what it was told, as its guard leaves it."""
        return self.scheduler.limits.target

    def stats(self, now_s: float) -> EngineStats:
        return self.scheduler.stats(now_s)

    def offer(self, request_id: str, request: LoadRequest, entry: Entry) -> Rejection | None:
        """Let a request in, or say why not. Mail that comes during a step counts from the next one on."""
        why = self._try_submit(request_id, request, entry)
        if self.guard:
            self.guard.hear_door(why, request.arrival_s)
        return why

    def _try_submit(self, request_id: str, request: LoadRequest, entry: Entry) -> Rejection | None:
        standing = request.standing()
        try:
            lease = self.door.admit(standing, request.num_prompt_tokens, request.num_output_tokens)
        except Refused as refused:
            return refused.reason
        params = SamplingParams(max_tokens=request.num_output_tokens, seed=0, temperature=0.0, ignore_eos=True)
        submit = Submit(request_id, request.prompt_token_ids(), params, **standing._asdict())
        self.live[request_id], self._leases[request_id] = entry, lease
        if self._held is None:
            self.scheduler.submit(submit)
        else:
            self._held.append(submit)
        return None

    def set_limits(self, limits: SchedulerLimits, mode: ShrinkMode) -> None:
        self._target = limits
        self._obey(self.guard.obeyed(limits) if self.guard else limits, mode)

    def tick_guard(self, guard: PodGuard, now_s: float) -> GuardDecision:
        """What the server does once a second."""
        if not self.is_stepping:
            guard.hear_kv_use(self.scheduler.pool, now_s)
        decision = guard.tick(now_s, self._target, self.stats(now_s))
        self.door.long_context_pause_s = guard.long_context_pause_s if decision.effect.refuses_long_context else None
        self._pause_offline(decision.effect.pauses_offline)
        if decision.effect.limits != self.limits:
            self._obey(decision.effect.limits, ShrinkMode.DRAIN)
        return decision

    def _pause_offline(self, is_paused: bool) -> None:
        if self._terms.policy.pauses_offline != is_paused:
            policy = replace(self._terms.policy, pauses_offline=is_paused)
            self._terms = SetTenants(policy, self._terms.epoch + 1)
            self.scheduler.set_tenants(self._terms)

    def _obey(self, limits: SchedulerLimits, mode: ShrinkMode) -> None:
        epoch = self.scheduler.limits.epoch + 1
        self.scheduler.set_limits(SetLimits(limits, epoch, LimitsSource.SPEC, mode))

    def try_begin_step(self, now_s: float) -> float | None:
        """Plan a step and say when it ends; None when there is nothing to do."""
        if self._held and not self.scheduler.has_work:
            self._release_batch(now_s)
        if not self.scheduler.has_work:
            return None
        num_found = -self.scheduler.prefix_cache.num_hit_tokens
        batch = self.scheduler.schedule(now_s)
        num_found += self.scheduler.prefix_cache.num_hit_tokens
        if not batch.seqs:
            return None
        self._batch = batch
        self._load = load_of(batch)
        self._step_s = self._costs.seconds(self._load) * self.slowdown
        self._unreported = Reported(num_prompt_tokens=self._load.num_prefill_tokens + num_found, step_s=self._step_s)
        self.num_steps += 1
        self.busy_s += self._step_s
        return now_s + self._step_s

    def end_step(self) -> None:
        """Every sequence that samples gets a token."""
        batch = self._batch
        assert batch is not None, "a step ended that had not begun"
        self._batch = None
        self.scheduler.apply(batch, StepOutput(tuple([TOKEN if seq.samples else None for seq in batch.seqs])))
        self.scheduler.note_step_time(self._load, self._step_s)

    def report(self, now_s: float) -> None:
        """What the server learns from the step's statistics, and goes by until the next."""
        if self.guard:
            self.guard.hear_kv_use(self.scheduler.pool, now_s)
        num_running, step = len(self.scheduler.running), self._unreported
        self.door.observe(Reported(num_running, len(self.live) - num_running, step.num_prompt_tokens, step.step_s))
        self._unreported = Reported()

    def take_outputs(self, now_s: float) -> tuple[RequestOutput, ...]:
        """What happened to requests; the leases of those that ended are given back."""
        outputs = self.scheduler.take_outputs()
        if self.guard:
            self.guard.hear_outputs(outputs, self.live, now_s)
        for output in outputs:
            if output.new_token_ids:
                self._leases[output.request_id].start()
            if output.finish_reason is not None:
                del self.live[output.request_id]
                self._leases.pop(output.request_id).release()
        return outputs

    def _release_batch(self, now_s: float) -> None:
        """As many as may run at once; those that waited too long go in too, and the scheduler ends them."""
        assert self._held is not None, "only static batching holds requests back"
        oldest_ok_s = now_s - self.limits.waiting_timeout_milliseconds / 1000
        num_left = self.limits.max_num_seqs
        while self._held and num_left:
            submit = self._held.pop(0)
            num_left -= submit.arrival_s >= oldest_ok_s
            self.scheduler.submit(submit)
