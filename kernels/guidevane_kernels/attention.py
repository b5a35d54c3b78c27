"""The public operations: they check what they are given, then call the cache's provider."""

import torch
from torch import Tensor

from guidevane_kernels.batch import AttentionBatch
from guidevane_kernels.kv_cache import AttentionParams, KVCache


def write_kv(cache: KVCache, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
    """Write this step's keys and values of one layer to the slots that `batch` gives them.

    k, v: [num_tokens, num_kv_heads, head_dim], the cache's dtype and device, last dim contiguous.
    """
    _check_layer(cache, layer)
    _check_batch(cache, batch)
    for name, tensor in (("k", k), ("v", v)):
        _check_tensor(name, tensor, cache, (batch.num_tokens, cache.spec.num_kv_heads, cache.spec.head_dim))
    if batch.num_tokens:
        cache.write(layer, k, v, batch)


def paged_attention(
    q: Tensor,
    cache: KVCache,
    layer: int,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's query tokens over its own keys in the cache, prefill and decode in one call.

    q: [num_tokens, num_q_heads, head_dim], the cache's dtype and device, last dim contiguous; num_q_heads is a
    multiple of num_kv_heads. Call `write_kv` first: this step's keys are read from the cache too.
    `sliding_window` W lets position p see keys in (p - W, p]; `softcap` c turns scores s into c * tanh(s / c).
    Returns `out`, or a new tensor of q's shape and dtype.
    """
    _check_layer(cache, layer)
    _check_batch(cache, batch)
    num_q_heads = _checked_q_heads(q, cache)
    shape = (batch.num_tokens, num_q_heads, cache.spec.head_dim)
    _check_tensor("q", q, cache, shape)
    params = _checked_params(scale, sliding_window, softcap)
    if out is None:
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    _check_tensor("out", out, cache, shape)
    if batch.num_tokens:
        cache.attend(q, layer, batch, params, out)
    return out


def provider_name(cache: KVCache) -> str:
    """Return the name of the provider that owns `cache`, for logs and metrics."""
    return cache.provider


def _check_layer(cache: KVCache, layer: int) -> None:
    if not 0 <= layer < cache.spec.num_layers:
        raise ValueError(f"layer is {layer}, the cache has layers 0 to {cache.spec.num_layers - 1}")


def _check_batch(cache: KVCache, batch: AttentionBatch) -> None:
    spec = cache.spec
    if batch.block_size != spec.block_size:
        raise ValueError(f"batch has block_size {batch.block_size}, the cache {spec.block_size}; build both with one")
    if batch.max_block_id >= spec.num_blocks:
        raise ValueError(f"batch uses block {batch.max_block_id}, the cache has blocks 1 to {spec.num_blocks - 1}")


def _check_tensor(name: str, tensor: Tensor, cache: KVCache, shape: tuple[int, ...]) -> None:
    spec = cache.spec
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, batch and cache ask for {shape}")
    if tensor.dtype != spec.dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}, the cache {spec.dtype}; convert {name} first")
    if tensor.device.type != spec.device.type:
        raise ValueError(f"{name} is on {tensor.device}, the cache on {spec.device}; move {name} first")
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name} has last stride {tensor.stride(-1)}, must be 1; call .contiguous() on it")


def _checked_q_heads(q: Tensor, cache: KVCache) -> int:
    if q.dim() != 3:
        raise ValueError(f"q has {q.dim()} dims, must have 3: [num_tokens, num_q_heads, head_dim]")
    num_q_heads, num_kv_heads = q.shape[1], cache.spec.num_kv_heads
    if num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"q has {num_q_heads} heads, must be a multiple of the cache's {num_kv_heads} KV heads")
    return int(num_q_heads)


def _checked_params(scale: float, sliding_window: int, softcap: float) -> AttentionParams:
    if sliding_window < 0:
        raise ValueError(f"sliding_window is {sliding_window}, must be 0 (off) or the number of visible keys")
    if softcap < 0:
        raise ValueError(f"softcap is {softcap}, must be 0 (off) or positive")
    return AttentionParams(scale, sliding_window, softcap)
