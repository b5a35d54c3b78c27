"""The border between scheduler and model: what a plan weighs, and what a result brought."""

import pytest

from guidevane_runtime.core.messages import SamplingParams
from guidevane_runtime.core.plan import SampledToken, ScheduledBatch, ScheduledSeq, StepLoad, StepOutput, load_of

PARAMS = SamplingParams(max_tokens=9, seed=0)


def seq(name: str, num_tokens: int, start: int, *, samples: bool) -> ScheduledSeq:
    return ScheduledSeq(name, (1,) * num_tokens, start, block_ids=(1, 2), samples=samples, params=PARAMS)


def test_the_load_of_a_step_sums_tokens_context_and_pairs() -> None:
    seqs = (
        seq("decode", 1, 9, samples=True),
        seq("drafts", 3, 5, samples=True),
        seq("whole", 4, 0, samples=True),
        seq("chunk", 1, 6, samples=False),
    )
    batch = ScheduledBatch(step=1, seqs=seqs, epoch=0, num_drafts={"drafts": 2})
    kv = (9 + 1) + (5 + 3) + 4 + (6 + 1)
    assert load_of(batch) == StepLoad(4 + 1, 1 + 3, kv, 4 * 4 + 1 * (6 + 1))
    assert batch.num_tokens == 9


@pytest.mark.parametrize("accepted", [(), (SampledToken(5), SampledToken(6))])
def test_a_verified_sequence_brings_its_accepted_drafts_and_the_token_after_them(
    accepted: tuple[SampledToken, ...],
) -> None:
    output = StepOutput((), accepted={"a": accepted} if accepted else {})
    assert output.drawn("a", SampledToken(7)) == (*accepted, SampledToken(7))


def test_a_row_that_can_not_be_sampled_brings_no_draft() -> None:
    bad = SampledToken(0, error="logits are not finite")
    assert StepOutput((), accepted={"a": (SampledToken(5),)}).drawn("a", bad) == (bad,)
