"""KV-cache blocks and who owns them. The pool knows ids; it never sees what is in a block.

A block is taken only through a BlockTable and given back only by that table's release(), so a leak needs a lost table.
"""

from collections import deque


class BlockPool:
    """Blocks 1..num_blocks of block_size tokens each; id 0 is the null block and belongs to nobody."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a KV cache has at least one block of one token, not {num_blocks} of {block_size}; raise its size"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(1, num_blocks + 1))
        self._num_refs = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_refs(self, block_id: int) -> int:
        """Tables that hold the block: 0 when it is free, 1 today, more once prefixes are shared."""
        return self._num_refs[block_id]

    def table(self) -> "BlockTable":
        """An empty block table; what it takes from this pool comes back with its release()."""
        return BlockTable(self)

    def try_take(self, num_blocks: int) -> tuple[int, ...] | None:
        """All of them or none. For BlockTable only."""
        if num_blocks > len(self._free):
            return None
        taken = tuple(self._free.popleft() for _ in range(num_blocks))
        for block_id in taken:
            self._num_refs[block_id] = 1
        return taken

    def give_back(self, block_ids: tuple[int, ...]) -> None:
        """Drop one reference of each block, last block of a request first. For BlockTable only.

        Raises RuntimeError for a block that is free already: its next owner would be overwritten.
        """
        for block_id in reversed(block_ids):
            if self._num_refs[block_id] < 1:
                raise RuntimeError(f"block {block_id} was freed twice; its table was released by somebo")
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id] == 0:
                self._free.append(block_id)


class BlockTable:
    """The blocks of one request in the order of its tokens."""

    __slots__ = ("_pool", "block_ids")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.block_ids: tuple[int, ...] = ()

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

    def detach(self) -> "BlockTable":
        """Move the blocks to a table of their own, to be released later; this one is empty then."""
        moved = BlockTable(self._pool)
        moved.block_ids, self.block_ids = self.block_ids, ()
        return moved

    def release(self) -> None:
        """Give every block back. Idempotent: a released table is empty."""
        block_ids, self.block_ids = self.block_ids, ()
        self._pool.give_back(block_ids)
