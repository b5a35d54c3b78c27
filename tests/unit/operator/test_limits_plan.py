"""Which limits under which epoch."""

from hypothesis import given
from hypothesis import strategies as st

from guidevane_api.admin import LimitsSource
from guidevane_api.limits import Envelope, PartialLimits, SchedulerLimits
from guidevane_operator.limits_plan import DesiredLimits, next_desired, obeys, outgoing

ENVELOPE = Envelope(max_num_seqs=64, max_num_batched_tokens=4096, max_model_len=4096)
SPEC = PartialLimits(max_num_seqs=8)


def retuned(value: int) -> DesiredLimits:
    """What the tuner left behind on top of SPEC."""
    desired = next_desired(SPEC, ENVELOPE, None)
    return desired.bumped(desired.limits.merged(PartialLimits(max_num_seqs=value)), LimitsSource.RETUNE)


def test_the_first_epoch_is_one_and_comes_from_the_spec() -> None:
    desired = next_desired(SPEC, ENVELOPE, None)
    assert (desired.epoch, desired.source, desired.limits.max_num_seqs) == (1, LimitsSource.SPEC, 8)


def test_the_tuners_work_stands_while_spec_limits_stay() -> None:
    assert next_desired(SPEC, ENVELOPE, retuned(12)) == retuned(12)


def test_changed_spec_limits_take_precedence_over_the_tuner() -> None:
    desired = next_desired(PartialLimits(max_num_seqs=9), ENVELOPE, retuned(12))
    assert (desired.epoch, desired.source, desired.limits.max_num_seqs) == (3, LimitsSource.SPEC, 9)


def test_a_smaller_envelope_throws_out_what_no_longer_fits() -> None:
    small = Envelope(max_num_seqs=10, max_num_batched_tokens=4096, max_model_len=4096)
    desired = next_desired(SPEC, small, retuned(12))
    assert (desired.source, desired.limits.max_num_seqs) == (LimitsSource.SPEC, 8)


@given(
    st.lists(st.one_of(st.integers(1, 64).map(lambda n: ("spec", n)), st.integers(1, 64).map(lambda n: ("tune", n))))
)
def test_epochs_only_grow_and_grow_with_every_change(steps: list[tuple[str, int]]) -> None:
    spec, desired = SPEC, next_desired(SPEC, ENVELOPE, None)
    for kind, value in steps:
        before = desired
        if kind == "spec":
            spec = PartialLimits(max_num_seqs=value)
        else:
            desired = desired.bumped(desired.limits.merged(PartialLimits(max_num_seqs=value)), LimitsSource.RETUNE)
        desired = next_desired(spec, ENVELOPE, desired)
        assert desired.epoch >= before.epoch
        assert desired.limits == before.limits or desired.epoch > before.epoch


def test_a_pod_that_is_ahead_is_outrun() -> None:
    desired = next_desired(SPEC, ENVELOPE, None)
    assert desired.above(41).epoch == 42
    assert desired.above(0).epoch == 2


def test_obeying_is_judged_on_what_was_sent() -> None:
    limits = SchedulerLimits.resolve(SPEC, Envelope(max_num_seqs=64, max_num_batched_tokens=4096))
    asked = outgoing(limits, SPEC, Envelope(max_num_seqs=64, max_num_batched_tokens=4096))
    own_length = limits.merged(PartialLimits(max_model_len=2048, max_prompt_tokens=2048, max_output_tokens=2048))
    assert asked.max_model_len is None
    assert obeys(own_length, asked)
    assert not obeys(own_length.merged(PartialLimits(max_num_seqs=9)), asked)
