"""Who may come in: memory now, and the peak of memory that running requests and a newcomer will need together.

Peak-KV estimate after LightLLM's past-future scheduler (arXiv 2507.10150): outputs of the past say how long those of
the present get. An estimate that was too low costs a preemption. Each preemption of a request doubles what is set aside
before it runs again, and from the third on everything that could ever be needed is: no request goes back a fourth time
for lack of blocks.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Collection, Iterable
from functools import cached_property

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import Hold
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.rules import Held

MAX_PREEMPTIONS_ON_ESTIMATE = 2
"""Preemptions after which a request is admitted on an estimate; above, on the certain bound."""


class OutputForecast:
    """How long outputs get, learned from the last finished requests."""

    WINDOW = 256
    """Finished requests that count: a few minutes of traffic, so a change of the mix shows soon."""
    PRIOR_TOKENS = 256
    """Assumed output while nothing has finished: a chat answer."""
    QUANTILE = 0.9
    """High, as too low costs a preemption and too high only a later admission."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def record(self, num_output_tokens: int) -> None:
        self._recent.append(num_output_tokens)
        insort(self._sorted, num_output_tokens)
        if len(self._recent) > self.WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def num_more_tokens(self, num_so_far: int) -> int:
        """Expected further output after num_so_far tokens: the 90th percentile of those that got longer."""
        shorter = bisect_right(self._sorted, num_so_far)
        longer = len(self._sorted) - shorter
        if longer:
            return self._sorted[shorter + int(self.QUANTILE * (longer - 1))] - num_so_far
        # Nobody got this far: expect as much again.
        return max(self.PRIOR_TOKENS - num_so_far, num_so_far)


Need = tuple[int, int]
"""What one request is expected to take up, in tokens: what is left until it ends, and what it holds now.

Held is rounded up to what its last block may leave unused, and goes without what others hold anyway.
"""


class Needs:
    """Those of the requests inside. One more is judged often, so what can be known of all of them is kept."""

    def __init__(self, needs: Iterable[Need]) -> None:
        self._least_left_first = sorted(needs)
        self._all_at_once = sum(map(sum, self._least_left_first))

    def add(self, need: Need) -> None:
        insort(self._least_left_first, need)
        self._all_at_once += sum(need)

    def all_at_once(self, candidate: Need) -> int:
        """Tokens if everybody's end came at one time: never less than the peak, and quick to see."""
        return self._all_at_once + sum(candidate)

    def peak(self, candidate: Need) -> int:
        """Max over i of left_i * (i + 1) + held_0 + ... + held_i, longest left first. Tokens."""
        together = self._least_left_first.copy()
        insort(together, candidate)
        peak = held_so_far = 0
        for rank, (left, held) in enumerate(reversed(together), start=1):
            held_so_far += held
            here = left * rank + held_so_far
            if here > peak:
                peak = here
        return peak


class SeqSlots:
    """Door rule: max_num_seqs requests run at most."""

    def __init__(self, running: Collection[Request], limits: SchedulerLimits) -> None:
        self._running = running
        self._max_num_seqs = limits.max_num_seqs

    def held(self) -> Held | None:
        if len(self._running) < self._max_num_seqs:
            return None
        why = "{value} requests run, limit maxNumSeqs {bound}"
        return Held(Hold.MAX_NUM_SEQS, why, len(self._running), self._max_num_seqs)


class MemoryGate:
    """Whether one more request fits the KV limit, beside those that run. For the admissions of one step."""

    def __init__(
        self, pool: BlockPool, limits: SchedulerLimits, forecast: OutputForecast, running: Iterable[Request]
    ) -> None:
        self._pool = pool
        self.max_blocks = kv_limit_blocks(pool, limits)
        """The KV limit."""
        self._forecast = forecast
        self._inside = list(running)
        self._needs: dict[int, Needs] = {}
        """By distrust. Made when first asked for."""

    def held(self, request: Request) -> Held | None:
        """Nothing holds the first one: what fits the pool fits an empty one, whatever the limit."""
        if not self._inside:
            return None
        # The peak includes what is needed now; a full pool is only quicker to see.
        blocks = self.blocks_now(request)
        if blocks > self.max_blocks:
            return Held(Hold.KV_LIMIT, "{value} KV blocks with it, limit {bound}", blocks, self.max_blocks)
        room = self.max_blocks * self._pool.block_size
        if self._fits_all_at_once(request, room):
            return None
        peak = self.peak_tokens(request)
        if peak > room:
            return Held(Hold.PEAK_KV, "{value} KV tokens expected at the peak with it, limit {bound}", peak, room)
        return None

    def enter(self, request: Request) -> None:
        """Count a request that was let in, and has its blocks."""
        self._inside.append(request)
        for distrust, needs in self._needs.items():
            needs.add(self._need(request, distrust))

    def blocks_now(self, request: Request) -> int:
        """Blocks in use together with what the request needs to come in, beyond what it shares."""
        return self._pool.num_used + self._pool.num_blocks_for(request.num_tokens) - request.num_shared_blocks

    def peak_tokens(self, candidate: Request) -> int:
        """Tokens that running requests and the candidate are expected to hold at most, at one time."""
        if candidate.num_preemptions > MAX_PREEMPTIONS_ON_ESTIMATE:
            peak = sum(self._held(request, request.max_num_tokens) for request in (*self._inside, candidate))
        else:
            needs, need = self._needs_with(candidate)
            peak = needs.peak(need)
        return peak + self._num_inherited_tokens

    def _fits_all_at_once(self, candidate: Request, max_tokens: int) -> bool:
        if candidate.num_preemptions > MAX_PREEMPTIONS_ON_ESTIMATE:
            return False  # judged by the certain bound, which is higher
        needs, need = self._needs_with(candidate)
        return needs.all_at_once(need) + self._num_inherited_tokens <= max_tokens

    @cached_property
    def _num_inherited_tokens(self) -> int:
        """Room in blocks that outlive the request that took them, because those it shared them with go on.

        A shared block counts for the one that took it, and after its end for nobody: so it is counted here. Nobody
        ends while others are let in, so it is the same for all of them.
        """
        num_own = sum(len(request.blocks.block_ids) - request.num_shared_blocks for request in self._inside)
        return (self._pool.num_used - num_own) * self._pool.block_size

    def _needs_with(self, candidate: Request) -> tuple[Needs, Need]:
        """Of those inside and of the candidate; its preemptions say how far the forecast is to be trusted."""
        distrust = 1 << candidate.num_preemptions
        if distrust not in self._needs:
            self._needs[distrust] = Needs(self._need(request, distrust) for request in self._inside)
        return self._needs[distrust], self._need(candidate, distrust)

    def _need(self, request: Request, distrust: int) -> Need:
        expected = distrust * self._forecast.num_more_tokens(request.num_output_tokens)
        left = min(expected, request.max_num_tokens - request.num_tokens)
        return left, self._held(request, request.num_tokens)

    def _held(self, request: Request, num_tokens: int) -> int:
        size = self._pool.block_size
        return num_tokens + size - 1 - request.num_shared_blocks * size


def kv_limit_blocks(pool: BlockPool, limits: SchedulerLimits) -> int:
    return max(1, pool.num_blocks * limits.kv_cache_utilization_limit_percent // 100)


def max_num_tokens(wanted: int, max_model_len: int, pool: BlockPool) -> int:
    """Prompt and output together: the last token is never computed, so the pool bounds it at one more than it holds."""
    return min(wanted, max_model_len, pool.num_tokens + 1)


def refusal(num_prompt_tokens: int, max_prompt_tokens: int, max_model_len: int, pool: BlockPool) -> str:
    """Why a prompt can never run, with the way out; empty when it can."""
    if num_prompt_tokens < 1:
        return "prompt has 0 tokens, at least 1 is needed; send a prompt"
    if num_prompt_tokens > max_prompt_tokens:
        return (
            f"prompt has {num_prompt_tokens} tokens, limit maxPromptTokens {max_prompt_tokens}; "
            "shorten it or raise the limit"
        )
    if num_prompt_tokens + 1 > max_model_len:
        return (
            f"prompt has {num_prompt_tokens} tokens and needs room for one more, limit maxModelLen "
            f"{max_model_len}; shorten it or raise the limit"
        )
    if num_prompt_tokens + 1 > pool.num_tokens:
        return (
            f"prompt has {num_prompt_tokens} tokens and needs room for one more, the KV cache holds "
            f"{pool.num_tokens}; shorten it or give the KV cache more memory"
        )
    return ""
