"""Where and in which numbers a model computes, and how much memory its KV cache gets."""

import logging
from dataclasses import dataclass

import torch

from guidevane_kernels import KVCache
from guidevane_runtime.core.messages import EngineSettings
from guidevane_runtime.engine.device import available_cpus, memory_limit
from guidevane_runtime.engine.model_config import ModelConfig
from guidevane_runtime.errors import DeviceError

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

CPU_CACHE_SHARE = 4
"""On CPU the KV cache takes a quarter of the memory limit: weights, activations and the server want the rest."""

MAX_CPU_CACHE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Placement:
    device: torch.device
    dtype: torch.dtype


def place(settings: EngineSettings) -> Placement:
    """Resolve device and dtype, and set the number of threads of this process where it computes on CPU."""
    device = resolve_device(settings.device)
    if device.type == "cpu":
        torch.set_num_threads(settings.num_threads or available_cpus())
    return Placement(device, resolve_dtype(settings.dtype, device))


def resolve_device(name: str) -> torch.device:
    """auto: CUDA where there is one."""
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    if name == "cuda" and not has_cuda:
        raise DeviceError("device is cuda, and no CUDA device is visible; use --device cpu, or give the pod a GPU")
    if name not in ("cpu", "cuda"):
        raise DeviceError(f"device is {name!r}; it is one of auto, cpu, cuda")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 where the device multiplies it natively. Elsewhere it is several times slower than float32."""
    if name == "auto":
        return torch.bfloat16 if has_native_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise DeviceError(f"dtype is {name!r}; it is one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def has_native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return any(getattr(torch.cpu, name, _no)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))


def num_cache_blocks(settings: EngineSettings, config: ModelConfig, placement: Placement, *, max_model_len: int) -> int:
    """Usable blocks (the null block comes on top): what the memory holds, and no more than the envelope can fill."""
    block_bytes = KVCache.bytes_per_block(
        num_layers=config.num_layers,
        block_size=settings.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=placement.dtype,
    )
    budget = cache_budget_bytes(settings, config, placement)
    affordable = budget // block_bytes - 1
    if affordable < 1:
        raise DeviceError(
            f"the KV cache may take {budget} bytes and a block of {settings.block_size} tokens takes {block_bytes} "
            f"(one more is reserved); raise --kv-cache-memory to {2 * block_bytes} bytes or more"
        )
    useful = settings.envelope.max_num_seqs * -(-max_model_len // settings.block_size)
    if affordable * settings.block_size < max_model_len:
        logger.warning(
            "the KV cache holds fewer tokens than one request of the longest kind needs; longer ones are refused",
            extra={"cache_tokens": affordable * settings.block_size, "max_model_len": max_model_len},
        )
    return min(affordable, useful)


def ensure_fits(settings: EngineSettings, config: ModelConfig, placement: Placement, *, weight_bytes: int) -> None:
    """Refuse a model that the memory limit can't hold, before the kernel kills this process for it again and again."""
    if placement.device.type != "cpu":
        return
    cache_bytes = cache_budget_bytes(settings, config, placement)
    limit = memory_limit()
    if weight_bytes + cache_bytes > limit:
        raise DeviceError(
            f"the model needs {weight_bytes >> 20} MiB for weights in {dtype_name(placement.dtype)} and "
            f"{cache_bytes >> 20} MiB for its KV cache, the memory limit is {limit >> 20} MiB; raise "
            "resources.limits.memory, lower --kv-cache-memory, or take a smaller model"
        )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cache_budget_bytes(settings: EngineSettings, config: ModelConfig, placement: Placement) -> int:
    """Bytes for the KV cache. Call it when the weights are loaded: on CUDA it is what they left over."""
    if settings.kv_cache_bytes is not None:
        return settings.kv_cache_bytes
    if placement.device.type == "cpu":
        return min(memory_limit() // CPU_CACHE_SHARE, MAX_CPU_CACHE_BYTES)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(placement.device)
    allowed = int(total * settings.gpu_memory_utilization) - (total - free)
    budget = allowed - activation_bytes(settings, config, placement.dtype)
    if budget <= 0:
        raise DeviceError(
            f"nothing is left of {total >> 20} MiB of GPU memory for the KV cache: {(total - free) >> 20} MiB are in "
            f"use, and --gpu-memory-utilization-percent is {settings.gpu_memory_utilization * 100:.0f}; raise it, "
            "lower envelope.maxNumBatchedTokens, or take a GPU with more memory"
        )
    return budget


def activation_bytes(settings: EngineSettings, config: ModelConfig, dtype: torch.dtype) -> int:
    """Upper bound of what the largest step allocates beside weights and cache."""
    # widest moment of a layer: residual, its norm, gate_up and the product; or residual, qkv twice, attention
    per_token = 4 * config.hidden_size + 2 * config.qkv_size + 3 * config.intermediate_size
    # logits in the model's dtype and in float32, and two more float32 copies in the sampler
    per_row = config.vocab_size * (dtype.itemsize + 3 * 4 + 8)
    envelope = settings.envelope
    return envelope.max_num_batched_tokens * per_token * dtype.itemsize + envelope.max_num_seqs * per_row


def _no() -> bool:
    return False
