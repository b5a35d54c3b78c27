"""Paged attention in torch operators: the provider on CPU, and on CUDA without triton.

The cache holds one row of [num_kv_heads, head_dim] per token slot, so a sequence's keys are one `index_select`. Which
rows, in which order and under which mask is planned once per step; a layer only gathers and attends.

A sequence's result does not depend on its batch mates: decodes are gathered to a length that follows from their own
number of keys alone and attended together only with decodes of that very length; prefills are attended one by one.
A sequence with one query token is a decode wherever it stands in the batch.
"""

import math
import mmap
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from guidevane_kernels.batch import AttentionBatch
from guidevane_kernels.kv_cache import AttentionParams, CacheSpec, KVCache

MIN_DECODE_STEP = 16
"""Decode lengths are padded to a multiple of this, or of an eighth of their power of two: at most 1/8 is waste."""

MAX_GATHER_ROWS = 2048
"""Key rows that decodes gather at once: bounds memory, and gathered rows are still in the CPU's cache when attended.
Best of 512 to unlimited on Zen 5 in fp32 (a third faster than unlimited at 32 x 512 keys); bf16 hardly cares."""

PREFILL_TILE = 128
"""Query tokens attended at once: bounds the mask, and skips the keys above the diagonal. Best of 64 to unlimited on
Zen 5 for prompts of 512; within 5 % of the best elsewhere."""


@dataclass(frozen=True)
class DecodeBucket:
    """Decodes attended in one call."""

    tokens: Tensor
    """[b] int64: their rows in q and out."""
    slots: Tensor
    """[b * num_keys] int64: cache rows, padded with the sequence's own first key."""
    num_keys: int
    mask: Tensor | None
    """[b, 1, 1, num_keys] additive, -inf on padding; None when nothing is padded."""


@dataclass(frozen=True)
class PrefillTile:
    """Query tokens [start, stop) of the step over keys [first_key, last_key) of what their sequence gathers."""

    start: int
    stop: int
    first_key: int
    last_key: int
    mask: Tensor | None
    """[stop - start, last_key - first_key] additive; None when it is plain causal from the first key on."""


@dataclass(frozen=True)
class PrefillSequence:
    slots: Tensor
    """[num_keys] int64: cache rows that any of its query tokens sees."""
    tiles: tuple[PrefillTile, ...]


@dataclass(frozen=True)
class StepPlan:
    decodes: tuple[DecodeBucket, ...]
    prefills: tuple[PrefillSequence, ...]


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory on CPU is taken page by page on first use: gigabytes start at once and count when written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class TorchKVCache(KVCache):
    """K and V as rows: [num_layers, num_blocks * block_size, num_kv_heads * head_dim]."""

    provider = "torch"

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        rows = (spec.num_layers, spec.num_blocks * spec.block_size, spec.num_kv_heads * spec.head_dim)
        self._k = _untouched_zeros(rows, spec.dtype, spec.device)
        self._v = _untouched_zeros(rows, spec.dtype, spec.device)

    def write(self, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        self._k[layer].index_copy_(0, batch.slot_mapping, k.flatten(1))
        self._v[layer].index_copy_(0, batch.slot_mapping, v.flatten(1))

    def attend(self, q: Tensor, layer: int, batch: AttentionBatch, params: AttentionParams, out: Tensor) -> None:
        plan = batch.plan(
            ("torch", params.sliding_window, q.dtype), lambda: plan_step(batch, params.sliding_window, q.dtype)
        )
        for bucket in plan.decodes:
            self._attend_decodes(q, layer, bucket, params, out)
        for sequence in plan.prefills:
            self._attend_prefill(q, layer, sequence, params, out)

    def _gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V rows, each [len(slots), num_kv_heads, head_dim]."""
        shape = (-1, self.spec.num_kv_heads, self.spec.head_dim)
        return self._k[layer].index_select(0, slots).view(shape), self._v[layer].index_select(0, slots).view(shape)

    def _attend_decodes(
        self, q: Tensor, layer: int, bucket: DecodeBucket, params: AttentionParams, out: Tensor
    ) -> None:
        # The query heads of one KV head take the place of query positions: enable_gqa is several times slower on CPU.
        size, kv_heads = bucket.tokens.shape[0], self.spec.num_kv_heads
        k, v = (
            rows.unflatten(0, (size, bucket.num_keys)).transpose(1, 2) for rows in self._gather(layer, bucket.slots)
        )
        folded = q.index_select(0, bucket.tokens).unflatten(1, (kv_heads, -1))
        result = _attend(folded, k, v, bucket.mask, params, is_causal=False)
        out.index_copy_(0, bucket.tokens, result.flatten(1, 2))

    def _attend_prefill(
        self, q: Tensor, layer: int, sequence: PrefillSequence, params: AttentionParams, out: Tensor
    ) -> None:
        # [num_kv_heads, 1, num_keys, head_dim], expanded (not copied) to the query heads of each KV head.
        k, v = (rows.transpose(0, 1).unsqueeze(1) for rows in self._gather(layer, sequence.slots))
        for tile in sequence.tiles:
            tile_q = q[tile.start : tile.stop].unflatten(1, (self.spec.num_kv_heads, -1)).permute(1, 2, 0, 3)
            keys = slice(tile.first_key, tile.last_key)
            tile_k, tile_v = (rows[:, :, keys].expand(-1, tile_q.shape[1], -1, -1) for rows in (k, v))
            result = _attend(tile_q, tile_k, tile_v, tile.mask, params, is_causal=tile.mask is None)
            out[tile.start : tile.stop] = result.permute(2, 0, 1, 3).flatten(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: AttentionParams, is_causal: bool) -> Tensor:
    if not params.softcap:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=params.scale)
    # scaled_dot_product_attention has no softcap. Scores stay in fp32 until they are probabilities, as in there.
    scores = (q.float() @ k.float().transpose(-1, -2)) * params.scale
    scores = params.softcap * torch.tanh(scores / params.softcap)
    if is_causal:
        mask = _mask(q.shape[-2], 0, k.shape[-2], 0, 0, scores.dtype).to(q.device)
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1).to(q.dtype) @ v


def plan_step(batch: AttentionBatch, sliding_window: int, dtype: torch.dtype) -> StepPlan:
    """Plan one step from host data; masks are made in `dtype`, which attention reads fastest."""
    slots = _key_slots(batch)
    return StepPlan(
        decodes=_plan_decodes(batch, slots, sliding_window, dtype),
        prefills=_plan_prefills(batch, slots, sliding_window, dtype),
    )


def _key_slots(batch: AttentionBatch) -> Tensor:
    """Return [num_seqs, max_blocks * block_size] int64 on the host: the cache row of every key."""
    blocks = batch.host_block_tables.to(torch.int64)
    return (blocks[:, :, None] * batch.block_size + torch.arange(batch.block_size)).flatten(1)


def padded_decode_keys(num_keys: int) -> int:
    """Return the length to which a decode over `num_keys` keys is padded: eight lengths per power of two."""
    step = max(MIN_DECODE_STEP, 1 << max(0, num_keys.bit_length() - 4))
    return -(-num_keys // step) * step


def _plan_decodes(
    batch: AttentionBatch, slots: Tensor, sliding_window: int, dtype: torch.dtype
) -> tuple[DecodeBucket, ...]:
    by_length: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for seq, q_len in enumerate(batch.host_q_lens):
        if q_len != 1:
            continue
        num_keys = _num_decode_keys(batch.host_kv_lens[seq], sliding_window)
        padded = padded_decode_keys(num_keys)
        # Exact lengths stand apart: they take no mask, whoever else is there.
        by_length[padded, num_keys == padded].append(seq)
    buckets = []
    for (padded, exact), seqs in by_length.items():
        size = max(1, MAX_GATHER_ROWS // padded)
        for i in range(0, len(seqs), size):
            buckets.append(_decode_bucket(batch, slots, seqs[i : i + size], padded, exact, sliding_window, dtype))
    return tuple(buckets)


def _num_decode_keys(kv_len: int, sliding_window: int) -> int:
    return min(kv_len, sliding_window) if sliding_window else kv_len


def _decode_bucket(
    batch: AttentionBatch,
    slots: Tensor,
    seqs: list[int],
    padded: int,
    exact: bool,
    sliding_window: int,
    dtype: torch.dtype,
) -> DecodeBucket:
    kv_lens = torch.tensor([batch.host_kv_lens[seq] for seq in seqs])
    num_keys = torch.tensor([_num_decode_keys(batch.host_kv_lens[seq], sliding_window) for seq in seqs])
    first_keys = (kv_lens - num_keys)[:, None]
    offsets = torch.arange(padded)
    is_padding = offsets >= num_keys[:, None]
    rows = slots[torch.tensor(seqs)[:, None], first_keys + offsets.masked_fill(is_padding, 0)]
    mask = None if exact else torch.zeros(is_padding.shape, dtype=dtype).masked_fill(is_padding, float("-inf"))
    return DecodeBucket(
        tokens=torch.tensor([batch.host_cu_q_lens[seq] for seq in seqs]).to(batch.device),
        slots=rows.flatten().to(batch.device),
        num_keys=padded,
        mask=None if mask is None else mask[:, None, None, :].to(batch.device),
    )


def _plan_prefills(
    batch: AttentionBatch, slots: Tensor, sliding_window: int, dtype: torch.dtype
) -> tuple[PrefillSequence, ...]:
    sequences = []
    for seq, (q_len, kv_len) in enumerate(zip(batch.host_q_lens, batch.host_kv_lens, strict=True)):
        if q_len > 1:
            token = batch.host_cu_q_lens[seq]
            tiles = _prefill_tiles(token, q_len, kv_len, sliding_window, dtype, batch.device)
            first_key = _first_visible_key(kv_len - q_len, sliding_window)
            sequences.append(PrefillSequence(slots[seq, first_key:kv_len].to(batch.device), tiles))
    return tuple(sequences)


def _first_visible_key(position: int, sliding_window: int) -> int:
    return max(0, position - sliding_window + 1) if sliding_window else 0


def _prefill_tiles(
    token: int, q_len: int, kv_len: int, sliding_window: int, dtype: torch.dtype, device: torch.device
) -> tuple[PrefillTile, ...]:
    context = kv_len - q_len
    gathered_from = _first_visible_key(context, sliding_window)
    tiles = []
    for start in range(0, q_len, PREFILL_TILE):
        stop = min(start + PREFILL_TILE, q_len)
        first_key = _first_visible_key(context + start, sliding_window)
        last_key = context + stop
        # The first tile of a prompt without context sees a plain triangle, as long as no window cuts it.
        plain = context + start == 0 and not 0 < sliding_window < stop
        mask = None if plain else _mask(stop - start, first_key, last_key, context + start, sliding_window, dtype)
        tiles.append(
            PrefillTile(
                start=token + start,
                stop=token + stop,
                first_key=first_key - gathered_from,
                last_key=last_key - gathered_from,
                mask=None if mask is None else mask.to(device),
            )
        )
    return tuple(tiles)


def _mask(
    q_len: int, first_key: int, last_key: int, first_position: int, sliding_window: int, dtype: torch.dtype
) -> Tensor:
    """Return [q_len, last_key - first_key] additive: -inf on keys after a query or out of its window."""
    position = torch.arange(first_position, first_position + q_len)[:, None]
    key = torch.arange(first_key, last_key)[None, :]
    hidden = key > position
    if sliding_window:
        hidden |= key <= position - sliding_window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
