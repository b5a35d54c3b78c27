"""One request as the scheduler sees it. It has no phase: num_computed_tokens catches up with num_tokens.

# [0, num_cached)             prefix hit, when it started: blocks that others may read too
# [num_cached, num_computed)  computed by itself
# [num_computed, num_tokens)  known, to be computed; one token is a decode, more are a prefill
"""

from dataclasses import dataclass, field
from enum import StrEnum

from guidevane_runtime.core.block_pool import BlockTable
from guidevane_runtime.core.grammar import GrammarState
from guidevane_runtime.core.messages import FinishReason, SamplingParams, Submit
from guidevane_runtime.core.plan import ScheduledSeq, TokenHistory
from guidevane_runtime.core.prefix import BlockKeys


class RequestState(StrEnum):
    """PREEMPTED is no state of its own: a preempted request waits, with num_preemptions above 0."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


ALLOWED_TRANSITIONS = {
    RequestState.WAITING: {RequestState.RUNNING, RequestState.FINISHED, RequestState.ABORTED},
    RequestState.RUNNING: {RequestState.WAITING, RequestState.FINISHED, RequestState.ABORTED},
    RequestState.FINISHED: set[RequestState](),
    RequestState.ABORTED: set[RequestState](),
}

STATE_AFTER = {
    FinishReason.STOP: RequestState.FINISHED,
    FinishReason.LENGTH: RequestState.FINISHED,
    FinishReason.ERROR: RequestState.FINISHED,
    FinishReason.ABORT: RequestState.ABORTED,
    FinishReason.TIMEOUT: RequestState.ABORTED,
}


@dataclass(slots=True, eq=False)
class Request:
    """Mutated by the scheduler only."""

    submit: Submit
    max_num_tokens: int
    """Prompt and output together, at most. Fixed when it was accepted, so that no later limit changes its output."""
    blocks: BlockTable
    request_id: str = field(init=False)
    """The submit's; read several times a step."""
    state: RequestState = RequestState.WAITING
    token_ids: list[int] = field(default_factory=list)
    """Prompt, then output."""
    history: TokenHistory | None = None
    """The same tokens for the sampler, when params has penalties."""
    num_computed_tokens: int = 0
    """In the KV cache, prefix hit included. While it waits: what the prefix cache would give it, as last looked up."""
    num_shared_blocks: int = 0
    """Blocks of its prefix hit that others held already when it took them."""
    num_published_blocks: int = 0
    """Blocks of its table, from the first on, that others can find."""
    num_cached_tokens: int = 0
    """Prefix hit at its first start, in tokens. What it finds of its own after a preemption is not counted."""
    block_keys: BlockKeys | None = None
    """None: it takes no part in the prefix cache."""
    grammar: GrammarState | None = None
    """None: its output is free."""
    num_ever_computed_tokens: int = 0
    """High-water mark of num_computed_tokens: what a preemption made it compute again lies below."""
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    last_turn: tuple[int, int] = (0, 0)
    """Step that last computed a token of it, and its place there: the least recent decodes first when not all can."""

    def __post_init__(self) -> None:
        self.request_id = self.submit.request_id
        self.token_ids = list(self.submit.prompt_token_ids)
        if self.submit.params.has_penalties:
            self.history = TokenHistory(self.token_ids, self.num_prompt_tokens)

    @property
    def params(self) -> SamplingParams:
        return self.submit.params

    @property
    def adapter(self) -> bytes:
        """Digest of its adapter; empty: the model as it is."""
        return self.submit.cache_scope.adapter_digest

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.submit.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.submit.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def move_to(self, state: RequestState) -> None:
        """Raises RuntimeError for a transition that the table does not have."""
        if state not in ALLOWED_TRANSITIONS[self.state]:
            raise RuntimeError(f"request {self.request_id} can't go from {self.state} to {state}")
        self.state = state

    def preempt(self) -> None:
        """Back to waiting, to be recomputed: the tokens stay, the blocks go."""
        self.move_to(RequestState.WAITING)
        self.blocks.release()
        self.num_computed_tokens = self.num_shared_blocks = self.num_published_blocks = 0
        self.num_preemptions += 1

    def note_computed(self, num_tokens: int) -> None:
        self.num_computed_tokens += num_tokens
        if self.num_computed_tokens > self.num_ever_computed_tokens:
            self.num_ever_computed_tokens = self.num_computed_tokens

    def num_recomputed(self, num_tokens: int) -> int:
        """How many of the next num_tokens tokens had been computed before a preemption."""
        num_known = self.num_ever_computed_tokens - self.num_computed_tokens
        return min(num_tokens, num_known) if num_known > 0 else 0

    def scheduled(self, num_tokens: int) -> ScheduledSeq:
        """The next num_tokens tokens as part of a step."""
        submit, token_ids, start = self.submit, self.token_ids, self.num_computed_tokens
        return ScheduledSeq(
            request_id=submit.request_id,
            token_ids=tuple(token_ids[start : start + num_tokens]),
            start=start,
            block_ids=self.blocks.block_ids,
            samples=start + num_tokens == len(token_ids),
            params=submit.params,
            history=self.history,
            num_output_tokens=len(token_ids) - len(submit.prompt_token_ids),
        )
