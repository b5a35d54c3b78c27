"""What a request's parameters do to its logits before a token is drawn: penalties, biases, masks."""

from collections.abc import Iterable

import torch

from guidevane_runtime.core.plan import ScheduledSeq
from guidevane_runtime.engine.sampler_penalties import Penalties


def changes_logits(seq: ScheduledSeq) -> bool:
    """Whether `adjust_row` would do anything."""
    return bool(seq.params.logit_bias) or seq.history is not None or must_go_on(seq)


def must_go_on(seq: ScheduledSeq) -> bool:
    """Whether the output is still shorter than min_tokens, so that no end token may come."""
    return seq.num_output_tokens < seq.params.min_tokens


def adjust_row(row: torch.Tensor, seq: ScheduledSeq, eos_token_ids: frozenset[int], penalties: Penalties) -> None:
    """Apply penalties, bias and the min_tokens mask to `row`, [vocab_size] float32, in place."""
    penalties.apply(row, seq)
    if seq.params.logit_bias:
        ids, values = zip(*seq.params.logit_bias, strict=True)
        row.index_add_(0, _ids(ids, row), torch.tensor(values, dtype=row.dtype, device=row.device))
    if must_go_on(seq):
        ends = seq.params.stop_token_ids | (frozenset() if seq.params.ignore_eos else eos_token_ids)
        row.index_fill_(0, _ids(sorted(ends), row), float("-inf"))


def _ids(ids: Iterable[int], row: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=row.device)
