"""The prefix cache: a request starts with blocks that hold the start of its text already.

Requests that begin with the same text at the same time share it too, siblings of one body (n > 1) among them: the first
computes it, the others wait for its blocks. So no block is ever shared that somebody still writes to, and nothing has
to be copied on write (docs/adr/0005).
"""

from collections.abc import Iterable
from typing import NamedTuple

from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.budget import StepPlan
from guidevane_runtime.core.messages import Hold
from guidevane_runtime.core.prefix import BlockKeys, cache_root
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.rules import AdmissionRule, Held, first_hold


class PrefixHit(NamedTuple):
    """Blocks that hold the start of a request's text."""

    block_ids: tuple[int, ...] = ()
    num_in_use: int = 0
    """Of those, held by others now: they take no free block."""


NO_HIT = PrefixHit()

MIN_AWAITED_TOKENS = 64
"""Text that is worth a step of waiting. The fixed cost of a step is that of 23 prompt tokens (demo model on a CPU core)
to 160 (8B model on an H100), by the cost models in tests/data/bench: for less, computing it again is faster."""


class PrefixCache:
    """Finds, shares and publishes blocks of one pool. Switched off, it finds nothing and publishes nothing."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        model_digest: bytes = b"",
        is_enabled: bool = True,
        min_awaited_tokens: int = MIN_AWAITED_TOKENS,
    ) -> None:
        """model_digest: bytes that no other weights have, and best that nobody can guess."""
        self._pool = pool
        self.num_awaited_blocks = max(1, pool.num_blocks_for(min_awaited_tokens))
        """Blocks that are worth a step of waiting."""
        self._model_digest = model_digest
        self._is_enabled = is_enabled
        self.num_queried_tokens = 0
        """Prompt tokens looked up; each prompt once, so what a preempted request finds of its own counts nowhere."""
        self.num_hit_tokens = 0

    def open(self, request: Request) -> None:
        """Let a new request take part."""
        if self._is_enabled:
            size = self._pool.block_size
            root = cache_root(request.submit.cache_scope, model_digest=self._model_digest, block_size=size)
            request.block_keys = BlockKeys(root, request.token_ids, size)

    def glance(self, request: Request) -> None:
        """Note how far a waiting request's text is there, as far as its end says: from where it was when last seen.

        A long text costs no more than a short one. A gap in it, which a look would find, is not seen: texts are evicted
        from their ends.
        """
        keys, size = request.block_keys, self._pool.block_size
        if keys is None:
            return
        num_found = request.num_computed_tokens // size
        while num_found and self._pool.find(keys.key(num_found - 1)) is None:
            num_found -= 1
        while num_found < (request.num_tokens - 1) // size and self._pool.find(keys.key(num_found)) is not None:
            num_found += 1
        request.num_computed_tokens = num_found * size

    def look(self, request: Request) -> PrefixHit:
        """What a waiting request would find now, noted on it. Its last token is never part of it: that is sampled."""
        hit = self._find(request)
        request.num_computed_tokens = len(hit.block_ids) * self._pool.block_size
        request.num_shared_blocks = hit.num_in_use
        return hit

    def take(self, request: Request) -> None:
        """Start a request with the blocks that are there; they are its own then, to read."""
        hit = self.look(request)
        request.blocks.share(hit.block_ids)
        request.num_published_blocks = len(hit.block_ids)
        if request.block_keys is not None and not request.num_preemptions:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_queried_tokens += request.num_prompt_tokens
            self.num_hit_tokens += request.num_cached_tokens

    def publish(self, request: Request) -> None:
        """Let others find the blocks that are full now. Only after the step that filled them."""
        num_full, keys = request.num_computed_tokens // self._pool.block_size, request.block_keys
        if num_full == request.num_published_blocks or keys is None:
            return
        for index in range(request.num_published_blocks, num_full):
            self._pool.publish(request.blocks.block_ids[index], keys.key(index))
        request.num_published_blocks = num_full

    def key_ahead(self, request: Request, num_blocks: int) -> bytes:
        """Key of the last of the next num_blocks blocks that the request lacks; empty: its text ends before.

        Two requests with the same key ahead have all up to there in common, and have got equally far.
        """
        size, keys = self._pool.block_size, request.block_keys
        index = request.num_computed_tokens // size + num_blocks - 1
        return b"" if keys is None or (index + 1) * size >= request.num_tokens else keys.key(index)

    def _find(self, request: Request) -> PrefixHit:
        keys = request.block_keys
        if keys is None:
            return NO_HIT
        found: list[int] = []
        for index in range((request.num_tokens - 1) // self._pool.block_size):
            block_id = self._pool.find(keys.key(index))
            if block_id is None:
                break
            found.append(block_id)
        return PrefixHit(tuple(found), sum(map(self._pool.is_used, found)))


class PrefixInFlight:
    """Own rule: who begins with text that this step computes for somebody else waits for those blocks.

    Whoever computes them gets on in this very step, or they are not waited for: each step of waiting is a step nearer.
    Those after this rule judge a request by what the cache seems to have for it at this moment.
    """

    def __init__(self, cache: PrefixCache, step: StepPlan, prefills: Iterable[Request]) -> None:
        self._cache = cache
        self._next: dict[bytes, list[Request]] = {}
        """Who computes the block with that key next, as far as it is not among the far ones yet."""
        self._far: set[bytes] = set()
        """Keys as far ahead of them as is worth waiting for. Each costs some hashes, and most prompts differ in their
        next block already: so they are made when somebody has that in common."""
        for request in step.getting_on(prefills):
            self.enter(request)

    def held(self, request: Request) -> Held | None:
        self._cache.glance(request)
        computing = self._next.get(self._cache.key_ahead(request, 1))
        if computing is None:
            return None
        while computing:
            self._far.add(self._key_far_ahead(computing.pop()))
        far = self._key_far_ahead(request)
        if not far or far not in self._far:
            return None
        return Held(Hold.PREFIX_IN_FLIGHT, "it begins with text that is being computed; it starts with those blocks")

    def enter(self, request: Request) -> None:
        if key := self._cache.key_ahead(request, 1):
            self._next.setdefault(key, []).append(request)

    def _key_far_ahead(self, request: Request) -> bytes:
        return self._cache.key_ahead(request, self._cache.num_awaited_blocks)


class WholePrefix:
    """Last own rule: who passed the others by what a glance saw is looked up, and asked again if some of it is gone.

    Those after this rule judge a request by what the cache has for it.
    """

    def __init__(self, cache: PrefixCache, *others: AdmissionRule) -> None:
        """others: rules that go by what the cache has."""
        self._cache = cache
        self._others = others

    def held(self, request: Request) -> Held | None:
        seen = request.num_computed_tokens
        self._cache.look(request)
        if request.num_computed_tokens == seen:
            return None
        return first_hold(self._others, request)

    def enter(self, request: Request) -> None:
        """The others count it themselves."""
