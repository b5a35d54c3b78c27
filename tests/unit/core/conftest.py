"""A scheduler with a fake runner, driven by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from guidevane_api.admin import LimitsSource, ShrinkMode
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.budget import SHORT_RESERVE
from guidevane_runtime.core.constraints import PlanConstraint
from guidevane_runtime.core.fake_runner import FakeRunner
from guidevane_runtime.core.grammar import GrammarState
from guidevane_runtime.core.messages import (
    SHARED_SCOPE,
    CacheScope,
    FinishReason,
    RequestOutput,
    SamplingParams,
    SetLimits,
    Submit,
)
from guidevane_runtime.core.plan import ScheduledBatch, load_of
from guidevane_runtime.core.prefix_cache import MIN_AWAITED_TOKENS, PrefixCache
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.core.speculation import Speculation
from guidevane_runtime.core.step_time import CostModel
from guidevane_runtime.core.tenants import RequestClass

VOCAB_SIZE = 1000


class Rig:
    """Everything that happened, by request id."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        eos: frozenset[int],
        shares: bool,
        min_awaited_tokens: int,
        constraints: Sequence[PlanConstraint],
        speculation: Speculation | None,
        model_len: int,
        short_reserve: float,
        costs: CostModel | None,
        limits: dict[str, int],
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.runner = FakeRunner(num_blocks, block_size, VOCAB_SIZE)
        self.scheduler = Scheduler(
            self.pool,
            SchedulerLimits(**limits),
            max_model_len=model_len,
            eos_token_ids=eos,
            prefix_cache=PrefixCache(self.pool, is_enabled=shares, min_awaited_tokens=min_awaited_tokens),
            constraints=constraints,
            speculation=speculation,
            short_reserve=short_reserve,
        )
        self.costs = costs
        self.outputs: list[RequestOutput] = []
        self.batches: list[ScheduledBatch] = []
        self.now_s = 0.0

    def submit(
        self,
        name: str,
        num_prompt_tokens: int = 4,
        *,
        priority: int = 0,
        tenant: str = "",
        scope: CacheScope = SHARED_SCOPE,
        grammar: GrammarState | None = None,
        request_class: RequestClass = RequestClass.INTERACTIVE,
        **params: Any,
    ) -> Submit:
        """A prompt that all names with the same first letter share."""
        prompt = tuple((ord(name[0]) + i) % VOCAB_SIZE for i in range(num_prompt_tokens))
        sampling = SamplingParams(**{"max_tokens": 8, "seed": 0, **params})
        submit = Submit(
            name,
            prompt,
            sampling,
            arrival_s=self.now_s,
            priority=priority,
            tenant=tenant,
            request_class=request_class,
            cache_scope=scope,
        )
        self.scheduler.submit(submit, grammar=grammar)
        self.listen()
        self.now_s += 0.001
        return submit

    def plan(self) -> ScheduledBatch:
        batch = self.scheduler.schedule(self.now_s)
        self.batches.append(batch)
        self.listen()
        return batch

    def finish(self, batch: ScheduledBatch) -> None:
        self.scheduler.apply(batch, self.runner.execute(batch))
        if self.costs is not None:
            load = load_of(batch)
            self.now_s += self.costs.seconds(load)
            self.scheduler.note_step_time(load, self.costs.seconds(load))
        self.listen()

    def step(self, num_steps: int = 1) -> dict[str, int]:
        """Run steps; tokens per request in the last one."""
        batch = None
        for _ in range(num_steps):
            batch = self.plan()
            self.finish(batch)
        assert batch is not None
        return {seq.request_id: len(seq.token_ids) for seq in batch.seqs}

    def run_to_end(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("work does not end")

    def set_limits(self, mode: ShrinkMode = ShrinkMode.DRAIN, **changes: int) -> None:
        now = self.scheduler.limits
        limits = now.target.model_copy(update=changes)
        self.scheduler.set_limits(SetLimits(limits, now.epoch + 1, LimitsSource.SPEC, mode))

    def listen(self) -> None:
        self.outputs += self.scheduler.take_outputs()

    def tokens(self, name: str) -> tuple[int, ...]:
        return tuple(t for output in self.outputs if output.request_id == name for t in output.new_token_ids)

    def ends(self, name: str) -> list[FinishReason]:
        return [o.finish_reason for o in self.outputs if o.request_id == name and o.finish_reason is not None]

    def end_output(self, name: str) -> RequestOutput:
        return next(o for o in self.outputs if o.request_id == name and o.finish_reason is not None)

    def first_step(self, name: str) -> int:
        return next(batch.step for batch in self.batches if any(seq.request_id == name for seq in batch.seqs))

    def running(self) -> set[str]:
        return {request.request_id for request in self.scheduler.running}


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig() -> MakeRig:
    def make(
        *,
        num_blocks: int = 100,
        block_size: int = 4,
        eos: frozenset[int] = frozenset(),
        shares: bool = True,
        min_awaited_tokens: int = MIN_AWAITED_TOKENS,
        constraints: Sequence[PlanConstraint] = (),
        speculation: Speculation | None = None,
        model_len: int = 4096,
        short_reserve: float = SHORT_RESERVE,
        costs: CostModel | None = None,
        **limits: int,
    ) -> Rig:
        """costs: what steps take. Without them they take no time."""
        return Rig(
            num_blocks=num_blocks,
            block_size=block_size,
            eos=eos,
            shares=shares,
            min_awaited_tokens=min_awaited_tokens,
            constraints=constraints,
            speculation=speculation,
            model_len=model_len,
            short_reserve=short_reserve,
            costs=costs,
            limits=limits,
        )

    return make
