import pytest

from guidevane_bench.errors import SpecError
from guidevane_bench.simulator.faults import FaultKind, draw_faults, parse_fault_counts

COUNTS = {FaultKind.POD_DEATH: 3, FaultKind.SLOW_POD: 2, FaultKind.METRICS_GAP: 2}


def test_same_seed_draws_the_same_faults_and_another_draws_others() -> None:
    assert draw_faults(COUNTS, 10, 600, 1) == draw_faults(COUNTS, 10, 600, 1) != draw_faults(COUNTS, 10, 600, 2)


def test_faults_lie_in_the_run_in_order_of_time() -> None:
    faults = draw_faults(COUNTS, 10, 600, 0)
    assert len(faults) == 7
    assert list(faults) == sorted(faults, key=lambda fault: fault.at_s)
    assert all(0 <= fault.at_s <= 600 and 0 <= fault.pod < 10 for fault in faults)


def test_more_faults_of_one_kind_do_not_move_those_of_another() -> None:
    few, many = (draw_faults({**COUNTS, FaultKind.SLOW_POD: count}, 10, 600, 0) for count in (2, 9))
    deaths = [fault for fault in few if fault.kind is FaultKind.POD_DEATH]
    assert deaths == [fault for fault in many if fault.kind is FaultKind.POD_DEATH]


def test_counts_are_read() -> None:
    assert parse_fault_counts("pod_death=2,metrics_gap=1") == {FaultKind.POD_DEATH: 2, FaultKind.METRICS_GAP: 1}


@pytest.mark.parametrize("text", ["fire=1", "pod_death", "pod_death=-1", "slow_pod=x"])
def test_fault_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=text.partition("=")[0]):
        parse_fault_counts(text)
