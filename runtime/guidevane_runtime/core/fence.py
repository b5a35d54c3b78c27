"""The step in flight, and the fence round blocks that it may still read or write."""

from guidevane_runtime.core.block_pool import BlockTable
from guidevane_runtime.core.plan import ScheduledBatch


class StepInFlight:
    """What a step works on is nobody else's before the step is over, even if its request has ended meanwhile."""

    def __init__(self) -> None:
        self._request_ids: frozenset[str] = frozenset()
        self.fenced: list[BlockTable] = []
        """Blocks of requests that ended in the step: free when it is over."""

    @property
    def is_on(self) -> bool:
        return bool(self._request_ids)

    def works_on(self, request_id: str) -> bool:
        return request_id in self._request_ids

    def begin(self, batch: ScheduledBatch) -> None:
        self._request_ids = frozenset(seq.request_id for seq in batch.seqs)

    def end(self) -> None:
        self._request_ids = frozenset()
        while self.fenced:
            self.fenced.pop().release()

    def release(self, blocks: BlockTable, *, still_read: bool) -> None:
        """Give blocks back: at once, or when the step is over that still works on them."""
        if still_read:
            self.fenced.append(blocks.detach())
        else:
            blocks.release()
