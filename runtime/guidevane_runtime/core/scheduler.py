"""Iteration-level scheduling: which tokens of which requests make up the next step, and what its result means.

The scheduler knows block counts and token ids; it never sees a tensor, an event loop or a clock. Its owner calls in
turn: submit, abort and set_limits as the mail has them, schedule, apply with what the runner made of the batch, and
take_outputs. Between schedule and apply all mail is welcome too: it counts from the next step on.
"""

from collections.abc import Callable, Sequence

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.admission import OutputForecast, kv_limit_blocks, max_num_tokens, refusal
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.budget import SHORT_RESERVE, StepPlan
from guidevane_runtime.core.constraints import PlanConstraint
from guidevane_runtime.core.entrance import Entrance
from guidevane_runtime.core.fence import StepInFlight
from guidevane_runtime.core.grammar import GrammarState
from guidevane_runtime.core.limits import LimitsState, use_of_limits
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
from guidevane_runtime.core.outputs import Outputs
from guidevane_runtime.core.plan import SampledToken, ScheduledBatch, StepLoad, StepOutput
from guidevane_runtime.core.preemption import Preemptions
from guidevane_runtime.core.prefix_cache import PrefixCache
from guidevane_runtime.core.request import STATE_AFTER, Request, RequestState
from guidevane_runtime.core.running import RunningRequests
from guidevane_runtime.core.slack import ItlSlack
from guidevane_runtime.core.speculation import Speculation
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
        constraints: Sequence[PlanConstraint] = (),
        speculation: Speculation | None = None,
        forecast: OutputForecast | None = None,
        short_reserve: float = SHORT_RESERVE,
    ) -> None:
        """max_model_len is what the model has positions for; limits may be tighter, never wider.

        Without a prefix cache no block is shared, without constraints the model runner has room for whatever blocks
        and limits allow, without speculation there are no drafts. The forecast says how long outputs get; by default it
        learns that. Another short_reserve than the default is for comparisons.
        """
        self.pool = pool
        self.prefix_cache = prefix_cache or PrefixCache(pool, is_enabled=False)
        self.limits = LimitsState(limits)
        self._speculation = speculation
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._waiting = WaitingQueue()
        self._deadlines = Line(lambda request: (deadline_of(request),))
        self._running = RunningRequests()
        self._preemptions = Preemptions(self._running, self._waiting)
        self._live: dict[str, Request] = {}
        self._in_flight = StepInFlight()
        self._outputs = Outputs()
        self._forecast = forecast or OutputForecast()
        self._itl_slack = ItlSlack()
        self.entrance = Entrance(
            self._waiting,
            self._running,
            self._preemptions,
            pool=pool,
            prefix_cache=self.prefix_cache,
            forecast=self._forecast,
            constraints=constraints,
            short_reserve=short_reserve,
        )
        self._num_steps = 0
        self._num_recomputed_tokens = 0

    # ------------------------------------------------------------------------------------------------- the mail

    def submit(self, submit: Submit, *, grammar: GrammarState | None = None) -> None:
        """Queue a request, or refuse at once what can never run. With a grammar it lines up once that is compiled."""
        assert submit.request_id not in self._live, f"request id {submit.request_id} was given out twice by the server"
        limits, num_prompt = self.limits.target, len(submit.prompt_token_ids)
        max_model_len = min(limits.max_model_len, self._max_model_len)
        max_output = min(submit.params.max_tokens, limits.max_output_tokens)
        most = max_num_tokens(num_prompt + max_output, max_model_len, self.pool)
        request = Request(submit, most, self.pool.table(), grammar=grammar)
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

    def catch_up(self, now_s: float) -> None:
        """End what time, or a failed compile, has ended, and line up what is compiled. Welcome during a step too."""
        self._expire(now_s)
        for request, why in self._waiting.line_up_compiled().items():
            self._end(request, Stop(FinishReason.ERROR), error=why)

    def schedule(self, now_s: float) -> ScheduledBatch:
        """Plan one step: decodes, then short prompts in their reserve, prefills in progress, and whoever else waits.

        Whatever is left over may go to draft tokens.
        """
        assert not self._in_flight.is_on, "a step was planned before the last one was applied"
        self.catch_up(now_s)
        step = self._new_step(now_s)
        self._shrink_if_ordered(step)
        self.limits.settle(self._use_of_limits)
        self._decode(step, self._preemptions.ensure_block)
        self.entrance.admit_short(step)
        self._continue_prefills(step)
        self.entrance.admit(step)
        if self._speculation:
            self._speculation.plan(step)
        return self._seal(step)

    def apply(self, batch: ScheduledBatch, output: StepOutput) -> None:
        """Take in what the step computed. Results of requests that ended meanwhile are dropped, their blocks freed."""
        num_drafts = batch.num_drafts
        for seq, sampled in zip(batch.seqs, output.sampled, strict=True):
            if request := self._live.get(seq.request_id):
                if num_drafts and seq.request_id in num_drafts:
                    drawn = output.drawn(seq.request_id, sampled)
                    self._take_in_verified(request, num_drafts[seq.request_id], drawn)
                else:
                    self._take_in(request, len(seq.token_ids), sampled)
        self._in_flight.end()

    def note_step_time(self, load: StepLoad, took_s: float) -> None:
        """Learn from a step that was planned, run and applied what the next ones will take."""
        self._itl_slack.note_step(load, took_s)

    def take_outputs(self) -> tuple[RequestOutput, ...]:
        """What happened to requests since the last call."""
        return self._outputs.take()

    # ------------------------------------------------------------------------------------------------ what there is

    @property
    def has_work(self) -> bool:
        """A step would compute something. A grammar that is being compiled is no work; mail says it is ready."""
        return len(self._live) > self._waiting.num_compiling

    @property
    def running(self) -> Sequence[Request]:
        return tuple(self._running.all)

    @property
    def waiting(self) -> Sequence[Request]:
        """First in line first."""
        return self._waiting.in_line()

    def live(self, request_id: str) -> Request | None:
        return self._live.get(request_id)

    def next_step(self, now_s: float) -> StepPlan:
        """The next step with decodes and prefills in progress, as it would be before admission; nothing is changed."""
        self._continue_prefills(step := self.next_decodes(now_s))
        return step

    def next_decodes(self, now_s: float) -> StepPlan:
        """The next step with its decodes alone, if none of them lacks a block; nothing is changed."""
        self._decode(step := self._new_step(now_s), lambda request, step: True)
        return step

    @property
    def effective_limits(self) -> SchedulerLimits:
        return self.limits.effective(self._use_of_limits)

    def stats(self, now_s: float) -> EngineStats:
        oldest_s = {kind: self._waiting.oldest_wait_s(kind, now_s) for kind in RequestClass}
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
            oldest_waiting_s=max(oldest_s.values()),
            oldest_interactive_waiting_s=oldest_s[RequestClass.INTERACTIVE],
            num_blocks_total=self.pool.num_blocks,
            num_blocks_used=self.pool.num_used,
            num_blocks_cached=self.pool.num_cached_free,
            num_preemptions=self._preemptions.num_so_far,
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
            late = f"the deadline passed {now_s - deadline_of(due):.3f} s ago, after {due.num_output_tokens} tokens"
            self._end(due, Stop(FinishReason.TIMEOUT), error=f"{late}; ask for fewer or give it more time")

    def _new_step(self, now_s: float) -> StepPlan:
        return StepPlan(self._num_steps + 1, now_s, self.limits.target)

    def _shrink_if_ordered(self, step: StepPlan) -> None:
        """Preempt what runs above limits that came with ShrinkMode.PREEMPT; one request always stays."""
        order = self.limits.take_shrink_order()
        if order is None:
            return
        while len(self._running) > order.max_num_seqs:
            self._preemptions.preempt_one(step)
        while len(self._running) > 1 and self.pool.num_used > kv_limit_blocks(self.pool, order):
            self._preemptions.preempt_one(step)

    def _use_of_limits(self) -> dict[str, int]:
        return use_of_limits(self._running.all, self._waiting, self.pool, self.limits.target)

    def _decode(self, step: StepPlan, can_run: Callable[[Request, StepPlan], bool]) -> None:
        """In turn, as many as the budget has; what they leave of the time to their next tokens is for prefills."""
        for request in self._running.decodes_in_turn(step):
            if not step.budget.num_decodes_left:
                break
            if can_run(request, step):
                step.add(request, 1)
        step.limit_prefills(self._itl_slack)

    def _continue_prefills(self, step: StepPlan) -> None:
        """Blocks for the whole prompt were taken when it came in: a prefill never waits for memory."""
        rest = (request for request in self._running.prefills() if not step.num_planned(request))
        for request in sorted(rest, key=place_of):
            if num_tokens := step.budget.affordable(request):
                step.add(request, num_tokens)

    def _seal(self, step: StepPlan) -> ScheduledBatch:
        batch = step.seal(self.limits.epoch)
        self._in_flight.begin(batch)
        self._num_steps += bool(batch.seqs)
        self._num_recomputed_tokens += step.num_recomputed_tokens
        return batch

    # --------------------------------------------------------------------------------------------- results and ends

    def _take_in(self, request: Request, num_tokens: int, sampled: SampledToken | None) -> None:
        """So many of its tokens are computed, and perhaps one more is known."""
        request.note_computed(num_tokens)
        self.prefix_cache.publish(request)
        if sampled is None:
            return
        if sampled.error:
            # Whatever made its logits bad may sit in its blocks.
            self.pool.withdraw(request.blocks.block_ids)
            self._end(request, Stop(FinishReason.ERROR), error=sampled.error)
            return
        request.token_ids.append(sampled.token_id)
        if request.grammar:
            request.grammar.accept(sampled.token_id)
        self._waiting.charge_output(request)
        if stop := find_stop(request, self._eos_token_ids):
            self._end(request, stop, sampled=sampled)
        else:
            self._outputs.add(request, sampled=sampled)

    def _take_in_verified(self, request: Request, num_drafts: int, tokens: tuple[SampledToken, ...]) -> None:
        """As if each token that the model drew had had a step of its own. What was computed of other drafts is void."""
        assert self._speculation, "there are drafts that nobody planned"
        num_before = request.num_output_tokens
        for token in tokens:
            if request.state is RequestState.RUNNING:
                self._take_in(request, 1, token)
        request.blocks.shrink_to(request.num_tokens)
        self._speculation.note(num_drafts, min(request.num_output_tokens - num_before, len(tokens) - 1))

    def _end(self, request: Request, stop: Stop, *, sampled: SampledToken | None = None, error: str = "") -> None:
        """The one place that all ends pass: afterwards nothing knows the request, and one terminal output is out."""
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
        del self._live[request.request_id]
        self._deadlines.discard(request)
        is_in_flight = sampled is None and self._in_flight.works_on(request.request_id)
        self._waiting.settle(request, is_in_flight=is_in_flight)
        request.move_to(STATE_AFTER[stop.reason])
        self._in_flight.release(request.blocks, still_read=is_in_flight)
        if stop.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._forecast.record(request.num_output_tokens)
        self._outputs.add(request, sampled=sampled, stop=stop, error=error)
