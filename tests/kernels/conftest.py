"""What all kernel tests share: one ragged case, run through the public functions, judged in fp64.

Triton reads TRITON_INTERPRET when it is imported, so its tests run in processes of their own, which
test_own_processes.py starts. Here their folders are collected only in such a process.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from guidevane_kernels import AttentionBatch, KVCache, paged_attention, write_kv
from guidevane_kernels.reference import reference_attention

SUITE_ENV = "GUIDEVANE_KERNEL_TEST_SUITE"
collect_ignore = [folder for folder in ("interpreter", "compile") if os.environ.get(SUITE_ENV) != folder]


class Tolerance(NamedTuple):
    relative: float
    """Frobenius distance to fp64 on the same inputs, over the norm of the latter."""
    row_ulps: float
    """Largest error of an element, in units of the last place at the largest element of its row."""


TOLERANCE = {
    # Sums of up to a thousand terms that cancel: the fp32 reference itself is 14 ulp off in rows.
    torch.float32: Tolerance(1e-6, 32),
    # Probabilities and results are rounded once each, half an ulp at most; the terms cancel in long rows.
    torch.float16: Tolerance(1e-3, 4),
    # The same two roundings; their mean square is 2^-9 / sqrt(3) each.
    torch.bfloat16: Tolerance(2.5e-3, 4),
}


@dataclass(frozen=True)
class AttentionCase:
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    sliding_window: int = 0
    softcap: float = 0.0
    scores_std: float = 1.0
    """Spread of the scores before softcap and softmax; large ones make the softmax hard."""
    seed: int = 0

    def with_only(self, seq: int) -> "AttentionCase":
        return replace(self, q_lens=(self.q_lens[seq],), kv_lens=(self.kv_lens[seq],))


@dataclass
class Inputs:
    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    block_ids: list[list[int]]


class AttentionLab:
    """Runs cases on CPU tensors. Everything that must not be read is NaN, and so is the output before the run."""

    def inputs(self, case: AttentionCase) -> Inputs:
        torch.manual_seed(case.seed)
        kv_shape = (case.num_kv_heads, case.head_dim)
        # q is a slice of a wider tensor, as the output of one QKV projection is.
        qkv = torch.randn(sum(case.q_lens), case.num_q_heads + 2 * case.num_kv_heads, case.head_dim)
        return Inputs(
            q=(qkv * case.scores_std).to(case.dtype)[:, : case.num_q_heads],
            keys=[torch.randn(kv_len, *kv_shape).to(case.dtype) for kv_len in case.kv_lens],
            values=[torch.randn(kv_len, *kv_shape).to(case.dtype) for kv_len in case.kv_lens],
            block_ids=self.permuted_blocks(case),
        )

    def permuted_blocks(self, case: AttentionCase) -> list[list[int]]:
        needed = [-(-kv_len // case.block_size) for kv_len in case.kv_lens]
        ids = list(range(1, sum(needed) + 1))
        random.Random(case.seed).shuffle(ids)
        return [[ids.pop() for _ in range(count)] for count in needed]

    def alloc(self, case: AttentionCase, provider: str) -> KVCache:
        return self.poisoned(
            KVCache.alloc(
                num_layers=2,
                num_blocks=sum(-(-kv_len // case.block_size) for kv_len in case.kv_lens) + 2,
                block_size=case.block_size,
                num_kv_heads=case.num_kv_heads,
                head_dim=case.head_dim,
                dtype=case.dtype,
                device="cpu",
                provider=provider,
            )
        )

    def poisoned(self, cache: KVCache) -> KVCache:
        """Fill the cache with NaN, null block included; no public function can write outside of a batch's blocks."""
        for pool in (cache._k, cache._v):  # type: ignore[attr-defined]
            pool.fill_(float("nan"))
        return cache

    def run(self, case: AttentionCase, provider: str, cache: KVCache | None = None, inputs: Inputs | None = None):
        """Write all keys but the query tokens' in one step, theirs in a second one, and attend."""
        inputs = inputs or self.inputs(case)
        cache = cache or self.alloc(case, provider)
        context = [kv_len - q_len for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True)]
        for q_lens, kv_lens in ((context, context), (case.q_lens, case.kv_lens)):
            batch = AttentionBatch.build(
                q_lens=q_lens, kv_lens=kv_lens, block_ids=inputs.block_ids, block_size=case.block_size, device="cpu"
            )
            spans = [slice(kv_len - q_len, kv_len) for q_len, kv_len in zip(q_lens, kv_lens, strict=True)]
            new_k, new_v = (
                torch.cat([rows[span] for rows, span in zip(self.without_unseen(case, whole), spans, strict=True)])
                for whole in (inputs.keys, inputs.values)
            )
            write_kv(cache, 1, new_k, new_v, batch)
        return paged_attention(
            inputs.q,
            cache,
            1,
            batch,
            scale=case.head_dim**-0.5,
            sliding_window=case.sliding_window,
            softcap=case.softcap,
            out=torch.full(inputs.q.shape, float("nan"), dtype=case.dtype),
        )

    def without_unseen(self, case: AttentionCase, whole: list[Tensor]) -> list[Tensor]:
        """Return copies in which keys that slid out of every query's window are NaN, as in a block given back."""
        copies = [rows.clone() for rows in whole]
        for rows, q_len, kv_len in zip(copies, case.q_lens, case.kv_lens, strict=True):
            if case.sliding_window:
                rows[: max(0, kv_len - q_len - case.sliding_window + 1)] = float("nan")
        return copies

    def reference(self, case: AttentionCase, inputs: Inputs, dtype: torch.dtype = torch.float64) -> Tensor:
        return reference_attention(
            inputs.q,
            inputs.keys,
            inputs.values,
            q_lens=case.q_lens,
            scale=case.head_dim**-0.5,
            sliding_window=case.sliding_window,
            softcap=case.softcap,
            dtype=dtype,
        )

    def assert_close(self, result: Tensor, expected: Tensor) -> None:
        """Compare with fp64 under the tolerances of result's dtype; NaN never passes."""
        error = result.double() - expected
        relative = float(error.norm() / expected.norm().clamp_min(1e-300))
        tolerance = TOLERANCE[result.dtype]
        assert relative <= tolerance.relative
        ulp = torch.finfo(result.dtype).eps * expected.abs().amax(-1, keepdim=True)
        assert bool((error.abs() <= tolerance.row_ulps * ulp).all())

    def assert_matches_fp64(self, case: AttentionCase, provider: str, cache: KVCache | None = None) -> None:
        inputs = self.inputs(case)
        self.assert_close(self.run(case, provider, cache, inputs), self.reference(case, inputs))

    def assert_alone_equals_batched(self, case: AttentionCase, provider: str, make_cache=None) -> None:
        """Each sequence, alone in other blocks of another cache, gives bitwise what it gives in the batch."""
        for seq, (alone, batched) in enumerate(self.alone_and_batched(case, provider, make_cache)):
            assert torch.equal(alone, batched), f"sequence {seq} depends on its batch mates"

    def largest_distance_alone_to_batched(self, case: AttentionCase, provider: str) -> float:
        """Return the largest relative Frobenius distance of a sequence's two results."""
        pairs = self.alone_and_batched(case, provider)
        return max(float((alone - batched).norm() / batched.norm()) for alone, batched in pairs)

    def alone_and_batched(self, case: AttentionCase, provider: str, make_cache=None) -> Iterator[tuple[Tensor, Tensor]]:
        inputs = self.inputs(case)
        new_cache = make_cache or (lambda of: self.alloc(of, provider))
        batched = self.run(case, provider, new_cache(case), inputs).split(list(case.q_lens))
        for seq, q in enumerate(inputs.q.split(list(case.q_lens))):
            one = case.with_only(seq)
            alone = Inputs(q, inputs.keys[seq : seq + 1], inputs.values[seq : seq + 1], self.permuted_blocks(one))
            yield self.run(one, provider, new_cache(one), alone), batched[seq]


@pytest.fixture(scope="session")
def lab() -> AttentionLab:
    return AttentionLab()


@pytest.fixture(scope="session")
def new_case() -> type[AttentionCase]:
    return AttentionCase


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
