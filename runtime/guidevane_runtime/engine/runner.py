"""Runs one planned step on the model: lays out tokens, computes, samples. The torch side of core.plan.ModelRunner."""

import logging
import time
from dataclasses import dataclass
from itertools import chain

import torch
from msgspec.structs import replace

from guidevane_kernels import AttentionBatch, KVCache, provider_name
from guidevane_runtime.core.messages import EngineSettings, SamplingParams
from guidevane_runtime.core.plan import ScheduledBatch, ScheduledSeq, StepOutput
from guidevane_runtime.engine.device_placement import Placement, dtype_name, ensure_fits, num_cache_blocks, place
from guidevane_runtime.engine.model import LlamaModel
from guidevane_runtime.engine.model_config import ModelConfig
from guidevane_runtime.engine.sampler import Sampler
from guidevane_runtime.engine.weights import WeightSource, open_source
from guidevane_runtime.engine.weights_load import load_weights, weight_bytes
from guidevane_runtime.errors import DeviceError

logger = logging.getLogger(__name__)


class TorchModelRunner:
    """Model, KV cache and sampler of one engine."""

    def __init__(self, model: LlamaModel, cache: KVCache, sampler: Sampler, *, block_size: int) -> None:
        self._model, self._cache, self._sampler, self._block_size = model, cache, sampler, block_size

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Compute every scheduled token once; sample where a sequence asks for it."""
        if not batch.seqs:
            return StepOutput(())
        sampling = [seq for seq in batch.seqs if seq.samples]
        logits = self._forward(batch.seqs)
        sampled = iter(self._sampler.sample(logits, sampling) if sampling else [])
        return StepOutput(tuple(next(sampled) if seq.samples else None for seq in batch.seqs))

    def warm_up(self) -> None:
        """Run one small prefill and one decode in block 1, so that the first request does not pay for first calls."""
        params = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        prefill = ScheduledSeq("warm-up", (0,) * self._block_size, 0, (1,), samples=True, params=params)
        self.execute(ScheduledBatch(0, (prefill,), 0))
        self.execute(ScheduledBatch(0, (replace(prefill, token_ids=(0,)),), 0))

    def _forward(self, seqs: tuple[ScheduledSeq, ...]) -> torch.Tensor:
        """Logits of the last token of each sequence that samples, [num_sampling, vocab_size] float32."""
        device = self._model.device
        q_lens = [len(seq.token_ids) for seq in seqs]
        layout = AttentionBatch.build(
            q_lens=q_lens,
            kv_lens=[seq.start + len(seq.token_ids) for seq in seqs],
            block_ids=[seq.block_ids for seq in seqs],
            block_size=self._block_size,
            device=device,
        )
        token_ids = torch.tensor(list(chain.from_iterable(seq.token_ids for seq in seqs)))
        ranges = (range(seq.start, seq.start + len(seq.token_ids)) for seq in seqs)
        positions = torch.tensor(list(chain.from_iterable(ranges)))
        rows = _last_rows(seqs)
        # Decodes only: the rows are all tokens in order, and no copy is needed to pick them.
        logit_rows = None if len(rows) == token_ids.shape[0] else torch.tensor(rows, dtype=torch.int64).to(device)
        return self._model.forward(token_ids.to(device), positions.to(device), layout, self._cache, logit_rows)


def _last_rows(seqs: tuple[ScheduledSeq, ...]) -> list[int]:
    """Index of the last token of each sequence that samples, in the step's layout."""
    rows, end = [], 0
    for seq in seqs:
        end += len(seq.token_ids)
        if seq.samples:
            rows.append(end - 1)
    return rows


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner ready to execute, and what the engine must know about it."""

    runner: TorchModelRunner
    config: ModelConfig
    num_blocks: int
    """Usable KV blocks: ids 1 to num_blocks. Block 0 is the null block and not counted."""
    block_size: int
    dtype: str
    device: str
    eos_token_ids: frozenset[int]
    max_model_len: int
    """What the model and the envelope allow, whichever is less."""


def load_runner(settings: EngineSettings) -> LoadedModel:
    """Load the model that `settings` name, size and allocate its KV cache, run it once. Raises a StartError."""
    start_s = time.monotonic()
    placement = place(settings)
    source = open_source(settings.model_path)
    try:
        loaded, provider = _load(settings, placement, source)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"{source.path} does not fit into the memory of {placement.device} with its KV cache: {error}; "
            "lower --gpu-memory-utilization-percent or --kv-cache-memory, or take a larger GPU"
        ) from error
    except ValueError as error:
        # The kernels' own checks, of their setting and of shapes: they fail again however often it is tried.
        raise DeviceError(f"{source.path} can't be computed on {placement.device}: {error}") from error
    _log_loaded(loaded, source.path.name, provider, time.monotonic() - start_s)
    return loaded


def _load(settings: EngineSettings, placement: Placement, source: WeightSource) -> tuple[LoadedModel, str]:
    """The loaded model, and the name of the kernels that serve its cache."""
    config = source.config
    dtype, device = placement.dtype, placement.device
    ensure_fits(settings, config, placement, weight_bytes=weight_bytes(config, dtype))
    max_model_len = min(settings.envelope.max_model_len or config.max_model_len, config.max_model_len)
    model = LlamaModel(config, load_weights(source, dtype=dtype, device=device), max_model_len=max_model_len)
    num_blocks = num_cache_blocks(settings, config, placement, max_model_len=max_model_len)
    cache = KVCache.alloc(
        num_layers=config.num_layers,
        num_blocks=num_blocks + 1,
        block_size=settings.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )
    runner = TorchModelRunner(model, cache, Sampler(config.eos_token_ids), block_size=settings.block_size)
    runner.warm_up()
    loaded = LoadedModel(
        runner=runner,
        config=config,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        dtype=dtype_name(dtype),
        device=str(device),
        eos_token_ids=config.eos_token_ids,
        max_model_len=max_model_len,
    )
    return loaded, provider_name(cache)


def _log_loaded(loaded: LoadedModel, name: str, provider: str, load_s: float) -> None:
    logger.info(
        "model loaded",
        extra={
            "model": name,
            "dtype": loaded.dtype,
            "device": loaded.device,
            "kernels": provider,
            "kv_blocks": loaded.num_blocks,
            "kv_tokens": loaded.num_blocks * loaded.block_size,
            "load_s": round(load_s, 1),
        },
    )
