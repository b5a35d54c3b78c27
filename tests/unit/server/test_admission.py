import pytest

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.messages import EngineStats
from guidevane_runtime.errors import InvalidRequest
from guidevane_runtime.server.admission import AdmissionGate, Capacity, NeverFits, Refused, Rejection, TooLong


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_gate(clock: Clock, **limits: int) -> AdmissionGate:
    resolved = SchedulerLimits(**limits)
    gate = AdmissionGate(limits=lambda: resolved, clock=clock)
    gate.capacity = Capacity(num_blocks=1000, block_size=16)
    return gate


def refusal(gate: AdmissionGate, count: int = 1) -> Refused:
    with pytest.raises(Refused) as raised:
        gate.enter(count)
    return raised.value


def test_an_idle_engine_takes_its_slots_and_its_queue(clock: Clock) -> None:
    gate = make_gate(clock, max_num_seqs=2, max_queued_requests=3)
    gate.enter(5)
    assert refusal(gate).reason is Rejection.QUEUE_FULL
    assert gate.num_live == 5


def test_slots_that_memory_does_not_allow_are_no_room(clock: Clock) -> None:
    gate = make_gate(clock, max_num_seqs=8, max_queued_requests=3)
    gate.enter(4)
    gate.observe(EngineStats(num_running=1, num_waiting=3), 0, 0.0)
    assert refusal(gate).reason is Rejection.QUEUE_FULL


def test_a_group_comes_in_whole_or_not_at_all(clock: Clock) -> None:
    gate = make_gate(clock, max_num_seqs=2, max_queued_requests=3)
    (held,) = gate.enter(1)
    refusal(gate, 5)
    assert gate.num_live == 1
    held.release()
    assert len(gate.enter(5)) == 5


def test_more_choices_than_an_idle_engine_has_places_for_are_no_overload(clock: Clock) -> None:
    gate = make_gate(clock, max_num_seqs=2, max_queued_requests=3)
    with pytest.raises(InvalidRequest, match=r"asks for 6 choices, .* have room for 5"):
        gate.enter(6)


def test_a_released_lease_makes_room_once(clock: Clock) -> None:
    gate = make_gate(clock, max_num_seqs=1, max_queued_requests=1)
    first, _ = gate.enter(2)
    first.release()
    first.release()
    gate.enter(1)
    refusal(gate)


def test_queued_tokens_are_those_without_a_first_token(clock: Clock) -> None:
    gate = make_gate(clock, max_queued_tokens=100)
    (first,) = gate.enter(1)
    gate.charge([first], [90])
    second = gate.enter(1)
    with pytest.raises(Refused, match=r"90 prompt tokens wait, this adds 20, limits\.maxQueuedTokens is 100"):
        gate.charge(second, [20])
    first.started = True
    gate.charge(second, [20])
    assert gate.num_queued_tokens() == 20


def test_a_prompt_above_the_cap_comes_in_when_nothing_waits(clock: Clock) -> None:
    gate = make_gate(clock, max_queued_tokens=100)
    gate.charge(gate.enter(1), [500])


def test_draining_says_how_long_it_takes(clock: Clock) -> None:
    gate = make_gate(clock)
    gate.drain(clock.now_s + 12.5)
    found = refusal(gate)
    assert (found.reason, found.retry_after_s) == (Rejection.DRAINING, 13)


def test_without_an_engine_nobody_comes_in(clock: Clock) -> None:
    gate = make_gate(clock)
    gate.capacity = None
    assert refusal(gate).reason is Rejection.NOT_READY


def test_retry_after_follows_the_pace_at_which_requests_end(clock: Clock) -> None:
    def waits(gap_s: float) -> int:
        gate = make_gate(clock, max_num_seqs=100, max_queued_requests=100)
        for lease in gate.enter(100):
            clock.now_s += gap_s
            lease.started = True
            lease.release()
        gate.enter(200)
        return refusal(gate, 10).retry_after_s

    assert waits(0.01) <= 2
    assert 50 <= waits(6.0) <= 61
    assert waits(30.0) == 120


def test_what_is_refused_behind_the_door_does_not_quicken_the_pace(clock: Clock) -> None:
    gate = make_gate(clock, max_num_seqs=1, max_queued_requests=1)

    def end_one() -> None:
        (lease,) = gate.enter(1)
        lease.started = True
        lease.release()

    for _ in range(100):
        clock.now_s += 10.0
        end_one()
    for _ in range(100):
        gate.enter(1)[0].release()
    gate.enter(2)
    assert refusal(gate).retry_after_s >= 9


def test_retry_after_for_tokens_follows_the_prefill_rate(clock: Clock) -> None:
    gate = make_gate(clock, max_queued_tokens=1000)
    for _ in range(100):
        gate.observe(EngineStats(), num_prefill_tokens=10, step_s=0.1)
    gate.charge(gate.enter(1), [1000])
    with pytest.raises(Refused) as raised:
        gate.charge(gate.enter(1), [500])
    assert raised.value.retry_after_s == 5


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "error"),
    [
        (90, 10, None),
        (99, None, None),
        (90, 11, TooLong),
        (100, None, TooLong),
        (10, 51, InvalidRequest),
    ],
)
def test_a_request_must_fit_the_context(
    clock: Clock, num_prompt: int, max_tokens: int | None, error: type[InvalidRequest] | None
) -> None:
    gate = make_gate(clock, max_model_len=100, max_prompt_tokens=100, max_output_tokens=50)
    if error is None:
        gate.check_prompt(num_prompt, max_tokens)
    else:
        with pytest.raises(error):
            gate.check_prompt(num_prompt, max_tokens)


def test_a_text_that_no_tokenising_makes_short_enough_is_too_long(clock: Clock) -> None:
    gate = make_gate(clock, max_prompt_tokens=50)
    gate.check_text(50 * 8, 8)
    with pytest.raises(TooLong, match=r"408 characters, which are 51 tokens or more, limits\.maxPromptTokens is 50"):
        gate.check_text(51 * 8, 8)


def test_a_prompt_above_its_own_limit_is_too_long(clock: Clock) -> None:
    gate = make_gate(clock, max_prompt_tokens=50)
    with pytest.raises(TooLong, match=r"51 tokens, limits\.maxPromptTokens is 50"):
        gate.check_prompt(51, 1)


def test_a_prompt_that_the_cache_cannot_hold_never_fits(clock: Clock) -> None:
    gate = make_gate(clock)
    gate.capacity = Capacity(num_blocks=4, block_size=16)
    gate.check_prompt(63, 1)
    with pytest.raises(NeverFits, match="64"):
        gate.check_prompt(64, 1)


@pytest.mark.parametrize(("wanted", "expected"), [(None, 50), (16, 16), (70, 50)])
def test_the_default_of_max_tokens_is_clipped(clock: Clock, wanted: int | None, expected: int) -> None:
    gate = make_gate(clock, max_model_len=100, max_output_tokens=50)
    assert gate.default_max_tokens(10, wanted) == expected
    assert gate.default_max_tokens(95, wanted) == 5
