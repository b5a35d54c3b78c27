"""One pod: the real scheduler, what is in its mailbox, and the step that is under way."""

from dataclasses import dataclass

from guidevane_api.admin import LimitsSource, ShrinkMode
from guidevane_api.limits import MAX_TOKENS, SchedulerLimits
from guidevane_bench.simulator.costs import CostModel, StepLoad, load_of
from guidevane_bench.simulator.door import Reported
from guidevane_bench.simulator.ledger import Entry, PodMeter
from guidevane_bench.workload.request import LoadRequest
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.budget import SHORT_RESERVE
from guidevane_runtime.core.messages import EngineStats, RequestOutput, SamplingParams, SetLimits, SetTargets, Submit
from guidevane_runtime.core.plan import SampledToken, ScheduledBatch, StepOutput
from guidevane_runtime.core.scheduler import Scheduler

TOKEN = SampledToken(0)


@dataclass(frozen=True, slots=True)
class PodShape:
    """What a pod is started with."""

    limits: SchedulerLimits
    num_blocks: int
    block_size: int = 16
    max_model_len: int = MAX_TOKENS
    """Positions of the model; unbounded, as limits bound it anyway."""
    itl_target_s: float | None = None
    """Prefill beside decodes is cut to it. None: it is not."""
    short_reserve: float = SHORT_RESERVE
    is_static: bool = False
    """Static batching, for comparison only: a batch comes in when the last one has ended, and nothing in between."""


class SimPod:
    """Started anew after it died: nothing of the old one is left."""

    def __init__(self, shape: PodShape, costs: CostModel, limits: SchedulerLimits, meter: PodMeter | None) -> None:
        pool = BlockPool(shape.num_blocks, shape.block_size)
        self.scheduler = Scheduler(
            pool,
            limits,
            max_model_len=shape.max_model_len,
            eos_token_ids=frozenset(),
            short_reserve=shape.short_reserve,
        )
        self.scheduler.set_targets(SetTargets(shape.itl_target_s))
        self.live: dict[str, Entry] = {}
        self.reported = Reported(0, 0)
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
        return self.scheduler.limits.target

    def stats(self, now_s: float) -> EngineStats:
        return self.scheduler.stats(now_s)

    def submit(self, request_id: str, request: LoadRequest, entry: Entry) -> None:
        """Mail that comes during a step counts from the next one on, as in the engine."""
        params = SamplingParams(max_tokens=request.num_output_tokens, seed=0, temperature=0.0, ignore_eos=True)
        submit = Submit(request_id, request.prompt_token_ids(), params, request.arrival_s)
        self.live[request_id] = entry
        if self._held is None:
            self.scheduler.submit(submit)
        else:
            self._held.append(submit)

    def set_limits(self, limits: SchedulerLimits, mode: ShrinkMode) -> None:
        epoch = self.scheduler.limits.epoch + 1
        self.scheduler.set_limits(SetLimits(limits, epoch, LimitsSource.SPEC, mode))

    def try_begin_step(self, now_s: float) -> float | None:
        """Plan a step and say when it ends; None when there is nothing to do."""
        if self._held and not self.scheduler.has_work:
            self._release_batch(now_s)
        if not self.scheduler.has_work:
            return None
        batch = self.scheduler.schedule(now_s)
        if not batch.seqs:
            return None
        self._batch = batch
        self._load = load_of(batch)
        self._step_s = self._costs.seconds(self._load) * self.slowdown
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

    def report(self) -> None:
        """What the server learns from the step's statistics, and goes by until the next."""
        num_running = len(self.scheduler.running)
        self.reported = Reported(num_running, len(self.live) - num_running)

    def take_outputs(self) -> tuple[RequestOutput, ...]:
        return self.scheduler.take_outputs()

    def _release_batch(self, now_s: float) -> None:
        """As many as may run at once; those that waited too long go in too, and the scheduler ends them."""
        assert self._held is not None, "only static batching holds requests back"
        oldest_ok_s = now_s - self.limits.waiting_timeout_milliseconds / 1000
        num_left = self.limits.max_num_seqs
        while self._held and num_left:
            submit = self._held.pop(0)
            num_left -= submit.arrival_s >= oldest_ok_s
            self.scheduler.submit(submit)
