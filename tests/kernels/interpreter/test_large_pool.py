"""Offsets beyond 2^31 elements. An int32 offset ends in a segmentation fault, so this runs in a process of its own."""

import subprocess
import sys

LARGE_POOL = """
import dataclasses
import torch
from guidevane_kernels import AttentionBatch, paged_attention, write_kv
from guidevane_kernels.kv_cache import CacheSpec
from guidevane_kernels.reference import reference_attention
from guidevane_kernels.triton_provider import TritonKVCache

torch.set_num_threads(1)
# Blocks of 16 tokens are gathered row by row, one of 64 serves a tile; 140 keys fill whole tiles and a tail.
for block_size, num_used in ((16, 9), (64, 3)):
    num_blocks = 2**31 // (block_size * 64) + 10
    small = CacheSpec(1, 2, block_size, 1, 64, torch.float16, torch.device("cpu"))
    cache = TritonKVCache(small)
    cache.spec = dataclasses.replace(small, num_blocks=num_blocks)
    # Virtual memory only: empty() commits no page before it is written.
    cache._k, cache._v = (torch.empty(1, num_blocks, 1, block_size, 64, dtype=torch.float16) for _ in range(2))
    layout = {"kv_lens": [140], "block_ids": [[num_blocks - 1 - i for i in range(num_used)]], "block_size": block_size}

    q, k, v = torch.randn(1, 3, 64).half(), torch.randn(140, 1, 64).half(), torch.randn(140, 1, 64).half()
    write_kv(cache, 0, k, v, AttentionBatch.build(q_lens=[140], device="cpu", **layout))
    out = paged_attention(q, cache, 0, AttentionBatch.build(q_lens=[1], device="cpu", **layout), scale=0.125)
    expected = reference_attention(q, [k], [v], q_lens=[1], scale=0.125)
    torch.testing.assert_close(out.float(), expected, atol=1e-3, rtol=1e-3)
"""


def test_blocks_beyond_2_to_the_31_elements_are_written_and_read():
    done = subprocess.run([sys.executable, "-c", LARGE_POOL], capture_output=True, text=True)

    assert done.returncode == 0, f"status {done.returncode}:\n{done.stderr}"
