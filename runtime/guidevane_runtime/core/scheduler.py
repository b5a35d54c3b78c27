"""Iteration-level scheduling: which tokens of which requests make up the next step, and what its result means.

The scheduler knows block counts and token ids; it never sees a tensor, an event loop or a clock. Its owner calls in
turn: submit, abort and set_limits as the mail has them, schedule, apply with what the runner made of the batch, and
take_outputs. Between schedule and apply all mail is welcome too: it counts from the next step on.
"""

from collections.abc import Sequence

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.admission import MemoryGate, OutputForecast, kv_limit_blocks, refusal
from guidevane_runtime.core.block_pool import BlockPool, BlockTable
from guidevane_runtime.core.budget import SHORT_RESERVE, PrefillLanes, StepPlan
from guidevane_runtime.core.limits import LimitsState
from guidevane_runtime.core.line import Line
from guidevane_runtime.core.messages import (
    AbortCause,
    EngineStats,
    FinishReason,
    RequestOutput,
    SetLimits,
    SetTargets,
    SetTenants,
    Submit,
)
from guidevane_runtime.core.plan import SampledToken, ScheduledBatch, StepLoad, StepOutput
from guidevane_runtime.core.prefix_cache import PrefixCache
from guidevane_runtime.core.request import STATE_AFTER, Request, RequestState
from guidevane_runtime.core.slack import ItlSlack
from guidevane_runtime.core.stopping import Stop, find_stop
from guidevane_runtime.core.tenants import RequestClass
from guidevane_runtime.core.waiting import WaitingQueue, deadline_of, place_of


class Scheduler:
    """Owns every live request and, through them, the blocks of the pool."""

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        prefix_cache: PrefixCache | None = None,
        short_reserve: float = SHORT_RESERVE,
    ) -> None:
        """max_model_len is what the model has positions for; limits may be tighter, never wider.

        Without a prefix cache no block is shared. Another short_reserve than the default is for comparisons.
        """
        self.pool = pool
        self.prefix_cache = prefix_cache or PrefixCache(pool, is_enabled=False)
        self.limits = LimitsState(limits)
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._waiting = WaitingQueue()
        self._deadlines = Line(lambda request: (deadline_of(request),))
        self._running: dict[str, Request] = {}
        self._live: dict[str, Request] = {}
        self._in_flight: frozenset[str] = frozenset()
        self._fenced: list[BlockTable] = []
        self._outputs: list[RequestOutput] = []
        self._forecast = OutputForecast()
        self._itl_slack = ItlSlack()
        self._short_reserve = short_reserve
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0
        self._last_preemption_step = -1

    # ------------------------------------------------------------------------------------------------- the mail

    def submit(self, submit: Submit) -> None:
        """Queue a request, or refuse at once what can never run."""
        assert submit.request_id not in self._live, f"request id {submit.request_id} was given out twice by the server"
        limits, num_prompt = self.limits.target, len(submit.prompt_token_ids)
        max_model_len = min(limits.max_model_len, self._max_model_len)
        max_output = min(submit.params.max_tokens, limits.max_output_tokens)
        # The last token is never computed, so the pool bounds a request at one token more than it holds.
        max_num_tokens = min(num_prompt + max_output, max_model_len, self.pool.num_tokens + 1)
        request = Request(submit, max_num_tokens, self.pool.table())
        self.prefix_cache.open(request)
        self._live[submit.request_id] = request
        self._waiting.add(request)
        if submit.deadline_s is not None:
            self._deadlines.add(request)
        if why := refusal(num_prompt, limits.max_prompt_tokens, max_model_len, self.pool):
            self._end(request, Stop(FinishReason.ERROR), error=why)

    def abort(self, request_id: str, cause: AbortCause) -> None:
        """End a request in whatever state it is; what has ended already stays as it ended."""
        if request := self._live.get(request_id):
            stopped = cause is AbortCause.STOP_STRING
            self._end(request, Stop(FinishReason.STOP if stopped else FinishReason.ABORT))

    def abort_all(self, cause: AbortCause) -> None:
        for request_id in tuple(self._live):
            self.abort(request_id, cause)

    def set_limits(self, command: SetLimits) -> bool:
        """Obey newer limits from the next step on; False when their epoch is stale."""
        return self.limits.replace(command)

    def set_tenants(self, command: SetTenants) -> bool:
        """Share by newer terms from the next step on; False when their epoch is stale."""
        return self._waiting.set_tenants(command)

    def set_targets(self, command: SetTargets) -> None:
        """Keep steps within other targets from the next one on."""
        self._itl_slack.target_s = command.itl_s

    # --------------------------------------------------------------------------------------------------- the step

    def schedule(self, now_s: float) -> ScheduledBatch:
        """Plan one step: decodes, then short prompts in their reserve, prefills in progress, and whoever else waits."""
        assert not self._in_flight, "a step was planned before the last one was applied"
        self._expire(now_s)
        step = StepPlan(self._num_steps + 1, now_s, self.limits.target)
        self._shrink_if_ordered(step)
        self._decode(step)
        step.limit_prefills(self._itl_slack)
        self._admit_short(step)
        self._continue_prefills(step)
        self._admit(step)
        return self._seal(step)

    def apply(self, batch: ScheduledBatch, output: StepOutput) -> None:
        """Take in what the step computed. Results of requests that ended meanwhile are dropped, their blocks freed."""
        for seq, sampled in zip(batch.seqs, output.sampled, strict=True):
            if request := self._live.get(seq.request_id):
                request.note_computed(len(seq.token_ids))
                self.prefix_cache.publish(request)
                if sampled:
                    self._append(request, sampled)
        self._in_flight = frozenset()
        while self._fenced:
            self._fenced.pop().release()

    def note_step_time(self, load: StepLoad, took_s: float) -> None:
        """Learn from a step that was planned, run and applied what the next ones will take."""
        self._itl_slack.note_step(load, took_s)

    def take_outputs(self) -> tuple[RequestOutput, ...]:
        """What happened to requests since the last call."""
        taken, self._outputs = tuple(self._outputs), []
        return taken

    # ------------------------------------------------------------------------------------------------ what there is

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def running(self) -> Sequence[Request]:
        return tuple(self._running.values())

    @property
    def waiting(self) -> Sequence[Request]:
        """First in line first."""
        return self._waiting.in_line()

    def live(self, request_id: str) -> Request | None:
        return self._live.get(request_id)

    def next_step(self, now_s: float) -> StepPlan:
        """The next step with decodes and prefills in progress, as it would be before admission; nothing is changed."""
        step = self._next_decodes(now_s)
        self._continue_prefills(step)
        return step

    def next_reserve(self, now_s: float) -> StepPlan:
        """The next step as short prompts find it: decodes are in, and the reserve is open where they pass others."""
        step = self._next_decodes(now_s)
        if self._in_prefill(step):
            step.budget.open_reserve(self._short_reserve)
        return step

    def _next_decodes(self, now_s: float) -> StepPlan:
        step = StepPlan(self._num_steps + 1, now_s, self.limits.target)
        for request in self._decodes_in_turn(step)[: step.budget.num_decodes_left]:
            step.add(request, 1)
        step.limit_prefills(self._itl_slack)
        return step

    def memory_gate(self) -> MemoryGate:
        return MemoryGate(self.pool, self.limits.target, self._forecast, self._running.values())

    @property
    def is_cooling_down(self) -> bool:
        """Whether the next step brings in nobody, because of a preemption."""
        return bool(self._running) and self._num_steps <= self._last_preemption_step

    @property
    def effective_limits(self) -> SchedulerLimits:
        return self.limits.effective(len(self._running))

    def stats(self, now_s: float) -> EngineStats:
        oldest_s = self._waiting.oldest_arrival_s()
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
            oldest_waiting_s=0.0 if oldest_s is None else max(0.0, now_s - oldest_s),
            num_blocks_total=self.pool.num_blocks,
            num_blocks_used=self.pool.num_used,
            num_blocks_cached=self.pool.num_cached_free,
            num_preemptions=self._num_preemptions,
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_steps=self._num_steps,
            num_prefix_queried_tokens=self.prefix_cache.num_queried_tokens,
            num_prefix_hit_tokens=self.prefix_cache.num_hit_tokens,
        )

    # ------------------------------------------------------------------------------------------ parts of a step

    def _expire(self, now_s: float) -> None:
        """What waited too long for its first step, and what is past its own deadline, waiting or running."""
        for request in self._waiting.overdue(now_s - self.limits.target.waiting_timeout_milliseconds / 1000):
            self._end(request, Stop(FinishReason.TIMEOUT))
        while (due := self._deadlines.first) and deadline_of(due) <= now_s:
            late_s, num_tokens = now_s - deadline_of(due), due.num_output_tokens
            why = (
                f"the deadline passed {late_s:.3f} s ago, after {num_tokens} tokens; ask for fewer or give it more time"
            )
            self._end(due, Stop(FinishReason.TIMEOUT), error=why)

    def _shrink_if_ordered(self, step: StepPlan) -> None:
        """Preempt what runs above limits that came with ShrinkMode.PREEMPT; one request always stays."""
        if not self.limits.take_shrink_order():
            return
        while len(self._running) > step.limits.max_num_seqs:
            self._preempt(self._choose_victim(), step)
        while len(self._running) > 1 and self.pool.num_used > kv_limit_blocks(self.pool, step.limits):
            self._preempt(self._choose_victim(), step)

    def _decode(self, step: StepPlan) -> None:
        for request in self._decodes_in_turn(step):
            if not step.budget.num_decodes_left:
                return
            if request.state is RequestState.RUNNING and self._ensure_block(request, step):
                step.add(request, 1)

    def _decodes_in_turn(self, step: StepPlan) -> list[Request]:
        """In order of admission; the least recently served first when the budget is short, so everyone has a turn."""
        decodes = [request for request in self._running.values() if request.num_uncomputed_tokens == 1]
        if len(decodes) > step.budget.num_decodes_left:
            decodes.sort(key=lambda request: request.last_turn)
        return decodes

    def _ensure_block(self, request: Request, step: StepPlan) -> bool:
        """Make room for the next token of a decode, at the cost of others if need be. False: it can't run now."""
        while not request.blocks.try_grow_to(request.num_tokens):
            victim = self._choose_victim()
            self._preempt(victim, step)
            if victim is request:
                return False
        return True

    def _choose_victim(self) -> Request:
        """Not the same one again and again; then offline; lowest priority; latest deadline; least work lost; newest."""
        return min(
            self._running.values(),
            key=lambda r: (
                r.num_preemptions,
                r.submit.request_class is not RequestClass.OFFLINE,
                -r.submit.priority,
                -deadline_of(r),
                r.num_computed_tokens,
                -r.submit.arrival_s,
            ),
        )

    def _preempt(self, victim: Request, step: StepPlan) -> None:
        step.drop(victim)
        del self._running[victim.request_id]
        victim.preempt()
        self._waiting.add(victim)
        self._num_preemptions += 1
        self._last_preemption_step = step.number

    def _admit_short(self, step: StepPlan) -> None:
        """Short prompts pass those in mid-prefill, which could take all there is, and whoever waits, in their reserve.

        Nobody is passed for ever: once no prefill goes on, the queue's own order holds.
        """
        if self._may_admit(step) and self._in_prefill(step):
            step.budget.open_reserve(self._short_reserve)
            self._admit(step)
            step.budget.close_reserve()

    def _continue_prefills(self, step: StepPlan) -> None:
        """Blocks for the whole prompt were taken when it came in: a prefill never waits for memory."""
        for request in sorted(self._in_prefill(step), key=place_of):
            if num_tokens := step.budget.affordable(request):
                step.add(request, num_tokens)

    def _in_prefill(self, step: StepPlan) -> list[Request]:
        """Those that the step has no part of yet."""
        running = self._running.values()
        return [request for request in running if request.num_uncomputed_tokens > 1 and not step.num_planned(request)]

    def _admit(self, step: StepPlan) -> None:
        """First in turn first; only what has to wait for a prefill lane lets others pass until it has one."""
        if not self._may_admit(step):
            return
        gate = self.memory_gate()
        lanes = PrefillLanes(step, self._running.values())
        while self._may_admit(step):
            request = self._waiting.first(lambda request: self.has_lane(request, lanes))
            if request is None or not step.budget.affordable(request):
                return
            if self._running and not gate.admits(request):
                return
            self._start(request, step)
            lanes.enter(request)
            gate.enter(request)

    def has_lane(self, request: Request, lanes: PrefillLanes) -> bool:
        """Judged with what the prefix cache holds for it now."""
        self.prefix_cache.look(request)
        return lanes.has_room_for(request)

    def _may_admit(self, step: StepPlan) -> bool:
        """An idle engine always may. After a preemption, this step and the next one bring in nobody."""
        if not self._waiting or step.budget.is_spent:
            return False
        settled = step.number > self._last_preemption_step + 1
        return not self._running or (settled and len(self._running) < step.limits.max_num_seqs)

    def _start(self, request: Request, step: StepPlan) -> None:
        self.prefix_cache.take(request)
        has_blocks = request.blocks.try_grow_to(request.num_tokens)
        assert has_blocks, "the gate let in a request that the pool has no blocks for"
        self._waiting.admit(request)
        request.move_to(RequestState.RUNNING)
        self._running[request.request_id] = request
        step.add(request, step.budget.affordable(request))

    def _seal(self, step: StepPlan) -> ScheduledBatch:
        batch = step.seal(self.limits.epoch)
        self._in_flight = frozenset(seq.request_id for seq in batch.seqs)
        self._num_steps += bool(batch.seqs)
        self._num_recomputed_tokens += step.num_recomputed_tokens
        return batch

    # --------------------------------------------------------------------------------------------- results and ends

    def _append(self, request: Request, sampled: SampledToken) -> None:
        if sampled.error:
            # Whatever made its logits bad may sit in its blocks.
            self.pool.withdraw(request.blocks.block_ids)
            self._end(request, Stop(FinishReason.ERROR), error=sampled.error)
            return
        request.token_ids.append(sampled.token_id)
        self._waiting.charge_output(request)
        if stop := find_stop(request, self._eos_token_ids):
            self._end(request, stop, sampled=sampled)
        else:
            self._report(request, sampled=sampled)

    def _end(self, request: Request, stop: Stop, *, sampled: SampledToken | None = None, error: str = "") -> None:
        """The one place that all ends pass: afterwards nothing knows the request, and one terminal output is out."""
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
        else:
            del self._running[request.request_id]
        del self._live[request.request_id]
        self._deadlines.discard(request)
        self._waiting.settle(request, is_in_flight=request.request_id in self._in_flight and sampled is None)
        request.move_to(STATE_AFTER[stop.reason])
        self._free_blocks(request, still_read=request.request_id in self._in_flight and sampled is None)
        if stop.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._forecast.record(request.num_output_tokens)
        self._report(request, sampled=sampled, stop=stop, error=error)

    def _free_blocks(self, request: Request, *, still_read: bool) -> None:
        """Blocks that a step in flight reads or writes are fenced until it is applied."""
        if still_read:
            self._fenced.append(request.blocks.detach())
        else:
            request.blocks.release()

    def _report(
        self, request: Request, *, sampled: SampledToken | None, stop: Stop | None = None, error: str = ""
    ) -> None:
        self._outputs.append(
            RequestOutput(
                request_id=request.request_id,
                new_token_ids=(sampled.token_id,) if sampled else (),
                logprobs=(sampled.logprobs,) if sampled and sampled.logprobs else (),
                finish_reason=stop.reason if stop else None,
                stop_token_id=stop.stop_token_id if stop else None,
                error=error,
                first_scheduled_s=request.first_scheduled_s,
                num_cached_tokens=request.num_cached_tokens,
                num_preemptions=request.num_preemptions,
            )
        )
