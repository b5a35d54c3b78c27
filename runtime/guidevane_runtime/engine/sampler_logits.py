"""What a request's parameters do to its logits before a token is drawn: masks, biases, penalties."""

from collections import Counter
from collections.abc import Iterable

import torch

from guidevane_runtime.core.messages import SamplingParams
from guidevane_runtime.core.plan import ScheduledSeq


def changes_logits(seq: ScheduledSeq) -> bool:
    """Whether `adjust_row` would do anything."""
    params = seq.params
    return bool(params.logit_bias) or has_penalties(params) or must_go_on(seq)


def has_penalties(params: SamplingParams) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0


def must_go_on(seq: ScheduledSeq) -> bool:
    """Whether the output is still shorter than min_tokens, so that no end token may come."""
    return num_output_tokens(seq) < seq.params.min_tokens


def num_output_tokens(seq: ScheduledSeq) -> int:
    return max(seq.num_output_tokens, len(seq.output_token_ids))


def adjust_row(row: torch.Tensor, seq: ScheduledSeq, eos_token_ids: frozenset[int]) -> None:
    """Apply bias, penalties and the min_tokens mask to `row`, [vocab_size] float32, in place."""
    _apply_penalties(row, seq)
    if seq.params.logit_bias:
        ids, values = zip(*seq.params.logit_bias, strict=True)
        row.index_add_(0, _ids(ids, row), torch.tensor(values, dtype=row.dtype, device=row.device))
    if must_go_on(seq):
        ends = seq.params.stop_token_ids | (frozenset() if seq.params.ignore_eos else eos_token_ids)
        row.index_fill_(0, _ids(sorted(ends), row), float("-inf"))


def _apply_penalties(row: torch.Tensor, seq: ScheduledSeq) -> None:
    params = seq.params
    if params.repetition_penalty != 1.0:
        # CTRL, arXiv:1909.05858, section 4.1: on prompt and output; a negative logit is multiplied
        seen = _ids(sorted(set(seq.prompt_token_ids) | set(seq.output_token_ids)), row)
        logits = row.index_select(0, seen)
        penalty = params.repetition_penalty
        row.index_copy_(0, seen, torch.where(logits > 0, logits / penalty, logits * penalty))
    if (params.presence_penalty or params.frequency_penalty) and seq.output_token_ids:
        counts = Counter(seq.output_token_ids)
        penalties = [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
        row.index_add_(0, _ids(counts, row), -torch.tensor(penalties, dtype=row.dtype, device=row.device))


def _ids(ids: Iterable[int], row: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=row.device)
