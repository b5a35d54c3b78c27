from guidevane_api.admin import LimitsSource, ShrinkMode
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.limits import LimitsState
from guidevane_runtime.core.messages import SetLimits

STARTUP, TIGHT = SchedulerLimits(), SchedulerLimits(max_num_seqs=2)


def test_newer_limits_replace_the_old_ones_with_epoch_and_source() -> None:
    state = LimitsState(STARTUP)
    assert (state.epoch, state.source, state.take_shrink_order()) == (0, LimitsSource.STARTUP, None)
    assert state.replace(SetLimits(TIGHT, 3, LimitsSource.RETUNE))
    assert (state.target, state.epoch, state.source) == (TIGHT, 3, LimitsSource.RETUNE)


def test_stale_limits_change_nothing() -> None:
    state = LimitsState(STARTUP)
    state.replace(SetLimits(TIGHT, 3, LimitsSource.SPEC))
    assert not state.replace(SetLimits(STARTUP, 3, LimitsSource.RETUNE))
    assert not state.replace(SetLimits(STARTUP, 2, LimitsSource.RETUNE, ShrinkMode.PREEMPT))
    assert (state.target, state.epoch, state.source) == (TIGHT, 3, LimitsSource.SPEC)
    assert state.take_shrink_order() is None


def test_effective_limits_follow_use_down_to_the_target_and_stay_there() -> None:
    """What grows again after that is within the target's own rules."""
    state = LimitsState(STARTUP)
    state.replace(SetLimits(TIGHT, 1, LimitsSource.SPEC))
    shown = []
    for num_running in (5, 3, 2, 4):
        state.settle(lambda num_running=num_running: {"max_num_seqs": num_running})
        shown.append(state.effective(lambda num_running=num_running: {"max_num_seqs": num_running}).max_num_seqs)
    assert shown == [5, 3, 2, 2]


def test_limits_that_nothing_is_above_hold_at_once() -> None:
    state = LimitsState(STARTUP)
    state.replace(SetLimits(TIGHT, 1, LimitsSource.SPEC))
    assert state.effective(lambda: {"max_num_seqs": 2, "max_queued_tokens": 5}) is TIGHT


def test_a_shrink_is_ordered_once() -> None:
    state = LimitsState(STARTUP)
    state.replace(SetLimits(TIGHT, 1, LimitsSource.SPEC, ShrinkMode.PREEMPT))
    assert [state.take_shrink_order(), state.take_shrink_order()] == [TIGHT, None]
