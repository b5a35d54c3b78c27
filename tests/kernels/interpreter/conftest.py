"""Triton kernels on CPU tensors. The lab of the folder above makes the cases; the chunk of keys is cut small here."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("this suite needs TRITON_INTERPRET=1 from the start; run tests/kernels, which sets it")

from guidevane_kernels.kv_cache import CacheSpec
from guidevane_kernels.triton_provider import TritonKVCache

SMALL_KV_CHUNK = 64
"""Several splits per decode at lengths that the interpreter walks in a moment."""


@pytest.fixture(scope="session")
def new_triton_cache(lab):
    def alloc(case, kv_chunk=SMALL_KV_CHUNK):
        num_blocks = sum(-(-kv_len // case.block_size) for kv_len in case.kv_lens) + 2
        spec = CacheSpec(
            2, num_blocks, case.block_size, case.num_kv_heads, case.head_dim, case.dtype, torch.device("cpu")
        )
        return lab.poisoned(TritonKVCache(spec, kv_chunk=kv_chunk))

    return alloc


@pytest.fixture
def assert_matches_fp64(lab, new_triton_cache):
    def check(case):
        lab.assert_matches_fp64(case, "triton", new_triton_cache(case))

    return check
