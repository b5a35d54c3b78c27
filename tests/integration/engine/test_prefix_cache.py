"""Prefix hits on the real model: a token is the same whether its prompt was computed or found."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import SHARED_SCOPE, CacheScope, SamplingParams, Submit
from guidevane_runtime.core.prefix_cache import PrefixCache
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.engine.runner import LoadedModel

NUM_TOKENS = 24
PREFIX_LEN = 70
PROMPT_LENS = (70, 71, 80, 81, 95, 96, 97)
"""All begin with the same 70 tokens: 4 blocks of 16 and a part of the next."""
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded(tiny_model_dir: Callable[..., Path], load: Callable[..., LoadedModel]) -> LoadedModel:
    return load(tiny_model_dir())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(3, 199, (max(PROMPT_LENS), len(PROMPT_LENS)), generator=generator).T.tolist()
    return [[*tokens[0][:PREFIX_LEN], *row[PREFIX_LEN:length]] for row, length in zip(tokens, PROMPT_LENS, strict=True)]


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel, prompts: list[list[int]], drive: Any) -> list[list[int]]:
    """Each prompt computed from its first token, with nobody beside it."""
    return [drive(loaded).generate([prompt], [PARAMS], num_tokens=NUM_TOKENS)[0] for prompt in prompts]


class Serving:
    """The real scheduler over the real model, kept over several rounds of requests."""

    def __init__(self, loaded: LoadedModel, *, num_blocks: int = 100, chunk: int = 2048) -> None:
        self._loaded = loaded
        self.pool = BlockPool(num_blocks, loaded.block_size)
        self.scheduler = Scheduler(
            self.pool,
            SchedulerLimits(max_model_len=512, prefill_chunk_size=chunk, kv_cache_utilization_limit_percent=100),
            max_model_len=512,
            eos_token_ids=loaded.eos_token_ids,
            prefix_cache=PrefixCache(self.pool, model_digest=b"tiny"),
        )
        self._num_rounds = 0

    def generate(self, prompts: Sequence[Sequence[int]], scope: CacheScope = SHARED_SCOPE) -> list[list[int]]:
        """All prompts at once, to their ends."""
        self._num_rounds += 1
        names = [f"{self._num_rounds}/{i}" for i in range(len(prompts))]
        for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            self.scheduler.submit(Submit(name, tuple(prompt), PARAMS, arrival_s=float(i), cache_scope=scope))
        tokens: dict[str, list[int]] = {name: [] for name in names}
        while self.scheduler.has_work:
            batch = self.scheduler.schedule(0.0)
            self.scheduler.apply(batch, self._loaded.runner.execute(batch))
            for output in self.scheduler.take_outputs():
                tokens[output.request_id] += output.new_token_ids
        return [tokens[name] for name in names]

    @property
    def num_hit_tokens(self) -> int:
        return self.scheduler.stats(0.0).num_prefix_hit_tokens


@pytest.mark.parametrize("chunk", [2048, 20])
def test_greedy_tokens_are_those_of_a_request_alone_with_and_without_a_hit(
    chunk: int, loaded: LoadedModel, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """I10"""
    serving = Serving(loaded, chunk=chunk)
    rounds, hits = [], []
    for _ in range(2):
        rounds.append(serving.generate(prompts))
        hits.append(serving.num_hit_tokens)
    assert rounds == [alone, alone]
    # In the second round every prompt is there, but for its last token and the part of a block that it is in.
    assert hits[1] - hits[0] == sum((length - 1) // 16 * 16 for length in PROMPT_LENS)


def test_the_next_turn_of_a_conversation_hits_the_answer_before_and_goes_on_the_same(
    loaded: LoadedModel, prompts: list[list[int]], alone: list[list[int]], drive: Any
) -> None:
    history = [*prompts[0], *alone[0], 7, 8, 9]
    without = drive(loaded).generate([history], [PARAMS], num_tokens=NUM_TOKENS)
    serving = Serving(loaded)
    serving.generate(prompts[:1])
    assert serving.generate([history]) == without
    assert serving.num_hit_tokens == (PREFIX_LEN + NUM_TOKENS - 1) // 16 * 16


def test_tokens_are_the_same_while_cached_blocks_are_evicted_all_the_time(
    loaded: LoadedModel, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    # One request needs up to 8 blocks of 16, so in 12 of them the cache is always in somebody's way.
    serving = Serving(loaded, num_blocks=12, chunk=32)
    assert [serving.generate(prompts) for _ in range(2)] == [alone, alone]
    assert serving.num_hit_tokens > 0


def test_another_tenant_computes_the_same_prompt_again(
    loaded: LoadedModel, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """D10, I15"""
    serving = Serving(loaded)
    serving.generate(prompts[:1], CacheScope(tenant="a"))
    assert serving.generate(prompts[:1], CacheScope(tenant="b")) == alone[:1]
    assert serving.num_hit_tokens == 0
