"""The real scheduler drives the real model: neither new limits in mid-run nor a short KV cache changes a token."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from guidevane_api.admin import LimitsSource, ShrinkMode
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import FinishReason, SamplingParams, SetLimits, Submit
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.engine.runner import LoadedModel

NUM_TOKENS = 40
PROMPT_LENS = (1, 7, 15, 16, 17, 33, 64, 90)
WIDE = SchedulerLimits(max_model_len=512, kv_cache_utilization_limit_percent=100)
NARROW = WIDE.model_copy(
    update={"max_num_seqs": 2, "max_num_batched_tokens": 12, "prefill_chunk_size": 5, "decode_token_budget": 2}
)
MIDDLE = WIDE.model_copy(update={"max_num_seqs": 5, "prefill_chunk_size": 16, "max_partial_prefills": 1})


@pytest.fixture(scope="module")
def loaded(tiny_model_dir: Callable[..., Path], load: Callable[..., LoadedModel]) -> LoadedModel:
    # A vocabulary whose end token never comes first: every request runs to its length.
    return load(tiny_model_dir(eos_token_id=198))


@pytest.fixture(scope="module")
def requests() -> list[tuple[list[int], SamplingParams]]:
    """Every other one is drawn, half of those with penalties."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for i, length in enumerate(PROMPT_LENS):
        params = SamplingParams(
            max_tokens=NUM_TOKENS,
            seed=i,
            temperature=0.8 if i % 2 else 0.0,
            top_p=0.9,
            repetition_penalty=1.2 if i % 4 == 3 else 1.0,
            ignore_eos=True,
        )
        made.append((torch.randint(3, 199, (length,), generator=generator).tolist(), params))
    return made


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel, requests: list[tuple[list[int], SamplingParams]], drive: Any) -> list[list[int]]:
    return [drive(loaded).generate([prompt], [params], num_tokens=NUM_TOKENS)[0] for prompt, params in requests]


@dataclass
class Outcome:
    tokens: list[list[int]] = field(default_factory=lambda: [[] for _ in PROMPT_LENS])
    finished: int = 0
    num_preemptions: int = 0
    num_blocks_used: int = 0


def run(
    loaded: LoadedModel,
    requests: list[tuple[list[int], SamplingParams]],
    *,
    num_blocks: int,
    changes: dict[int, tuple[SchedulerLimits, ShrinkMode]],
    expect_short_answers: bool = False,
) -> Outcome:
    """All requests at once under WIDE; before step n the limits `changes[n]` come in."""
    pool = BlockPool(num_blocks, loaded.block_size)
    scheduler = Scheduler(pool, WIDE, max_model_len=512, eos_token_ids=loaded.eos_token_ids)
    if expect_short_answers:
        answer_briefly(scheduler, loaded)
    for i, (prompt, params) in enumerate(requests):
        scheduler.submit(Submit(str(i), tuple(prompt), params, arrival_s=float(i)))
    outcome, step = Outcome(), 0
    while scheduler.has_work:
        step += 1
        if step in changes:
            limits, mode = changes[step]
            assert scheduler.set_limits(SetLimits(limits, epoch=step, source=LimitsSource.SPEC, mode=mode))
        batch = scheduler.schedule(float(step) / 1000)
        assert batch.seqs or step in changes
        scheduler.apply(batch, loaded.runner.execute(batch))
        for output in scheduler.take_outputs():
            outcome.tokens[int(output.request_id)] += output.new_token_ids
            outcome.finished += output.finish_reason is FinishReason.LENGTH
    stats = scheduler.stats(1.0)
    outcome.num_preemptions, outcome.num_blocks_used = stats.num_preemptions, stats.num_blocks_used
    return outcome


def answer_briefly(scheduler: Scheduler, loaded: LoadedModel) -> None:
    """Teach the scheduler that answers are short, so that it admits more than the cache can hold."""
    params = SamplingParams(max_tokens=8, seed=0, temperature=0.0, ignore_eos=True)
    for i in range(20):
        scheduler.submit(Submit(f"brief {i}", (5,), params, arrival_s=0.0))
    while scheduler.has_work:
        batch = scheduler.schedule(0.0)
        scheduler.apply(batch, loaded.runner.execute(batch))
    scheduler.take_outputs()


def test_tokens_are_those_of_each_request_alone(
    loaded: LoadedModel, requests: list[tuple[list[int], SamplingParams]], alone: list[list[int]]
) -> None:
    outcome = run(loaded, requests, num_blocks=100, changes={})

    assert outcome.tokens == alone
    assert (outcome.finished, outcome.num_blocks_used) == (len(requests), 0)


@pytest.mark.parametrize("mode", [ShrinkMode.DRAIN, ShrinkMode.PREEMPT])
def test_tokens_survive_limits_that_change_in_mid_run(
    mode: ShrinkMode,
    loaded: LoadedModel,
    requests: list[tuple[list[int], SamplingParams]],
    alone: list[list[int]],
) -> None:
    changes = {3: (NARROW, mode), 30: (MIDDLE, mode), 60: (NARROW, mode), 90: (WIDE, mode)}

    outcome = run(loaded, requests, num_blocks=100, changes=changes)

    assert outcome.tokens == alone
    assert (outcome.finished, outcome.num_blocks_used) == (len(requests), 0)
    assert (outcome.num_preemptions > 0) == (mode is ShrinkMode.PREEMPT)


def test_tokens_survive_preemption_for_lack_of_blocks(
    loaded: LoadedModel, requests: list[tuple[list[int], SamplingParams]], alone: list[list[int]]
) -> None:
    # The longest request needs 9 blocks of 16, all of them together 40.
    outcome = run(loaded, requests, num_blocks=18, changes={}, expect_short_answers=True)

    assert outcome.tokens == alone
    assert outcome.num_preemptions > 0
    assert (outcome.finished, outcome.num_blocks_used) == (len(requests), 0)
