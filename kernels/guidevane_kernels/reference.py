"""The readable truth: attention one sequence at a time, on K and V that were never paged.

It sees no block and no cache. Providers are tested against it; nothing serves with it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    q_lens: Sequence[int],
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return [num_tokens, num_q_heads, head_dim] in `dtype`, in which everything is computed.

    q: [num_tokens, num_q_heads, head_dim]; keys[i], values[i]: [kv_len_i, num_kv_heads, head_dim]. The last q_lens[i]
    positions of sequence i are its query tokens.
    """
    outs = [
        _attend_sequence(seq_q.to(dtype), k.to(dtype), v.to(dtype), scale, sliding_window, softcap)
        for seq_q, k, v in zip(q.split(list(q_lens)), keys, values, strict=True)
    ]
    return torch.cat(outs) if outs else q.to(dtype)


def _attend_sequence(q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int, softcap: float) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(q.shape[0], k.shape[0], sliding_window, q.device), float("-inf"))
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, dim=-1), v)


def visible(q_len: int, kv_len: int, sliding_window: int, device: torch.device | None = None) -> Tensor:
    """Return [q_len, kv_len] bool: query i has position p = kv_len - q_len + i and sees keys in (p - W, p]."""
    position = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    key = torch.arange(kv_len, device=device)[None, :]
    mask = key <= position
    return mask & (key > position - sliding_window) if sliding_window else mask
