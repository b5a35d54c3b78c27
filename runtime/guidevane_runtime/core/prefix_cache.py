"""The prefix cache: a request starts with blocks that hold the start of its text already.

Siblings of one body (n > 1) share the full blocks of their prompt this way too, once the first of them has computed
them; so no block is ever shared that somebody still writes to, and nothing has to be copied on write.
"""

from typing import NamedTuple

from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.prefix import BlockKeys, cache_root
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.rules import Held


class PrefixHit(NamedTuple):
    """Blocks that hold the start of a request's text."""

    block_ids: tuple[int, ...] = ()
    num_in_use: int = 0
    """Of those, held by others now: they take no free block."""


NO_HIT = PrefixHit()


class PrefixCache:
    """Finds, shares and publishes blocks of one pool. Switched off, it finds nothing and publishes nothing."""

    def __init__(self, pool: BlockPool, *, model_digest: bytes = b"", is_enabled: bool = True) -> None:
        """model_digest: bytes that no other weights have, and best that nobody can guess."""
        self._pool = pool
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

    def look(self, request: Request) -> PrefixHit:
        """What a waiting request would find now, noted on it. Its last token is never part of it: that is sampled."""
        hit = self._find(request)
        request.num_computed_tokens = len(hit.block_ids) * self._pool.block_size
        request.num_shared_blocks = hit.num_in_use
        return hit

    def held(self, request: Request) -> Held | None:
        """Own rule that holds nobody: those after it judge a request by what the cache has for it at this moment."""
        self.look(request)
        return None

    def enter(self, request: Request) -> None:
        """It has its blocks since take()."""

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
