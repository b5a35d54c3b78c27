"""Each field of SchedulerLimits, lowered below its present use and raised again, under traffic.

Nobody who was inside ends differently; use falls to the new limit and stays there; what is reported as effective says
how far that has got; and a raised limit is used.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from guidevane_api.admin import ShrinkMode
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.messages import FinishReason
from guidevane_runtime.core.plan import ScheduledBatch
from guidevane_runtime.core.request import Request

HIGH = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "prefill_token_budget": 64,
    "decode_token_budget": 64,
    "prefill_chunk_size": 8,
    "max_partial_prefills": 6,
    "kv_cache_utilization_limit_percent": 90,
    "waiting_timeout_milliseconds": 600_000,
    "long_context_threshold_tokens": 100,
}
SHORT, LONG = 7, 60
"""Prompt tokens. A long one takes many chunks."""


@dataclass
class Phase:
    """What was seen while one burst of traffic ran."""

    names: list[str]
    batches: list[ScheduledBatch] = field(default_factory=list)
    num_running: list[int] = field(default_factory=list)
    prefills: list[list[Request]] = field(default_factory=list)
    """Those still in prefill after each step."""
    kv_percent_let_in: list[int] = field(default_factory=list)
    """Blocks in use with those who came in beside others, in percent."""
    waits_s: list[float] = field(default_factory=list)
    """Of those who started, before they did."""


def burst(rig: Any, letter: str) -> Phase:
    """Five short prompts with long answers, five long prompts with short ones; all texts are their own."""
    names = [f"{chr(ord(letter) + 70 * i)}{letter}" for i in range(10)]
    for i, name in enumerate(names):
        rig.submit(name, SHORT if i < 5 else LONG, max_tokens=40 if i < 5 else 4)
    return Phase(names)


def run(rig: Any, phase: Phase, num_steps: int = 10_000) -> Phase:
    for _ in range(num_steps):
        if not rig.scheduler.has_work:
            break
        step(rig, phase)
    return phase


def step(rig: Any, phase: Phase) -> None:
    before = rig.running()
    rig.now_s += 0.1
    batch = rig.plan()
    running = rig.scheduler.running
    new = [request for request in running if request.request_id not in before]
    if new and len(new) < len(running):
        phase.kv_percent_let_in.append(100 * rig.pool.num_used // rig.pool.num_blocks)
    phase.waits_s += [rig.now_s - r.submit.arrival_s for r in new if r.request_id in phase.names]
    phase.num_running.append(len(running))
    rig.finish(batch)
    phase.batches.append(batch)
    phase.prefills.append([request for request in rig.scheduler.running if request.num_uncomputed_tokens > 1])


def prefill_chunks(batch: ScheduledBatch) -> list[int]:
    return [len(seq.token_ids) for seq in batch.seqs if not seq.is_decode]


def prompts_let_in(rig: Any, phase: Phase) -> list[int]:
    return [SHORT if i < 5 else LONG for i, name in enumerate(phase.names) if rig.tokens(name)]


@dataclass(frozen=True)
class Case:
    """One field."""

    low: int
    highest: Callable[[Any, Phase], int]
    """Of what the field bounds, in a phase."""
    draining: Callable[[Any], int] | None = None
    """What is reported as effective right after it was lowered; None: it holds from the next step on."""
    cuts_waiting: bool = False
    """Whether it is there to end those who wait."""


def queue_is_the_doors(rig: Any, phase: Phase) -> int:
    """The scheduler only says how long its queue is; the door keeps newcomers out."""
    return 0


CASES = {
    "max_num_seqs": Case(3, lambda rig, p: max(p.num_running), lambda rig: len(rig.running())),
    "max_num_batched_tokens": Case(9, lambda rig, p: max(batch.num_tokens for batch in p.batches)),
    "prefill_token_budget": Case(5, lambda rig, p: max(sum(prefill_chunks(batch)) for batch in p.batches)),
    "decode_token_budget": Case(2, lambda rig, p: max(sum(s.is_decode for s in b.seqs) for b in p.batches)),
    "prefill_chunk_size": Case(3, lambda rig, p: max(max(prefill_chunks(b), default=0) for b in p.batches)),
    "max_partial_prefills": Case(
        1,
        lambda rig, p: max(map(len, p.prefills)),
        lambda rig: sum(request.num_uncomputed_tokens > 1 for request in rig.scheduler.running),
    ),
    "max_model_len": Case(50, lambda rig, p: max(n + 4 for n in prompts_let_in(rig, p))),
    "max_prompt_tokens": Case(20, lambda rig, p: max(prompts_let_in(rig, p))),
    "max_output_tokens": Case(3, lambda rig, p: max(len(rig.tokens(name)) for name in p.names)),
    "kv_cache_utilization_limit_percent": Case(
        10,
        lambda rig, p: max(p.kv_percent_let_in, default=0),
        lambda rig: -(-100 * rig.pool.num_used // rig.pool.num_blocks),
    ),
    "max_queued_requests": Case(1, queue_is_the_doors, lambda rig: len(rig.scheduler.waiting)),
    "max_queued_tokens": Case(
        1, queue_is_the_doors, lambda rig: sum(request.num_tokens for request in rig.scheduler.waiting)
    ),
    "waiting_timeout_milliseconds": Case(200, lambda rig, p: int(1000 * max(p.waits_s, default=0)), cuts_waiting=True),
    "long_context_threshold_tokens": Case(
        20,
        lambda rig, p: max(LONG if sum(r.num_prompt_tokens == LONG for r in at) > 1 else 20 for at in p.prefills),
        lambda rig: LONG,
    ),
}


def busy_rig(make_rig: Any) -> tuple[Any, Phase]:
    """Everything is in use: decodes, several prefills, and somebody waits."""
    rig = make_rig(num_blocks=200, shares=False, **HIGH)
    phase = run(rig, burst(rig, "a"), 2)
    assert len(rig.running()) == 8 and len(phase.prefills[-1]) == 3 and len(rig.scheduler.waiting) == 2
    return rig, phase


def assert_answered(rig: Any, name: str) -> None:
    num_prompt, num_output = (SHORT, 40) if len(rig.tokens(name)) > 4 else (LONG, 4)
    prompt = tuple((ord(name[0]) + i) % 1000 for i in range(num_prompt))
    assert rig.ends(name) == [FinishReason.LENGTH]
    assert rig.tokens(name) == rig.runner.continuation(prompt, num_output)


def test_every_field_has_a_case() -> None:
    assert set(CASES) == set(SchedulerLimits.model_fields)


@pytest.mark.parametrize("mode", ShrinkMode)
@pytest.mark.parametrize("name", CASES)
def test_a_limit_that_is_lowered_holds_in_the_end_and_cuts_nobody_off(make_rig, name: str, mode: ShrinkMode) -> None:
    case = CASES[name]
    rig, first = busy_rig(make_rig)
    waiting = {request.request_id for request in rig.scheduler.waiting}
    rig.set_limits(mode, **{name: case.low})
    expected = case.draining(rig) if case.draining else case.low
    assert getattr(rig.scheduler.effective_limits, name) == expected
    assert expected > case.low or case.draining is None
    run(rig, first)
    second = run(rig, burst(rig, "A"))
    assert case.highest(rig, second) <= case.low
    assert rig.scheduler.effective_limits == rig.scheduler.limits.target
    for one in first.names:
        if not (case.cuts_waiting and one in waiting):
            assert_answered(rig, one)


@pytest.mark.parametrize("name", CASES)
def test_a_limit_that_is_raised_is_used(make_rig, name: str) -> None:
    case = CASES[name]
    rig, _ = busy_rig(make_rig)
    rig.set_limits(**{name: case.low})
    run(rig, burst(rig, "A"))
    rig.set_limits(**{name: getattr(SchedulerLimits(**HIGH), name)})
    assert rig.scheduler.effective_limits == rig.scheduler.limits.target
    third = run(rig, burst(rig, "0"))
    if case.highest is not queue_is_the_doors:
        assert case.highest(rig, third) > case.low
    for one in third.names:
        assert_answered(rig, one)


def test_the_kv_limit_is_reported_as_high_as_use_until_use_has_fallen(make_rig) -> None:
    rig = make_rig(num_blocks=20, kv_cache_utilization_limit_percent=90)
    rig.submit("a", 16, max_tokens=20)
    rig.submit("x", 16, max_tokens=10)
    rig.step()
    rig.set_limits(kv_cache_utilization_limit_percent=35)
    shown, used = [], []
    while rig.scheduler.has_work:
        rig.step()
        shown.append(rig.scheduler.effective_limits.kv_cache_utilization_limit_percent)
        used.append(rig.pool.num_used * 5)
    # Both grow until x ends; from then on the limit holds, and a may grow above it.
    assert shown == [50, 50, 50, 50, 60, 60, 60, 60, *[35] * 11]
    assert shown[:8] == used[:8] and used[8] <= 35


def test_the_last_one_running_keeps_its_blocks_and_the_kv_limit_is_reported_at_that_floor(make_rig) -> None:
    rig = make_rig(num_blocks=20, kv_cache_utilization_limit_percent=90)
    rig.submit("a", 30, max_tokens=4)
    rig.submit("x", 16, max_tokens=20)
    rig.step()
    rig.set_limits(ShrinkMode.PREEMPT, kv_cache_utilization_limit_percent=10)
    rig.step()
    assert len(rig.running()) == 1
    effective = rig.scheduler.effective_limits.kv_cache_utilization_limit_percent
    assert effective == -(-100 * rig.pool.num_used // 20) > 10
    rig.run_to_end()
    assert rig.scheduler.effective_limits == rig.scheduler.limits.target
    assert {name: len(rig.tokens(name)) for name in "ax"} == {"a": 4, "x": 20}


def test_who_grows_above_a_kv_limit_that_holds_already_does_not_move_what_is_reported(make_rig) -> None:
    rig = make_rig(num_blocks=20, kv_cache_utilization_limit_percent=90)
    rig.submit("a", 8, max_tokens=30)
    rig.step()
    rig.set_limits(kv_cache_utilization_limit_percent=20)
    rig.step(20)
    assert rig.pool.num_used * 5 > 20
    assert rig.scheduler.effective_limits.kv_cache_utilization_limit_percent == 20


def test_the_one_block_that_every_kv_limit_allows_is_not_above_it(make_rig) -> None:
    rig = make_rig(num_blocks=20)
    rig.submit("a", 2, max_tokens=2)
    rig.step()
    rig.set_limits(kv_cache_utilization_limit_percent=1)
    assert rig.pool.num_used == 1
    assert rig.scheduler.effective_limits == rig.scheduler.limits.target


@pytest.mark.parametrize("lengths", [{"a": 40, "x": 60}, {"a": 40, "x": 60, "z": 20}])
def test_the_long_context_threshold_is_reported_at_the_second_longest_in_prefill(make_rig, lengths) -> None:
    """The longest may be long: one at a time is what the limit allows."""
    rig = make_rig(prefill_chunk_size=4, max_partial_prefills=4, long_context_threshold_tokens=100)
    for name, num_prompt_tokens in lengths.items():
        rig.submit(name, num_prompt_tokens)
    rig.step()
    rig.set_limits(long_context_threshold_tokens=10)
    assert rig.scheduler.effective_limits.long_context_threshold_tokens == 40
