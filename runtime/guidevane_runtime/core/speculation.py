"""Draft tokens: guesses at what comes next, verified by the model in the same step as the token before them."""

from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import Protocol

from guidevane_runtime.core.budget import StepPlan
from guidevane_runtime.core.request import Request


class DraftSource(Protocol):
    def draft(self, token_ids: Sequence[int], max_drafts: int) -> Iterable[int]:
        """Guess how the text goes on; fewer than max_drafts, or none, where it has no idea."""


class Speculation:
    """Its budget is what decodes, prefills and admissions leave over: no draft is at anybody's cost.

    A draft costs a token of the decode budget and of the step, and room in a block; nobody is preempted for it.
    """

    def __init__(self, source: DraftSource, *, max_drafts: int, vocab_size: int) -> None:
        """max_drafts: for one request in one step."""
        self._source = source
        self._max_drafts = max_drafts
        self._vocab_size = vocab_size
        self.is_paused = False
        """While it is set nothing is drafted: under pressure each draft that is rejected is work for nothing."""
        self.num_drafted = 0
        self.num_accepted = 0
        """Of those drafted, part of an output. The rest is num_rejected."""

    @property
    def num_rejected(self) -> int:
        return self.num_drafted - self.num_accepted

    def plan(self, step: StepPlan) -> None:
        """Add drafts to the decodes of a step whose other parts are planned."""
        if self.is_paused:
            return
        for request in step.decodes:
            if not step.budget.num_decodes_left:
                return
            drafts = self._drafts(request, step.budget.num_decodes_left)
            if drafts and request.blocks.try_grow_to(request.num_tokens + len(drafts)):
                step.add_drafts(request, drafts)

    def note(self, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def _drafts(self, request: Request, num_tokens_left: int) -> tuple[int, ...]:
        """As many as may be: the model adds one token to those it accepts, and no output gets longer than it may."""
        room = min(self._max_drafts, num_tokens_left, request.max_num_tokens - request.num_tokens - 1)
        if room < 1:
            return ()
        known = takewhile(
            lambda token_id: 0 <= token_id < self._vocab_size, self._source.draft(request.token_ids, room)
        )
        return tuple(islice(known, room))
