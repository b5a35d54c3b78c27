import pytest

from guidevane_api.admin import LimitsPatch, LimitsSource, ShrinkMode
from guidevane_api.limits import Envelope, PartialLimits, SchedulerLimits
from guidevane_runtime.core.messages import EngineReady, EngineStats
from guidevane_runtime.errors import Conflict, EngineUnavailable
from guidevane_runtime.server.limits_keeper import LimitsKeeper, RefusedLimits

STARTUP = SchedulerLimits(max_num_seqs=8)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def ready(boot_id: str = "b1", limits: SchedulerLimits = STARTUP) -> EngineReady:
    return EngineReady(boot_id, 8192, 100, 10, 16, "float32", "cpu", limits, 1.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keeper(clock: Clock) -> LimitsKeeper:
    made = LimitsKeeper(STARTUP, Envelope(max_num_seqs=16), clock)
    made.engine_ready(ready())
    return made


def patch(epoch: int, max_num_seqs: int = 4, lease_seconds: int = 60) -> LimitsPatch:
    return LimitsPatch(epoch=epoch, limits=PartialLimits(max_num_seqs=max_num_seqs), lease_seconds=lease_seconds)


def test_a_patch_changes_what_it_names_and_keeps_the_rest(keeper: LimitsKeeper) -> None:
    command = keeper.change(patch(7))
    assert command.limits == STARTUP.model_copy(update={"max_num_seqs": 4}) == keeper.target
    assert (keeper.epoch, keeper.source, command.mode) == (7, LimitsSource.SPEC, ShrinkMode.DRAIN)


def test_a_patch_has_to_wait_for_the_first_engine(clock: Clock) -> None:
    """Else the engine's start-up limits would become the target, while it obeys the patch."""
    keeper = LimitsKeeper(STARTUP, Envelope(max_num_seqs=16), clock)
    with pytest.raises(EngineUnavailable, match="the model is being loaded"):
        keeper.change(patch(7))
    keeper.engine_ready(ready())
    assert keeper.change(patch(7)).limits == keeper.target


def test_a_lower_epoch_is_refused(keeper: LimitsKeeper) -> None:
    keeper.change(patch(7))
    with pytest.raises(Conflict, match="epoch 6 is below the stored 7"):
        keeper.change(patch(6))


def test_the_same_patch_again_does_nothing_but_renew_the_lease(keeper: LimitsKeeper, clock: Clock) -> None:
    command = keeper.change(patch(7, lease_seconds=60))
    clock.now_s += 50
    assert keeper.change(patch(7, lease_seconds=60)) is command
    clock.now_s += 50
    assert keeper.expire() is None
    assert keeper.view(EngineStats()).lease_remaining_seconds == 10


def test_the_same_epoch_with_another_body_is_refused(keeper: LimitsKeeper) -> None:
    keeper.change(patch(7))
    with pytest.raises(Conflict, match="used with another body"):
        keeper.change(patch(7, max_num_seqs=5))


def test_a_refused_patch_changes_nothing(keeper: LimitsKeeper) -> None:
    with pytest.raises(RefusedLimits) as raised:
        keeper.change(patch(7, max_num_seqs=17))
    assert set(raised.value.errors) == {"maxNumSeqs"}
    assert (keeper.target, keeper.epoch) == (STARTUP, 0)


def test_a_lease_that_ran_out_goes_back_to_the_startup_limits_once(keeper: LimitsKeeper, clock: Clock) -> None:
    keeper.change(patch(7, lease_seconds=60))
    clock.now_s += 60
    command = keeper.expire()
    assert command is not None and command.limits == STARTUP
    assert (keeper.source, keeper.epoch) == (LimitsSource.LEASE_EXPIRED, 7)
    assert keeper.expire() is None


def test_after_a_lapse_the_same_patch_is_obeyed_again(keeper: LimitsKeeper, clock: Clock) -> None:
    keeper.change(patch(7))
    clock.now_s += 61
    lapse = keeper.expire()
    assert keeper.change(patch(7)) is not lapse
    assert keeper.target.max_num_seqs == 4


def test_the_number_for_the_engine_grows_with_every_change(keeper: LimitsKeeper, clock: Clock) -> None:
    first = keeper.change(patch(100))
    clock.now_s += 61
    lapse, second = keeper.expire(), keeper.change(patch(101))
    assert lapse
    assert first.epoch < lapse.epoch < second.epoch


def test_a_new_engine_has_the_target_and_a_new_boot_id(keeper: LimitsKeeper) -> None:
    keeper.change(patch(7))
    keeper.engine_ready(ready("b2", keeper.target))
    view = keeper.view(EngineStats(num_running=1, num_waiting=2))
    assert (view.boot_id, view.epoch, view.target.max_num_seqs, view.startup) == ("b2", 7, 4, STARTUP)
    assert (view.num_running, view.num_waiting) == (1, 2)


def test_the_ceiling_of_the_context_is_the_models(keeper: LimitsKeeper) -> None:
    assert keeper.view(EngineStats()).ceiling == Envelope(max_num_seqs=16, max_model_len=8192)
