"""Virtual counters alone: who is next, and what a pause, a weight and a refund do to it."""

from guidevane_runtime.core.fair import FairTurns, Flow


def entered(turns: FairTurns[Flow], *weights: int) -> list[Flow]:
    flows = [Flow(weight) for weight in weights]
    for flow in flows:
        turns.enter(flow)
    return flows


def serve(turns: FairTurns[Flow], num_turns: int, price: float = 1) -> list[Flow]:
    served = []
    for _ in range(num_turns):
        flow = next(turns.in_turn())
        flow.charge(price)
        served.append(flow)
    return served


def test_the_least_served_is_next_and_of_equals_the_one_that_waits_longest() -> None:
    turns = FairTurns[Flow]()
    first, second, third = entered(turns, 1, 1, 1)
    first.charge(5)
    third.charge(2)
    assert list(turns.in_turn()) == [second, third, first]
    second.charge(2)
    assert list(turns.in_turn()) == [second, third, first]


def test_service_is_shared_by_weight() -> None:
    turns = FairTurns[Flow]()
    heavy, light = entered(turns, 3, 1)
    served = serve(turns, 400)
    assert (served.count(heavy), served.count(light)) == (300, 100)


def test_a_flow_that_comes_back_has_no_credit_for_its_absence() -> None:
    turns = FairTurns[Flow]()
    resting, busy = entered(turns, 1, 1)
    turns.leave(resting)
    serve(turns, 100)
    turns.enter(resting)
    assert resting.counter == busy.counter == 100
    assert serve(turns, 10).count(resting) == 5


def test_a_flow_that_comes_back_keeps_what_it_owes() -> None:
    turns = FairTurns[Flow]()
    greedy, modest = entered(turns, 1, 1)
    greedy.charge(50)
    modest.charge(1)
    turns.leave(greedy)
    turns.enter(greedy)
    assert greedy.counter == 50


def test_after_an_idle_time_service_goes_on_where_the_last_one_left() -> None:
    """A newcomer may not draw on a time in which nobody asked for anything."""
    turns = FairTurns[Flow]()
    (old,) = entered(turns, 1)
    turns.leave(old)
    old.charge(70)
    (new,) = entered(turns, 1)
    assert new.counter == 70


def test_a_new_weight_counts_from_now_on_and_the_counter_does_not_jump() -> None:
    turns = FairTurns[Flow]()
    first, second = entered(turns, 1, 1)
    serve(turns, 200)
    first.weight = 4
    assert first.counter == second.counter == 100
    assert serve(turns, 500).count(first) == 400


def test_a_refund_gives_back_no_more_than_what_was_paid_since_the_last_break() -> None:
    turns = FairTurns[Flow]()
    ahead, behind = entered(turns, 1, 1)
    behind.charge(100)
    ahead.charge(500)
    turns.leave(ahead)
    turns.enter(ahead)
    ahead.refund(500)
    assert ahead.counter == 100


def test_leaving_twice_is_leaving_once() -> None:
    turns = FairTurns[Flow]()
    first, second = entered(turns, 1, 1)
    turns.leave(first)
    turns.leave(second)
    second.charge(9)
    turns.leave(first)
    (new,) = entered(turns, 1)
    assert new.counter == 9
