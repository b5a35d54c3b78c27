from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import SamplingParams, Submit
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.tenants import RequestClass
from guidevane_runtime.core.waiting import WaitingQueue


def make_request(name: str, arrival_s: float, priority: int = 0) -> Request:
    submit = Submit(name, (1, 2), SamplingParams(max_tokens=1, seed=0), arrival_s, priority)
    return Request(submit, max_num_tokens=3, blocks=BlockPool(1, 4).table())


def drain(queue: WaitingQueue) -> list[str]:
    order = []
    while request := queue.first(lambda _: True):
        queue.remove(request)
        order.append(request.request_id)
    return order


def test_lower_priority_numbers_come_first_then_the_earlier_arrival() -> None:
    queue = WaitingQueue()
    for name, arrival_s, priority in [("late", 2.0, 0), ("urgent", 3.0, -1), ("early", 1.0, 0), ("idle", 0.0, 5)]:
        queue.add(make_request(name, arrival_s, priority))
    assert drain(queue) == ["urgent", "early", "late", "idle"]


def test_a_request_that_comes_back_has_its_old_place() -> None:
    """C10: a preempted request does not queue up again."""
    queue, requests = WaitingQueue(), [make_request(name, float(place)) for place, name in enumerate("abc")]
    for request in requests:
        queue.add(request)
    queue.remove(requests[0])
    queue.add(requests[0])
    assert drain(queue) == ["a", "b", "c"]


def test_the_queue_counts_only_the_living() -> None:
    """A18, A21: a gone client is no queue depth."""
    queue = WaitingQueue()
    requests = [make_request(str(number), 1.0) for number in range(50)]
    for request in requests:
        queue.add(request)
    for request in requests[::2]:
        queue.remove(request)
    assert (len(queue), queue.num_tokens) == (25, 50)


def test_the_oldest_is_found_whatever_its_priority() -> None:
    queue = WaitingQueue()
    assert queue.oldest_wait_s(RequestClass.INTERACTIVE, 5.0) == 0.0
    queue.add(make_request("urgent", 5.0, -1))
    queue.add(make_request("old", 2.0, 3))
    assert queue.oldest_wait_s(RequestClass.INTERACTIVE, 5.0) == 3.0


def test_the_first_that_is_eligible_may_stand_behind_others() -> None:
    queue = WaitingQueue()
    for place, name in enumerate("abc"):
        queue.add(make_request(name, float(place)))
    found = queue.first(lambda request: request.request_id != "a")
    assert found is not None and found.request_id == "b"
    assert queue.first(lambda _: False) is None
