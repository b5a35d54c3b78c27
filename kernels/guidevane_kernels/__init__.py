"""Attention kernels: one checked public function per operation, a readable reference beside each.

    batch = AttentionBatch.build(q_lens=..., kv_lens=..., block_ids=..., block_size=16, device="cpu")   # once per step
    write_kv(cache, layer, k, v, batch)                                                                 # every layer
    out = paged_attention(q, cache, layer, batch, scale=head_dim**-0.5)

The package knows tensors and block ids. It knows no request, no model, no scheduler.
"""

from guidevane_kernels.attention import paged_attention, provider_name, write_kv
from guidevane_kernels.batch import AttentionBatch
from guidevane_kernels.kv_cache import KVCache
from guidevane_kernels.selection import select_provider

__all__ = ["AttentionBatch", "KVCache", "paged_attention", "provider_name", "select_provider", "write_kv"]
