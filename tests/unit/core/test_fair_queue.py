"""The waiting room with tenants, classes, priorities and deadlines; one request is served at a time."""

from typing import Any

import pytest

from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import SamplingParams, SetTenants, Submit
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.tenants import RequestClass, TenantPolicy, TenantTerms
from guidevane_runtime.core.waiting import AGEING_S, LOOK_AHEAD, MAX_ASKED, MAX_HEAD_START_S, SLACK_S, WaitingQueue

POOL = BlockPool(1, 4)


def make(name: str, arrival_s: float = 0.0, num_prompt_tokens: int = 10, **fields: Any) -> Request:
    submit = Submit(name, (1,) * num_prompt_tokens, SamplingParams(max_tokens=1, seed=0), arrival_s, **fields)
    return Request(submit, max_num_tokens=num_prompt_tokens + 1, blocks=POOL.table())


def fill(queue: WaitingQueue, *requests: Request) -> None:
    for request in requests:
        queue.add(request)


def first(queue: WaitingQueue) -> Request:
    request = queue.first(lambda _: True)
    assert request is not None
    return request


def serve(queue: WaitingQueue, num_requests: int, num_output_tokens: int = 0, *, frees: bool = True) -> list[str]:
    """Admit in turn, and let each have its output at once. Tenants of the admitted, in order."""
    order = []
    for _ in range(num_requests):
        request = first(queue)
        queue.admit(request)
        for _ in range(num_output_tokens):
            queue.charge_output(request)
        if frees:
            request.note_computed(request.num_tokens)
            queue.settle(request, is_in_flight=False)
        order.append(request.submit.tenant)
    return order


def serve_names(queue: WaitingQueue, num_requests: int) -> list[str]:
    """Serve in turn. Names, in order."""
    names = []
    for _ in range(num_requests):
        names.append(first(queue).request_id)
        serve(queue, 1)
    return names


def policy(*tenants: TenantTerms, **fields: Any) -> TenantPolicy:
    return TenantPolicy(tenants, **fields)


def flood(queue: WaitingQueue, tenant: str, count: int, **fields: Any) -> list[Request]:
    requests = [make(f"{tenant}{number}", float(number), tenant=tenant, **fields) for number in range(count)]
    fill(queue, *requests)
    return requests


def test_a_small_tenant_does_not_queue_behind_a_hog() -> None:
    queue = WaitingQueue()
    flood(queue, "hog", 100)
    fill(queue, make("small", 1000.0, tenant="small"))
    assert "small" in serve(queue, 2)


def test_tenants_with_equal_weights_take_turns_by_price_of_tokens() -> None:
    queue = WaitingQueue()
    flood(queue, "long", 100, num_prompt_tokens=30)
    flood(queue, "short", 100, num_prompt_tokens=10)
    order = serve(queue, 80)
    assert order.count("short") == 3 * order.count("long") == 60


def test_output_tokens_cost_twice_as_much_as_prompt_tokens() -> None:
    queue = WaitingQueue()
    flood(queue, "writer", 1)
    serve(queue, 1, num_output_tokens=7)
    assert queue.virtual_service("writer") == 10 + 2 * 7


def test_a_tenant_with_three_times_the_weight_has_three_times_the_service() -> None:
    queue = WaitingQueue(policy(TenantTerms("gold", weight=3)))
    flood(queue, "gold", 100)
    flood(queue, "plain", 100)
    assert serve(queue, 100, num_output_tokens=5).count("gold") == 75


def test_new_weights_change_the_shares_and_leave_virtual_time_where_it_was() -> None:
    queue = WaitingQueue()
    flood(queue, "a", 200)
    flood(queue, "b", 200)
    serve(queue, 100)
    before = queue.virtual_service("a"), queue.virtual_service("b")
    assert queue.set_tenants(SetTenants(policy(TenantTerms("a", weight=4)), epoch=1))
    assert (queue.virtual_service("a"), queue.virtual_service("b")) == before
    assert serve(queue, 100).count("a") == 80


def test_stale_terms_change_nothing() -> None:
    queue = WaitingQueue()
    queue.set_tenants(SetTenants(policy(TenantTerms("a", weight=4)), epoch=2))
    assert not queue.set_tenants(SetTenants(policy(), epoch=2))
    assert queue.policy.terms_of("a").weight == 4


def test_a_tenant_at_its_cap_lets_others_pass_and_has_its_turn_when_one_ends() -> None:
    queue = WaitingQueue(policy(TenantTerms("capped", max_in_flight=1)))
    capped = flood(queue, "capped", 3, num_prompt_tokens=1)
    flood(queue, "free", 3)
    assert serve(queue, 3, frees=False) == ["capped", "free", "free"]
    assert serve(queue, 1, frees=False) == ["free"] and queue.first(lambda _: True) is None
    queue.settle(capped[0], is_in_flight=False)
    assert serve(queue, 1, frees=False) == ["capped"]


def test_a_tenant_at_its_cap_gathers_no_credit() -> None:
    queue = WaitingQueue(policy(TenantTerms("capped", max_in_flight=1)))
    capped = flood(queue, "capped", 50, num_prompt_tokens=1)
    flood(queue, "free", 50)
    serve(queue, 1, frees=False)
    serve(queue, 20)
    queue.settle(capped[0], is_in_flight=False)
    queue.set_tenants(SetTenants(policy(), epoch=1))
    assert queue.virtual_service("capped") == queue.virtual_service("free") == 200


def test_a_cap_lowered_below_what_runs_drains() -> None:
    queue = WaitingQueue()
    running = flood(queue, "a", 4)
    serve(queue, 3, frees=False)
    queue.set_tenants(SetTenants(policy(TenantTerms("a", max_in_flight=2)), epoch=1))
    waits = []
    for request in running[:2]:
        waits.append(queue.first(lambda _: True) is None)
        queue.settle(request, is_in_flight=False)
    assert waits == [True, True] and first(queue) is running[3]


def test_a_preempted_request_frees_its_tenants_place_and_comes_back_first() -> None:
    queue = WaitingQueue(policy(TenantTerms("a", max_in_flight=1)))
    requests = flood(queue, "a", 2)
    serve(queue, 1, frees=False)
    queue.add(requests[0])
    assert first(queue) is requests[0]


def test_a_preempted_request_is_not_billed_again() -> None:
    queue = WaitingQueue()
    (request,) = flood(queue, "a", 1)
    serve(queue, 1, frees=False)
    queue.add(request)
    serve(queue, 1, frees=False)
    assert queue.virtual_service("a") == 10


@pytest.mark.parametrize(("bills_cached", "price"), [(False, 6), (True, 10)])
def test_tokens_of_a_prefix_hit_are_billed_only_by_order(bills_cached: bool, price: float) -> None:
    queue = WaitingQueue(policy(bills_cached_tokens=bills_cached))
    (request,) = flood(queue, "a", 1)
    request.num_computed_tokens = 4
    queue.admit(request)
    assert queue.virtual_service("a") == price
    queue.settle(request, is_in_flight=False)
    assert queue.virtual_service("a") == price - 6


@pytest.mark.parametrize(("is_in_flight", "price"), [(False, 3), (True, 10)])
def test_what_was_paid_and_never_computed_is_paid_back_unless_a_step_is_at_it(is_in_flight: bool, price: float) -> None:
    queue = WaitingQueue()
    (request,) = flood(queue, "a", 1)
    queue.admit(request)
    request.note_computed(3)
    queue.settle(request, is_in_flight=is_in_flight)
    assert queue.virtual_service("a") == price


def test_a_refund_is_of_the_weight_that_was_paid_at() -> None:
    queue = WaitingQueue(policy(TenantTerms("a", weight=2)))
    (request,) = flood(queue, "a", 1)
    queue.admit(request)
    queue.set_tenants(SetTenants(policy(TenantTerms("a", weight=5)), epoch=1))
    queue.settle(request, is_in_flight=False)
    assert queue.virtual_service("a") == 0


def test_what_was_computed_stays_paid_at_the_tenants_weight_and_price() -> None:
    queue = WaitingQueue(policy(TenantTerms("a", weight=2), input_price=3))
    (request,) = flood(queue, "a", 1)
    queue.admit(request)
    paid = queue.virtual_service("a")
    request.note_computed(4)
    queue.settle(request, is_in_flight=False)
    assert (paid, queue.virtual_service("a")) == (10 * 3 / 2, 4 * 3 / 2)


@pytest.mark.parametrize(("num_offline_tokens", "next_one"), [(1, "o1"), (3, "i1")])
def test_what_was_computed_stays_paid_by_its_class_too(num_offline_tokens: int, next_one: str) -> None:
    """7.5 for five tokens of one class, 3 each for tokens of the other."""
    queue = WaitingQueue(policy(interactive_share=2, offline_share=1, input_price=3))
    half_done = make("i0")
    fill(queue, half_done, make("i1"))
    fill(queue, *(make(name, 0.0, num_offline_tokens, request_class=RequestClass.OFFLINE) for name in ("o0", "o1")))
    queue.admit(half_done)
    half_done.note_computed(5)
    queue.settle(half_done, is_in_flight=False)
    serve(queue, 1)
    assert first(queue).request_id == next_one


def test_an_unknown_tenant_has_had_nothing() -> None:
    assert WaitingQueue().virtual_service("nobody") == 0


def test_offline_work_has_its_share_beside_interactive_work_of_its_tenant() -> None:
    queue = WaitingQueue()
    fill(queue, *(make(f"o{n}", float(n), request_class=RequestClass.OFFLINE) for n in range(100)))
    fill(queue, *(make(f"i{n}", float(n)) for n in range(100)))
    classes = []
    for _ in range(100):
        classes.append(first(queue).submit.request_class)
        serve(queue, 1)
    assert classes.count(RequestClass.OFFLINE) == 10


def test_offline_work_has_everything_while_there_is_no_other() -> None:
    queue = WaitingQueue()
    flood(queue, "", 5, request_class=RequestClass.OFFLINE)
    assert len(serve(queue, 5)) == 5


def test_a_class_that_comes_back_has_no_credit_for_its_absence() -> None:
    queue = WaitingQueue(policy(interactive_share=1, offline_share=1))
    fill(queue, make("o0", request_class=RequestClass.OFFLINE), *(make(f"i{n:02}") for n in range(40)))
    serve(queue, 22)
    fill(queue, *(make(f"o{n}", request_class=RequestClass.OFFLINE) for n in range(1, 9)))
    assert sum(name.startswith("o") for name in serve_names(queue, 8)) == 4


def test_new_class_shares_hold_from_the_next_turn_on() -> None:
    queue = WaitingQueue()
    fill(queue, make("o0", request_class=RequestClass.OFFLINE), make("o1", request_class=RequestClass.OFFLINE))
    fill(queue, *(make(f"i{n}") for n in range(4)))
    queue.set_tenants(SetTenants(policy(interactive_share=2, offline_share=1), epoch=1))
    names = serve_names(queue, 6)
    assert sorted(names[:3]) == ["i0", "i1", "o0"] and sorted(names[3:]) == ["i2", "i3", "o1"]


def order_of(*requests: Request) -> list[str]:
    queue = WaitingQueue()
    fill(queue, *requests)
    return serve_names(queue, len(requests))


def test_the_earliest_deadline_is_first_inside_a_class() -> None:
    late, soon = make("late", 0.0, deadline_s=9.0), make("soon", 1.0, deadline_s=5.0)
    assert order_of(make("none", 0.0), late, soon) == ["soon", "late", "none"]


def test_of_equal_deadlines_the_earlier_arrival_is_first() -> None:
    assert order_of(make("a", 2.0, deadline_s=9.0), make("b", 1.0, deadline_s=9.0)) == ["b", "a"]


def test_those_of_one_moment_keep_their_order_when_one_comes_back() -> None:
    queue, requests = WaitingQueue(), [make(name) for name in "abc"]
    fill(queue, *requests)
    queue.admit(requests[0])
    queue.add(requests[0])
    assert serve_names(queue, 3) == ["a", "b", "c"]


def test_a_deadline_far_away_lets_those_without_one_pass() -> None:
    assert order_of(make("far", 0.0, deadline_s=SLACK_S + 2), make("none", 1.0)) == ["none", "far"]


def test_priority_counts_before_the_deadline_of_another() -> None:
    assert order_of(make("soon", 0.0, deadline_s=1.0), make("urgent", 2.0, priority=-1)) == ["urgent", "soon"]


def test_who_waited_longer_than_the_ageing_goes_before_the_next_priority() -> None:
    old, fresh = make("old", 0.0, priority=1), make("fresh", AGEING_S + 1, priority=0)
    assert order_of(fresh, old) == ["old", "fresh"]
    assert order_of(make("fresh", AGEING_S - 1, priority=0), old) == ["fresh", "old"]


def test_the_lowest_priority_there_is_waits_no_longer_than_the_greatest_head_start() -> None:
    lowest = make("lowest", 0.0, priority=2**31 - 1)
    highest = make("highest", 2 * MAX_HEAD_START_S + 1, priority=-(2**31))
    assert order_of(highest, lowest) == ["lowest", "highest"]


def test_of_two_priorities_beyond_the_greatest_head_start_the_higher_is_first() -> None:
    assert order_of(make("a", priority=20_000), make("b", priority=10_000)) == ["b", "a"]


def test_the_overdue_are_those_that_never_ran() -> None:
    queue = WaitingQueue()
    ran, waited, fresh = make("ran", 0.0), make("waited", 1.0), make("fresh", 5.0)
    ran.first_scheduled_s = 0.5
    fill(queue, fresh, waited, ran)
    assert queue.overdue(5.0) == [waited]


def test_a_search_asks_so_many_of_a_class_and_goes_on_with_the_next_tenant() -> None:
    queue, asked = WaitingQueue(), []
    flood(queue, "hog", 2 * LOOK_AHEAD)
    flood(queue, "small", 1)
    found = queue.first(lambda request: asked.append(request) or request.submit.tenant == "small")
    assert found is not None and found.request_id == "small0" and len(asked) == LOOK_AHEAD + 1


def test_a_search_ends_however_many_tenants_have_nothing_that_may_come_in() -> None:
    queue, asked = WaitingQueue(), []
    for name in "abcde":
        flood(queue, name, LOOK_AHEAD)
    assert queue.first(lambda request: bool(asked.append(request))) is None and len(asked) == MAX_ASKED
