"""Penalties on tokens that came before, at a cost that does not grow with how many there are."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from guidevane_runtime.core.messages import SamplingParams
from guidevane_runtime.core.plan import ScheduledSeq, TokenHistory


class TokenCounts:
    """What came so far in one request."""

    def __init__(self, row: torch.Tensor) -> None:
        """row: [vocab_size], its logits."""
        self.in_output = torch.zeros_like(row)
        """How often each token came: [vocab_size] float32."""
        self.known_ids = torch.zeros(0, dtype=torch.int64, device=row.device)
        """In prompt or output, each once: [num_known_tokens]."""
        self._known: set[int] = set()
        self._num_counted = 0

    def catch_up(self, history: TokenHistory, end: int) -> None:
        """Count the tokens before position `end` that are not counted yet."""
        start, self._num_counted = self._num_counted, end
        token_ids = history.token_ids[start:end]
        outputs = self._ids(token_ids[max(0, history.num_prompt_tokens - start) :])
        self.in_output.index_add_(0, outputs, self.in_output.new_ones(len(outputs)))
        if unknown := set(token_ids) - self._known:
            self._known |= unknown
            self.known_ids = torch.cat((self.known_ids, self._ids(sorted(unknown))))

    def penalise(self, row: torch.Tensor, params: SamplingParams) -> None:
        """row: [vocab_size] float32, in place."""
        penalty = params.repetition_penalty
        if penalty != 1.0:
            # CTRL, arXiv:1909.05858, section 4.1: on prompt and output; a negative logit is multiplied
            logits = row.index_select(0, self.known_ids)
            row.index_copy_(0, self.known_ids, torch.where(logits > 0, logits / penalty, logits * penalty))
        if params.frequency_penalty:
            row.sub_(self.in_output, alpha=params.frequency_penalty)
        if params.presence_penalty:
            row.sub_(self.in_output.sign(), alpha=params.presence_penalty)

    def _ids(self, token_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self.known_ids.device)


class Penalties:
    """Keeps the counts of each request from step to step; they go when the request's history does."""

    def __init__(self) -> None:
        self._counts = WeakKeyDictionary[TokenHistory, TokenCounts]()

    def apply(self, row: torch.Tensor, seq: ScheduledSeq) -> None:
        """row: [vocab_size] float32, in place. Does nothing when the request has no penalties."""
        history = seq.history
        if history is None:
            return
        counts = self._counts.get(history)
        if counts is None:
            counts = self._counts[history] = TokenCounts(row)
        counts.catch_up(history, seq.start + len(seq.token_ids))
        counts.penalise(row, seq.params)
