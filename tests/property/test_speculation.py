"""Drafts of any quality beside random traffic: the output is what it would be without them, and every sum adds up."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from guidevane_api.admin import LimitsSource, ShrinkMode
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.fake_runner import FakeRunner
from guidevane_runtime.core.messages import AbortCause, SamplingParams, SetLimits, Submit
from guidevane_runtime.core.plan import ScheduledBatch, load_of
from guidevane_runtime.core.prefix_cache import PrefixCache
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.core.speculation import Speculation

VOCAB_SIZE = 7
"""Small: drafts are right by chance, and texts end early."""
EOS_TOKEN_IDS = frozenset({0})
PREFIX = (3, 1, 4, 1, 5, 6, 2, 6, 5, 3)


@dataclass
class Guesses:
    """The truth with a mistake at some of its places, and too much of it."""

    runner: FakeRunner
    mistakes: Sequence[bool]

    def draft(self, token_ids: Sequence[int], max_drafts: int) -> list[int]:
        truth = self.runner.continuation(token_ids, max_drafts + 2)
        place = len(token_ids)
        return [(t + self.mistakes[(place + i) % len(self.mistakes)]) % (VOCAB_SIZE + 1) for i, t in enumerate(truth)]


limits_st = st.builds(
    SchedulerLimits,
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 30),
    prefill_token_budget=st.integers(1, 30),
    decode_token_budget=st.integers(1, 12),
    prefill_chunk_size=st.integers(1, 16),
    kv_cache_utilization_limit_percent=st.integers(30, 100),
)
request_st = st.tuples(st.integers(0, 10), st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8))
event_st = st.one_of(
    st.tuples(st.just("submit"), request_st, st.integers(1, 30)),
    st.tuples(st.just("abort"), st.integers(0, 12)),
    st.tuples(st.just("abort in flight"), st.integers(0, 12)),
    st.tuples(st.just("limits"), limits_st, st.sampled_from(ShrinkMode)),
    st.tuples(st.just("pause"), st.booleans()),
    st.tuples(st.just("step"), st.integers(1, 6)),
)


class World:
    def __init__(self, num_blocks: int, block_size: int, limits: SchedulerLimits, mistakes: Any, k: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.runner = FakeRunner(num_blocks, block_size, VOCAB_SIZE)
        self.speculation = Speculation(Guesses(self.runner, mistakes), max_drafts=k, vocab_size=VOCAB_SIZE)
        self.scheduler = Scheduler(
            self.pool,
            limits,
            max_model_len=64,
            eos_token_ids=EOS_TOKEN_IDS,
            prefix_cache=PrefixCache(self.pool, min_awaited_tokens=1),
            speculation=self.speculation,
        )
        self.expected: dict[str, tuple[int, ...]] = {}
        self.received: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    def submit(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        name = str(len(self.expected))
        room = min(64, self.pool.num_tokens + 1) - len(prompt)
        whole = self.runner.continuation(prompt, max(0, min(max_tokens, room)))
        end = next((i + 1 for i, token_id in enumerate(whole) if token_id in EOS_TOKEN_IDS), len(whole))
        self.expected[name], self.received[name] = whole[:end], []
        self.scheduler.submit(Submit(name, prompt, SamplingParams(max_tokens=max_tokens, seed=0), 0.0))
        self.listen()

    def set_limits(self, limits: SchedulerLimits, mode: ShrinkMode) -> None:
        self.scheduler.set_limits(SetLimits(limits, self.scheduler.limits.epoch + 1, LimitsSource.SPEC, mode))

    def step(self, aborted_in_flight: str = "") -> None:
        batch = self.scheduler.schedule(0.0)
        self.check(batch)
        output = self.runner.execute(batch)
        self.scheduler.abort(aborted_in_flight, AbortCause.CLIENT_GONE)
        self.scheduler.apply(batch, output)
        self.listen()
        assert self.speculation.num_drafted >= self.speculation.num_accepted >= 0
        for request in self.scheduler.running:
            assert len(request.blocks.block_ids) <= self.pool.num_blocks_for(request.num_tokens)

    def check(self, batch: ScheduledBatch) -> None:
        limits = self.scheduler.limits.target
        assert batch.num_tokens <= limits.max_num_batched_tokens
        load = load_of(batch)
        assert load.num_decodes <= limits.decode_token_budget
        assert load.num_prefill_tokens <= limits.prefill_token_budget
        for seq in batch.seqs:
            assert all(0 <= token_id < VOCAB_SIZE for token_id in seq.token_ids)
            written = seq.block_ids[seq.start // self.pool.block_size :]
            assert all(self.pool.num_refs(block_id) == 1 for block_id in written)
            assert not any(map(self.pool.is_published, written))
            assert len(seq.block_ids) * self.pool.block_size >= seq.start + len(seq.token_ids)

    def listen(self) -> None:
        for output in self.scheduler.take_outputs():
            assert output.request_id not in self.ended
            self.received[output.request_id] += output.new_token_ids
            got = tuple(self.received[output.request_id])
            assert got == self.expected[output.request_id][: len(got)]
            if output.finish_reason:
                self.ended[output.request_id] = output.finish_reason

    def act(self, event: Any) -> None:
        match event:
            case ("submit", (num_prefix, rest), max_tokens):
                self.submit((*PREFIX[:num_prefix], *rest), max_tokens)
            case ("abort", number):
                self.scheduler.abort(str(number), AbortCause.CANCELLED)
                self.listen()
            case ("abort in flight", number):
                self.step(str(number))
            case ("limits", limits, mode):
                self.set_limits(limits, mode)
            case ("pause", is_paused):
                self.speculation.is_paused = is_paused
            case ("step", num_steps):
                for _ in range(num_steps):
                    self.step()


@settings(max_examples=300)
@given(
    num_blocks=st.integers(3, 30),
    block_size=st.sampled_from([1, 2, 3, 4]),
    limits=limits_st,
    mistakes=st.lists(st.booleans(), min_size=1, max_size=7),
    max_drafts=st.integers(1, 6),
    events=st.lists(event_st, max_size=40),
)
def test_drafts_never_show_in_an_output(num_blocks, block_size, limits, mistakes, max_drafts, events) -> None:
    world = World(num_blocks, block_size, limits, mistakes, max_drafts)
    for event in events:
        world.act(event)
    for _ in range(5000):
        if not world.scheduler.has_work:
            break
        world.step()
    assert set(world.ended) == set(world.expected) and world.pool.num_used == 0
    for name, end in world.ended.items():
        if end in ("stop", "length"):
            assert tuple(world.received[name]) == world.expected[name]
