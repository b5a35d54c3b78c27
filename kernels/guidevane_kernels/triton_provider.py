"""Paged attention in Triton: launches what `plans` decides. The provider on CUDA from compute capability 8.0 on.

Imported only when it is chosen. On CPU tensors it runs under TRITON_INTERPRET=1 alone, for tests.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from guidevane_kernels import triton_kernels
from guidevane_kernels.batch import AttentionBatch
from guidevane_kernels.kv_cache import AttentionParams, CacheSpec, KVCache
from guidevane_kernels.plans import (
    KV_CHUNK,
    AttentionPlan,
    AttentionShape,
    LaunchSpec,
    TileList,
    plan_attention,
    plan_work,
    plan_write,
)

TRITON_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

INTERPRETED_CAPABILITY = 90
"""Under the interpreter plans are those of Hopper, so that tests walk the same tiles."""


@dataclass(frozen=True)
class StepTiles:
    """One step's work list on the device, shared by all layers with the same shape."""

    decode: Tensor
    """[5, tiles] int32: the lists of TileList, in its order."""
    prefill: Tensor
    """[5, tiles] int32, likewise."""
    reduce: Tensor
    """[4, entries] int32: the lists of ReduceList, in its order."""
    partial: Tensor
    """[partial rows, num_q_heads, head_dim] fp32."""
    partial_lse: Tensor
    """[partial rows, num_q_heads] fp32, log2 units."""


class TritonKVCache(KVCache):
    """K and V as blocks: [num_layers, num_blocks, num_kv_heads, block_size, head_dim]."""

    provider = "triton"

    def __init__(self, spec: CacheSpec, *, kv_chunk: int = KV_CHUNK) -> None:
        """`kv_chunk`: keys of one decode program; only tests and benchmarks give another one."""
        super().__init__(spec)
        self._kv_chunk = kv_chunk
        shape = (spec.num_layers, spec.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        self._k = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        self._v = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        self._capability = _capability(spec.device)
        self._plans: dict[AttentionShape, AttentionPlan] = {}

    def write(self, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        spec = plan_write(self.spec.num_kv_heads, self.spec.head_dim, self.spec.block_size)
        k_cache, v_cache = self._k[layer], self._v[layer]
        _launch(
            spec,
            (batch.num_tokens,),
            *(k, v, k_cache, v_cache, batch.slot_mapping),
            *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
            *k_cache.stride()[:3],
        )

    def attend(self, q: Tensor, layer: int, batch: AttentionBatch, params: AttentionParams, out: Tensor) -> None:
        shape = self._shape(q.shape[1], params)
        plan = self._plans.get(shape) or self._plans.setdefault(shape, plan_attention(shape, self._capability))
        tiles = batch.plan(("triton", shape), lambda: _step_tiles(plan, shape, batch, self._kv_chunk))
        k_cache, v_cache = self._k[layer], self._v[layer]
        for spec, lists in ((plan.decode, tiles.decode), (plan.prefill, tiles.prefill)):
            if lists.shape[1]:
                _launch(
                    spec,
                    (lists.shape[1], self.spec.num_kv_heads),
                    *(q, k_cache, v_cache, batch.block_tables, batch.cu_q_lens, batch.kv_lens, *lists),
                    *(out, tiles.partial, tiles.partial_lse, params.scale * math.log2(math.e), params.softcap),
                    *(*q.stride()[:2], *k_cache.stride()[:3], batch.block_tables.stride(0), *out.stride()[:2]),
                )
        if tiles.reduce.shape[1]:
            grid = (tiles.reduce.shape[1], q.shape[1])
            _launch(plan.reduce, grid, tiles.partial, tiles.partial_lse, *tiles.reduce, out, *out.stride()[:2])

    def _shape(self, num_q_heads: int, params: AttentionParams) -> AttentionShape:
        return AttentionShape(
            num_q_heads=num_q_heads,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            block_size=self.spec.block_size,
            dtype=TRITON_DTYPES[self.spec.dtype],
            sliding_window=params.sliding_window,
            softcap=params.softcap,
        )


def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_CAPABILITY
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _step_tiles(plan: AttentionPlan, shape: AttentionShape, batch: AttentionBatch, kv_chunk: int) -> StepTiles:
    work = plan_work(plan, batch.host_q_lens, batch.host_kv_lens, kv_chunk)
    reduce = [work.reduce.token, work.reduce.first_partial, work.reduce.num_partials, work.reduce.stride]
    rows = (work.num_partials, shape.num_q_heads)
    return StepTiles(
        decode=_to_device(_tile_lists(work.decode), batch.device),
        prefill=_to_device(_tile_lists(work.prefill), batch.device),
        reduce=_to_device(reduce, batch.device),
        partial=torch.empty((*rows, shape.head_dim), dtype=torch.float32, device=batch.device),
        partial_lse=torch.empty(rows, dtype=torch.float32, device=batch.device),
    )


def _tile_lists(tiles: TileList) -> list[list[int]]:
    return [tiles.seq, tiles.first_token, tiles.first_key, tiles.last_key, tiles.partial]


def _to_device(lists: list[list[int]], device: torch.device) -> Tensor:
    tensor = torch.tensor(lists, dtype=torch.int32)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _launch(spec: LaunchSpec, grid: tuple[int, ...], *args: Any) -> None:
    kernel = getattr(triton_kernels, spec.kernel)
    kernel[grid](*args, **spec.constants, num_warps=spec.num_warps, num_stages=spec.num_stages, enable_fp_fusion=True)
