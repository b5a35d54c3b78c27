"""The paged KV cache: opaque, laid out by the provider that reads it.

Callers know block ids, counts and bytes. How a block lies in memory is the provider's business.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from guidevane_kernels.batch import AttentionBatch
from guidevane_kernels.selection import select_provider

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class CacheSpec:
    """Shape of a cache: num_blocks blocks of block_size tokens in every layer, the null block 0 included."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        for name in ("num_layers", "block_size", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.num_blocks < 2:
            raise ValueError(f"num_blocks is {self.num_blocks}, must be at least 2: block 0 is the null block")
        if self.dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"cache dtype {self.dtype} is not supported; use float32, bfloat16 or float16")


@dataclass(frozen=True)
class AttentionParams:
    """What a model fixes about its attention, beside the shapes."""

    scale: float
    sliding_window: int
    """A query at position p sees keys in (p - sliding_window, p]; 0 means all keys up to p."""
    softcap: float
    """Scores s become softcap * tanh(s / softcap); 0 leaves them alone."""


class KVCache(ABC):
    """K and V of every layer, in blocks. Make one with `alloc`; use it through `write_kv` and `paged_attention`.

    Block 0 is the null block. It pads block tables, is never given out and stays zero.
    """

    provider: ClassVar[str]

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec

    @classmethod
    def alloc(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        provider: str = "auto",
    ) -> "KVCache":
        """Allocate a zeroed cache on `device` for the provider that `select_provider` names."""
        spec = CacheSpec(num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype, torch.device(device))
        # Imported here: the CPU image has no triton.
        if select_provider(device, provider) == "triton":
            from guidevane_kernels.triton_provider import TritonKVCache

            return TritonKVCache(spec)
        from guidevane_kernels.torch_provider import TorchKVCache

        return TorchKVCache(spec)

    @staticmethod
    def bytes_per_block(
        *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Return the bytes that one block takes, K and V of all layers together."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        spec = self.spec
        return spec.num_blocks * self.bytes_per_block(
            num_layers=spec.num_layers,
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=spec.dtype,
        )

    @abstractmethod
    def write(self, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        """Store checked k, v [num_tokens, num_kv_heads, head_dim] at batch.slot_mapping."""

    @abstractmethod
    def attend(self, q: Tensor, layer: int, batch: AttentionBatch, params: AttentionParams, out: Tensor) -> None:
        """Fill `out` with attention of checked q [num_tokens, num_q_heads, head_dim]."""
