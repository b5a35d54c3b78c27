"""SchedulerLimits: defaults that fit the envelope, and violations that name field, value, bound and way out."""

import pytest

from guidevane_api.limits import Envelope, PartialLimits, SchedulerLimits, limit_violations


def test_defaults_are_the_conservative_baseline():
    limits = SchedulerLimits.resolve(PartialLimits(), Envelope())
    assert limits == SchedulerLimits()


def test_defaults_shrink_into_a_small_envelope():
    limits = SchedulerLimits.resolve(
        PartialLimits(), Envelope(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=1024)
    )
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.prefill_chunk_size) == (4, 512, 512)
    assert (limits.max_model_len, limits.max_prompt_tokens, limits.max_output_tokens) == (1024, 1024, 1024)


def test_dependent_defaults_follow_the_limit_that_was_given():
    limits = SchedulerLimits.resolve(PartialLimits(max_num_batched_tokens=1000, max_model_len=500), Envelope())
    assert (limits.prefill_token_budget, limits.decode_token_budget, limits.prefill_chunk_size) == (1000, 1000, 1000)
    assert (limits.max_prompt_tokens, limits.max_output_tokens) == (500, 500)


@pytest.mark.parametrize(
    "envelope",
    [Envelope(), Envelope(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1), Envelope(max_model_len=9)],
)
def test_defaults_never_violate(envelope):
    assert limit_violations(SchedulerLimits.resolve(PartialLimits(), envelope), envelope) == {}


@pytest.mark.parametrize(
    ("given", "field", "bound"),
    [
        ({"max_num_seqs": 257}, "maxNumSeqs", "256"),
        ({"max_num_batched_tokens": 8193}, "maxNumBatchedTokens", "8192"),
        ({"prefill_chunk_size": 4097}, "prefillChunkSize", "4096"),
        ({"decode_token_budget": 4097}, "decodeTokenBudget", "4096"),
        ({"max_prompt_tokens": 8193}, "maxPromptTokens", "8192"),
    ],
)
def test_a_violation_says_the_value_the_bound_and_the_way_out(given, field, bound):
    envelope = Envelope()
    found = limit_violations(SchedulerLimits.resolve(PartialLimits(**given), envelope), envelope)
    assert list(found) == [field]
    assert str(*given.values()) in found[field]
    assert bound in found[field]
    assert "raise" in found[field]
