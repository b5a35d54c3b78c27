"""A request's tokens do not depend on its batch, on chunking or on preemption (float32)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from guidevane_runtime.core.messages import SamplingParams
from guidevane_runtime.engine.runner import LoadedModel

NUM_TOKENS = 40
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0)
PROMPT_LENS = (1, 2, 15, 16, 17, 31, 33, 70)
"""Round the block size of 16, and one longer than the longest chunk below."""


@pytest.fixture(scope="module")
def loaded(tiny_model_dir: Callable[..., Path], load: Callable[..., LoadedModel]) -> LoadedModel:
    return load(tiny_model_dir())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, 199, (length,), generator=generator).tolist() for length in PROMPT_LENS]


@pytest.fixture(scope="module")
def sampling() -> list[SamplingParams]:
    """One request of every kind."""
    shared = {"max_tokens": NUM_TOKENS, "temperature": 0.9}
    return [
        SamplingParams(seed=1, **shared),
        SamplingParams(seed=2, top_k=5, **shared),
        SamplingParams(seed=3, top_p=0.8, **shared),
        SamplingParams(seed=4, min_p=0.1, **shared),
        GREEDY,
        SamplingParams(seed=-5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, **shared),
        SamplingParams(seed=2**63, top_k=20, top_p=0.9, min_p=0.01, **shared),
        SamplingParams(seed=6, logit_bias=((7, 5.0), (8, -100.0)), min_tokens=30, **shared),
    ]


@pytest.fixture(scope="module")
def greedy_alone(loaded: LoadedModel, prompts: list[list[int]], drive: Any) -> list[list[int]]:
    return [drive(loaded).generate([prompt], [GREEDY], num_tokens=NUM_TOKENS)[0] for prompt in prompts]


@pytest.fixture(scope="module")
def sampled_alone(
    loaded: LoadedModel, prompts: list[list[int]], sampling: list[SamplingParams], drive: Any
) -> list[list[int]]:
    return [
        drive(loaded).generate([prompt], [params], num_tokens=NUM_TOKENS)[0]
        for prompt, params in zip(prompts, sampling, strict=True)
    ]


@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 64, 1 << 20])
def test_greedy_tokens_of_a_batch_are_those_of_each_request_alone_at_any_chunk_size(
    chunk: int, loaded: LoadedModel, prompts: list[list[int]], greedy_alone: list[list[int]], drive: Any
) -> None:
    together = drive(loaded).generate(prompts, [GREEDY] * len(prompts), num_tokens=NUM_TOKENS, chunk=chunk)

    assert together == greedy_alone


@pytest.mark.parametrize("preempt_at", [(1,), (15, 16, 17), tuple(range(1, 21))], ids=["first", "edges", "20 times"])
def test_greedy_tokens_survive_preemption(
    preempt_at: tuple[int, ...],
    loaded: LoadedModel,
    prompts: list[list[int]],
    greedy_alone: list[list[int]],
    drive: Any,
) -> None:
    params = [GREEDY] * len(prompts)

    together = drive(loaded).generate(prompts, params, num_tokens=NUM_TOKENS, chunk=7, preempt_at=preempt_at)

    assert together == greedy_alone


@pytest.mark.parametrize(("chunk", "preempt_at"), [(1 << 20, ()), (5, ()), (9, (3, 16, 25))])
def test_seeded_draws_are_those_of_each_request_alone(
    chunk: int,
    preempt_at: tuple[int, ...],
    loaded: LoadedModel,
    prompts: list[list[int]],
    sampling: list[SamplingParams],
    sampled_alone: list[list[int]],
    drive: Any,
) -> None:
    together = drive(loaded).generate(prompts, sampling, num_tokens=NUM_TOKENS, chunk=chunk, preempt_at=preempt_at)

    assert together == sampled_alone


def test_another_seed_gives_another_text(loaded: LoadedModel, prompts: list[list[int]], drive: Any) -> None:
    params = [SamplingParams(max_tokens=NUM_TOKENS, seed=seed, temperature=1.5) for seed in range(4)]

    texts = drive(loaded).generate([prompts[0]] * 4, params, num_tokens=NUM_TOKENS)

    assert len({tuple(text) for text in texts}) == 4


def test_a_step_in_which_nothing_samples_returns_no_token(loaded: LoadedModel, prompts: list[list[int]]) -> None:
    from guidevane_runtime.core.plan import ScheduledBatch, ScheduledSeq, StepOutput

    part = ScheduledSeq("a", tuple(prompts[2][:4]), 0, (1,), samples=False, params=GREEDY)

    assert loaded.runner.execute(ScheduledBatch(0, (part,), 0)) == StepOutput((None,))
    assert loaded.runner.execute(ScheduledBatch(1, (), 0)) == StepOutput(())
