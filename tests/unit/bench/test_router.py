import random

import pytest

from guidevane_bench.simulator.router import LeastLoadedRouter


def test_first_choice_is_the_lowest_number() -> None:
    assert LeastLoadedRouter(3).choose() == 0


def test_least_loaded_pod_is_chosen_and_the_lowest_number_among_equals() -> None:
    router = LeastLoadedRouter(3)
    chosen = []
    for _ in range(5):
        pod = router.choose()
        assert pod is not None
        router.sent(pod)
        chosen.append(pod)
    assert chosen == [0, 1, 2, 0, 1]


def test_pod_that_is_out_gets_nothing_until_it_is_back_and_empty() -> None:
    router = LeastLoadedRouter(2)
    router.sent(1)
    router.take_out(0)
    assert router.choose() == 1
    router.bring_in(0)
    assert router.choose() == 0


def test_what_ends_on_a_pod_that_is_gone_changes_nothing() -> None:
    router = LeastLoadedRouter(1)
    router.sent(0)
    router.take_out(0)
    router.ended(0)
    router.bring_in(0)
    assert router.load(0) == 0


def test_without_a_pod_there_is_no_choice() -> None:
    router = LeastLoadedRouter(1)
    router.take_out(0)
    assert router.choose() is None


@pytest.mark.parametrize("seed", range(5))
def test_choice_is_the_minimum_after_any_history(seed: int) -> None:
    rng = random.Random(seed)
    router, loads = LeastLoadedRouter(20), dict.fromkeys(range(20), 0)
    for _ in range(2000):
        pod, action = rng.randrange(20), rng.random()
        if action < 0.02 and pod in loads:
            del loads[pod]
            router.take_out(pod)
        elif action < 0.1 and pod not in loads:
            loads[pod] = 0
            router.bring_in(pod)
        elif action < 0.55 and loads.get(pod):
            loads[pod] -= 1
            router.ended(pod)
        elif pod in loads:
            loads[pod] += 1
            router.sent(pod)
        least = min(((load, pod) for pod, load in loads.items()), default=(0, None))
        assert router.choose() == least[1]
