"""The line against a sorted list: the same order after any adds and discards."""

import hypothesis.strategies as st
from hypothesis import given

from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.line import Line
from guidevane_runtime.core.messages import SamplingParams, Submit
from guidevane_runtime.core.request import Request

POOL = BlockPool(1, 1)


def make(number: int, arrival_s: float) -> Request:
    submit = Submit(str(number), (1,), SamplingParams(max_tokens=1, seed=0), arrival_s)
    return Request(submit, max_num_tokens=2, blocks=POOL.table())


def key(request: Request) -> tuple[float, str]:
    return request.submit.arrival_s, request.request_id


@given(
    arrivals=st.lists(st.integers(0, 9), min_size=1, max_size=200),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 199)), max_size=300),
)
def test_a_line_has_the_order_of_a_sorted_list(arrivals: list[int], moves: list[tuple[bool, int]]) -> None:
    requests = [make(number, float(arrival_s)) for number, arrival_s in enumerate(arrivals)]
    line, model = Line(key), dict.fromkeys(requests)
    for request in requests:
        line.add(request)
    for is_add, number in moves:
        request = requests[number % len(requests)]
        if is_add and request not in model:
            line.add(request)
            model[request] = None
        elif not is_add:
            line.discard(request)
            model.pop(request, None)
        assert line.first is min(model, key=key, default=None)
    assert list(line) == sorted(model, key=key) and len(line) == len(model)


@given(num_requests=st.integers(1, 500))
def test_the_dead_are_never_more_than_the_living_and_a_few(num_requests: int) -> None:
    line = Line(key)
    for number in range(num_requests):
        request = make(number, -float(number))
        line.add(request)
        if number % 10:
            line.discard(request)
    assert len(line._heap) <= max(64, 2 * len(line)) + 1


def test_a_walk_does_not_pass_those_that_left_from_the_front() -> None:
    line, requests = Line(key), [make(number, float(number)) for number in range(1000)]
    for request in requests:
        line.add(request)
    for request in requests[:400]:
        line.discard(request)
    assert next(iter(line)) is requests[400] and len(line._heap) == 600
