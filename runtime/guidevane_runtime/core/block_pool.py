"""KV-cache blocks and who owns them. The pool knows ids and keys; it never sees what is in a block.

A block is taken only through a BlockTable and given back only by that table's release(), so a leak needs a lost table.

# used         held by at least one table
# cached free  held by nobody, but what is in it can be found by its key until somebody needs the block
# blank free   held by nobody, and nothing in it is worth finding
"""

from collections import OrderedDict, deque


class BlockPool:
    """Blocks 1..num_blocks of block_size tokens each; id 0 is the null block and belongs to nobody."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a KV cache has at least one block of one token, not {num_blocks} of {block_size}; raise its size"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blank = deque(range(1, num_blocks + 1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        self._num_refs = [0] * (num_blocks + 1)
        self._keys: list[bytes | None] = [None] * (num_blocks + 1)
        self._by_key: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks to be had, cached ones among them."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached_free(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._blank) - len(self._cached)

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_refs(self, block_id: int) -> int:
        """Tables that hold the block: 0 when it is free, more than 1 when its text is shared."""
        return self._num_refs[block_id]

    def is_used(self, block_id: int) -> bool:
        return self._num_refs[block_id] > 0

    def is_published(self, block_id: int) -> bool:
        """Whether the block can be found by its key."""
        return self._keys[block_id] is not None

    def find(self, key: bytes) -> int | None:
        return self._by_key.get(key)

    def publish(self, block_id: int, key: bytes) -> None:
        """Let a full block be found by its key. Of two that hold the same text the first stays the one to find."""
        if self._keys[block_id] is None and self._by_key.setdefault(key, block_id) == block_id:
            self._keys[block_id] = key

    def withdraw(self, block_ids: tuple[int, ...]) -> None:
        """Let used blocks not be found any more: what is in them may be wrong."""
        for block_id in block_ids:
            self._forget(block_id)

    def table(self) -> "BlockTable":
        """An empty block table; what it takes from this pool comes back with its release()."""
        return BlockTable(self)

    def try_take(self, num_blocks: int) -> tuple[int, ...] | None:
        """All of them or none: blank ones first, then those unused longest. For BlockTable only."""
        if num_blocks > self.num_free:
            return None
        taken = tuple(self._blank.popleft() if self._blank else self._evict() for _ in range(num_blocks))
        for block_id in taken:
            self._num_refs[block_id] = 1
        return taken

    def share(self, block_ids: tuple[int, ...]) -> None:
        """One more reference of each block that find() gave. For BlockTable only."""
        for block_id in block_ids:
            if not self._num_refs[block_id]:
                del self._cached[block_id]
            self._num_refs[block_id] += 1

    def give_back(self, block_ids: tuple[int, ...]) -> None:
        """Drop one reference of each block, last block of a request first. For BlockTable only.

        So the tail of a text is evicted before its head, without which it can't be found. Raises RuntimeError for a
        block that is free already: its next owner would be overwritten.
        """
        for block_id in reversed(block_ids):
            if self._num_refs[block_id] < 1:
                raise RuntimeError(f"block {block_id} was freed twice; its table was released by somebody else")
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id]:
                continue
            if self._keys[block_id] is None:
                self._blank.append(block_id)
            else:
                self._cached[block_id] = None

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        self._forget(block_id)
        return block_id

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        if key is not None:
            del self._by_key[key]
            self._keys[block_id] = None


class BlockTable:
    """The blocks of one request in the order of its tokens."""

    __slots__ = ("_pool", "block_ids")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.block_ids: tuple[int, ...] = ()

    def share(self, block_ids: tuple[int, ...]) -> None:
        """Begin an empty table with blocks that are full and may be others' too."""
        assert not self.block_ids, "a prefix hit came after the first block"
        self._pool.share(block_ids)
        self.block_ids = block_ids

    def try_grow_to(self, num_tokens: int) -> bool:
        """Hold blocks for so many tokens; when the pool lacks them, nothing is taken."""
        missing = self._pool.num_blocks_for(num_tokens) - len(self.block_ids)
        if missing <= 0:
            return True
        taken = self._pool.try_take(missing)
        if taken is None:
            return False
        self.block_ids += taken
        return True

    def shrink_to(self, num_tokens: int) -> None:
        """Give back what is not needed for so many tokens: room of drafts that were rejected."""
        num_kept = self._pool.num_blocks_for(num_tokens)
        tail, self.block_ids = self.block_ids[num_kept:], self.block_ids[:num_kept]
        self._pool.give_back(tail)

    def detach(self) -> "BlockTable":
        """Move the blocks to a table of their own, to be released later; this one is empty then."""
        moved = BlockTable(self._pool)
        moved.block_ids, self.block_ids = self.block_ids, ()
        return moved

    def release(self) -> None:
        """Give every block back. Idempotent: a released table is empty."""
        block_ids, self.block_ids = self.block_ids, ()
        self._pool.give_back(block_ids)
