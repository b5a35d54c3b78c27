"""One step's ragged layout, as attention sees it.

It knows token counts, block ids and where they lie on the device; it knows no request, no model and no head count.
"""

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

PlanT = TypeVar("PlanT")


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """Sequences of one step laid end to end: `q_lens[i]` query tokens each, all keys up to `kv_lens[i]`.

    Built once per step by `build` and shared by every layer. Sequences with one query token (decode) come first by
    convention, and num_decodes counts them; any order gives the same results.

    Block id 0 is the null block: it pads block tables and holds no token. The scheduler never gives it out.
    """

    cu_q_lens: Tensor
    """[num_seqs + 1] int32: tokens [cu_q_lens[i], cu_q_lens[i + 1]) belong to sequence i."""
    kv_lens: Tensor
    """[num_seqs] int32: keys of each sequence after this step's write."""
    block_tables: Tensor
    """[num_seqs, max_blocks] int32, padded with the null block; at least one column."""
    slot_mapping: Tensor
    """[num_tokens] int64: block_id * block_size + offset, where each token's K and V are written."""
    num_decodes: int
    """Leading sequences with exactly one query token."""
    block_size: int
    """Tokens per block."""
    host_q_lens: tuple[int, ...]
    host_kv_lens: tuple[int, ...]
    host_cu_q_lens: tuple[int, ...]
    host_block_tables: Tensor
    """The same as block_tables, in host memory: providers plan from it without a device sync."""
    max_block_id: int
    """Largest block id in use, to be checked against the cache; 0 when no block is in use."""
    _plans: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        *,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str,
    ) -> "AttentionBatch":
        """Lay out one step from host integers; later use needs no device sync.

        `kv_lens[i]` counts the keys of sequence i with this step's tokens, so its first query token has position
        kv_lens[i] - q_lens[i]. `block_ids[i]` may be longer than needed, as a request's lease is.
        """
        _check_lengths(q_lens, kv_lens, block_ids, block_size)
        tables, max_block_id = _host_block_tables(kv_lens, block_ids, block_size)
        q = torch.tensor(q_lens, dtype=torch.int64)
        kv = torch.tensor(kv_lens, dtype=torch.int64)
        cu = torch.zeros(len(q_lens) + 1, dtype=torch.int64)
        torch.cumsum(q, 0, out=cu[1:])
        device = torch.device(device)
        return cls(
            cu_q_lens=_to_device(cu.to(torch.int32), device),
            kv_lens=_to_device(kv.to(torch.int32), device),
            block_tables=_to_device(tables, device),
            slot_mapping=_to_device(_slot_mapping(q, kv, cu, tables, block_size), device),
            num_decodes=_num_leading_decodes(q_lens),
            block_size=block_size,
            host_q_lens=tuple(q_lens),
            host_kv_lens=tuple(kv_lens),
            host_cu_q_lens=tuple(accumulate(q_lens, initial=0)),
            host_block_tables=tables,
            max_block_id=max_block_id,
        )

    @property
    def num_seqs(self) -> int:
        return len(self.host_q_lens)

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]

    @property
    def device(self) -> torch.device:
        return self.slot_mapping.device

    def plan(self, key: Hashable, make: Callable[[], PlanT]) -> PlanT:
        """Return the plan that a provider keeps under `key`, made on first use: by the first layer, for all layers."""
        if key not in self._plans:
            self._plans[key] = make()
        plan: PlanT = self._plans[key]
        return plan


def _check_lengths(
    q_lens: Sequence[int], kv_lens: Sequence[int], block_ids: Sequence[Sequence[int]], block_size: int
) -> None:
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, must be at least 1 token")
    if not len(q_lens) == len(kv_lens) == len(block_ids):
        raise ValueError(
            f"q_lens, kv_lens and block_ids have {len(q_lens)}, {len(kv_lens)} and {len(block_ids)} sequences; "
            "give one entry of each per sequence"
        )
    for seq, (q_len, kv_len, ids) in enumerate(zip(q_lens, kv_lens, block_ids, strict=True)):
        if not 0 <= q_len <= kv_len:
            raise ValueError(
                f"sequence {seq} has {q_len} query tokens and {kv_len} keys; "
                "kv_lens counts this step's tokens too, so it is never the smaller one"
            )
        if len(ids) * block_size < kv_len:
            raise ValueError(
                f"sequence {seq} has {len(ids)} blocks of {block_size} tokens for {kv_len} keys; "
                f"lease {-(-kv_len // block_size)} blocks before the step"
            )


def _host_block_tables(
    kv_lens: Sequence[int], block_ids: Sequence[Sequence[int]], block_size: int
) -> tuple[Tensor, int]:
    """Return ([num_seqs, max_blocks] int32, largest block id), each row cut to what its keys need."""
    num_blocks = [-(-kv_len // block_size) for kv_len in kv_lens]
    width = max(num_blocks, default=0) or 1
    flat = array("i")
    max_block_id = 0
    for seq, (used, ids) in enumerate(zip(num_blocks, block_ids, strict=True)):
        row = array("i", ids[:used])
        if used and min(row) < 1:
            raise ValueError(f"sequence {seq} has block id {min(row)}; ids start at 1, block 0 is the null block")
        max_block_id = max(max_block_id, max(row, default=0))
        flat.extend(row)
        flat.frombytes(bytes(4 * (width - used)))
    if not flat:
        return torch.zeros(0, width, dtype=torch.int32), 0
    return torch.frombuffer(flat, dtype=torch.int32).view(len(kv_lens), width), max_block_id


def _slot_mapping(q_lens: Tensor, kv_lens: Tensor, cu_q_lens: Tensor, tables: Tensor, block_size: int) -> Tensor:
    seq = torch.repeat_interleave(q_lens)
    positions = torch.arange(seq.shape[0]) + (kv_lens - q_lens - cu_q_lens[:-1])[seq]
    blocks = tables[seq, positions // block_size].to(torch.int64)
    return blocks * block_size + positions % block_size


def _num_leading_decodes(q_lens: Sequence[int]) -> int:
    return next((seq for seq, q_len in enumerate(q_lens) if q_len != 1), len(q_lens))


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
