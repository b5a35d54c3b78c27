"""Age in the waiting room, at a cost that does not depend on how many wait."""

from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.messages import SamplingParams, Submit
from guidevane_runtime.core.request import Request
from guidevane_runtime.core.waiting import LOOK_AHEAD, WaitingQueue


def queue_of(arrivals_s: list[float]) -> tuple[WaitingQueue, list[Request]]:
    queue, pool, params = WaitingQueue(), BlockPool(1, 4), SamplingParams(max_tokens=1, seed=0)
    requests = [
        Request(Submit(str(i), (1, 2), params, arrival_s), max_num_tokens=3, blocks=pool.table())
        for i, arrival_s in enumerate(arrivals_s)
    ]
    for request in requests:
        queue.add(request)
    return queue, requests


def test_those_that_came_before_a_time_are_found_oldest_first() -> None:
    queue, _ = queue_of([3.0, 1.0, 2.0, 5.0])
    assert [request.request_id for request in queue.before(3.0)] == ["1", "2"]


def test_the_oldest_is_the_oldest_of_those_that_are_left() -> None:
    queue, requests = queue_of([3.0, 1.0, 2.0])
    seen = [queue.oldest_arrival_s()]
    for number in (1, 2, 0):
        queue.remove(requests[number])
        seen.append(queue.oldest_arrival_s())
    assert seen == [1.0, 2.0, 3.0, None]


def test_a_search_ends_where_the_look_ahead_does() -> None:
    queue, requests = queue_of([float(i) for i in range(LOOK_AHEAD + 5)])
    asked: list[Request] = []
    assert queue.first(lambda request: bool(asked.append(request))) is None
    assert asked == requests[:LOOK_AHEAD]
