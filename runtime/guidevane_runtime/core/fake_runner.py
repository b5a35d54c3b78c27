"""A model without a model, for tests and for the simulator, with a KV cache that tells lies apart.

Each slot of the cache holds a digest of the tokens up to it, made from the slot before. The next token is read from the
last slot, so a block that was freed too early, shared by mistake or never computed changes the output.
"""

from collections.abc import Sequence

from guidevane_runtime.core.plan import SampledToken, ScheduledBatch, ScheduledSeq, StepOutput

ROOT_DIGEST = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def extended(digest: int, token_id: int) -> int:
    """Digest of a text and one more token; splitmix64's finaliser, so that near inputs end far apart."""
    mixed = (digest ^ (token_id + 1) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)


class FakeRunner:
    """Deterministic in the tokens before a position: batch, chunks and preemption must not show."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._cache = [[0] * block_size for _ in range(num_blocks + 1)]

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        sampled: list[SampledToken | None] = []
        accepted: dict[str, tuple[SampledToken, ...]] = {}
        for seq in batch.seqs:
            num_drafts = batch.num_drafts.get(seq.request_id, 0)
            *agreed, last = self._draw(seq, num_drafts)
            sampled.append(last if seq.samples else None)
            if num_drafts:
                accepted[seq.request_id] = tuple(agreed)
        return StepOutput(tuple(sampled), accepted)

    def continuation(self, prompt_token_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """What a request alone, with all the memory and nothing to stop it, would be answered."""
        digest = ROOT_DIGEST
        for token_id in prompt_token_ids:
            digest = extended(digest, token_id)
        output: list[int] = []
        while len(output) < num_tokens:
            output.append(digest % self._vocab_size)
            digest = extended(digest, output[-1])
        return tuple(output)

    def _draw(self, seq: ScheduledSeq, num_drafts: int) -> list[SampledToken]:
        """The token after the last known one, and one more for each draft that is what was drawn before it."""
        digests = self._run(seq)
        drawn: list[SampledToken] = []
        for place in range(len(digests) - 1 - num_drafts, len(digests)):
            drawn.append(SampledToken(digests[place] % self._vocab_size))
            if seq.token_ids[place + 1 : place + 2] != (drawn[-1].token_id,):
                break
        return drawn

    def _run(self, seq: ScheduledSeq) -> list[int]:
        """Digest after each token of the step, each written to its slot."""
        digest = self._read(seq, seq.start - 1) if seq.start else ROOT_DIGEST
        digests = []
        for position, token_id in enumerate(seq.token_ids, seq.start):
            digest = extended(digest, token_id)
            block_id, offset = self._slot(seq, position)
            self._cache[block_id][offset] = digest
            digests.append(digest)
        return digests

    def _read(self, seq: ScheduledSeq, position: int) -> int:
        block_id, offset = self._slot(seq, position)
        return self._cache[block_id][offset]

    def _slot(self, seq: ScheduledSeq, position: int) -> tuple[int, int]:
        return seq.block_ids[position // self._block_size], position % self._block_size
