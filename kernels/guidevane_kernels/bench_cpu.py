"""Attention on this CPU, side by side with what it could cost: `python -m guidevane_kernels.bench_cpu`.

Each figure is the best of several rounds over 30 layers, as in a model, so that a layer's keys have left the CPU's
cache when their turn comes. Figures of one run may be compared with each other, hardly with those of another machine.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from guidevane_kernels import AttentionBatch, KVCache, paged_attention, write_kv
from guidevane_kernels.reference import reference_attention

NUM_LAYERS, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 16
"""SmolLM2-135M."""

ROUNDS = 5
"""After one to warm up."""


@dataclass(frozen=True)
class DecodeSetting:
    kv_lens: Sequence[int]
    dtype: torch.dtype

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one layer must read."""
        return 2 * sum(self.kv_lens) * NUM_KV_HEADS * HEAD_DIM * self.dtype.itemsize


def seconds_per_layer(contenders: Sequence[Callable[[int], object]]) -> list[float]:
    """Return each contender's best time per layer; they take turns, so that a noisy moment hits all of them."""
    # On one thread its own CPU time: other processes then cost cache and bandwidth, not time off the core.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = [float("inf")] * len(contenders)
    for _ in range(1 + ROUNDS):
        for i, attend_layer in enumerate(contenders):
            start = clock()
            for layer in range(NUM_LAYERS):
                attend_layer(layer)
            best[i] = min(best[i], clock() - start)
    return [seconds / NUM_LAYERS for seconds in best]


def filled_cache(setting: DecodeSetting) -> tuple[KVCache, list[list[int]]]:
    """Return a cache with random keys in shuffled blocks, and the block ids of each sequence."""
    needed = [-(-kv_len // BLOCK_SIZE) for kv_len in setting.kv_lens]
    cache = KVCache.alloc(
        num_layers=NUM_LAYERS,
        num_blocks=sum(needed) + 1,
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=setting.dtype,
        device="cpu",
        provider="torch",
    )
    ids = (torch.randperm(sum(needed)) + 1).tolist()
    block_ids = [[ids.pop() for _ in range(count)] for count in needed]
    batch = new_batch(setting.kv_lens, setting.kv_lens, block_ids)
    for layer in range(NUM_LAYERS):
        k, v = (torch.randn(batch.num_tokens, NUM_KV_HEADS, HEAD_DIM).to(setting.dtype) for _ in range(2))
        write_kv(cache, layer, k, v, batch)
    return cache, block_ids


def new_batch(q_lens: Sequence[int], kv_lens: Sequence[int], block_ids: list[list[int]]) -> AttentionBatch:
    return AttentionBatch.build(
        q_lens=q_lens, kv_lens=kv_lens, block_ids=block_ids, block_size=BLOCK_SIZE, device="cpu"
    )


def paged(setting: DecodeSetting) -> Callable[[int], object]:
    cache, block_ids = filled_cache(setting)
    q = torch.randn(len(setting.kv_lens), NUM_Q_HEADS, HEAD_DIM).to(setting.dtype)
    batch = new_batch([1] * len(setting.kv_lens), setting.kv_lens, block_ids)
    return lambda layer: paged_attention(q, cache, layer, batch, scale=HEAD_DIM**-0.5)


def dense(setting: DecodeSetting) -> Callable[[int], object]:
    """The same attention over keys that lie dense and padded to the longest: no paging, no gather."""
    size, longest = len(setting.kv_lens), max(setting.kv_lens)
    k, v = (torch.randn(NUM_LAYERS, size, NUM_KV_HEADS, longest, HEAD_DIM).to(setting.dtype) for _ in range(2))
    q = torch.randn(size, NUM_KV_HEADS, NUM_Q_HEADS // NUM_KV_HEADS, HEAD_DIM).to(setting.dtype)
    is_padding = torch.arange(longest) >= torch.tensor(setting.kv_lens)[:, None]
    mask = torch.zeros(is_padding.shape, dtype=setting.dtype).masked_fill(is_padding, float("-inf"))[:, None, None]
    return lambda layer: scaled_dot_product_attention(q, k[layer], v[layer], attn_mask=mask)


def reference(setting: DecodeSetting) -> Callable[[int], object]:
    """The readable reference, in fp32, on keys that need no gather."""
    shape = (NUM_KV_HEADS, HEAD_DIM)
    q = torch.randn(len(setting.kv_lens), NUM_Q_HEADS, HEAD_DIM)
    keys, values = ([torch.randn(kv_len, *shape) for kv_len in setting.kv_lens] for _ in range(2))
    q_lens = [1] * len(setting.kv_lens)
    return lambda _layer: reference_attention(q, keys, values, q_lens=q_lens, scale=HEAD_DIM**-0.5)


def decode_settings() -> dict[str, Sequence[int]]:
    ragged = [128 + 25 * i for i in range(32)]
    return {"1 x 512": [512], "8 x 512": [512] * 8, "32 x 512": [512] * 32, "32 x 128..903": ragged}


def main() -> None:
    """Print decode attention per layer, and as ratios to dense attention and to the readable reference."""
    parser = argparse.ArgumentParser(prog="python -m guidevane_kernels.bench_cpu", description=main.__doc__)
    parser.add_argument("--num-threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    torch.set_num_threads(parser.parse_args().num_threads)
    sys.stdout.write("| decode, keys | dtype | us per layer | GB/s of K, V | x dense | x reference |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    for name, kv_lens in decode_settings().items():
        for dtype in (torch.bfloat16, torch.float32):
            setting = DecodeSetting(kv_lens, dtype)
            ours, of_dense, of_reference = seconds_per_layer([paged(setting), dense(setting), reference(setting)])
            sys.stdout.write(
                f"| {name} | {str(dtype).removeprefix('torch.')} | {ours * 1e6:.0f} "
                f"| {setting.kv_bytes / ours / 1e9:.1f} | {ours / of_dense:.2f} | {ours / of_reference:.2f} |\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
