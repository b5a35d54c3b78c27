import pytest

from guidevane_bench.door_cost import DoorRig, Sizes, rows
from guidevane_runtime.core.door import Refused


def test_the_benchmark_prints_a_row_for_each_measurement() -> None:
    """What it measures is a figure, not a test; that it still runs is."""
    sizes = Sizes(num_waiting=(0, 3), num_tenants=(1, 2), num_admitted=100, num_rounds=1)
    found = [line.split(" | ")[:2] for line in rows(sizes)]
    assert found[2:] == [["| 1", "0"], ["| 1", "3"], ["| 2", "0"], ["| 2", "3"]]


def test_what_it_serves_comes_in_and_ends() -> None:
    rig = DoorRig(num_tenants=2, num_waiting=3)
    rig.serve(10, deadline_s=1e9)
    assert rig.gate.num_live == 3


def test_what_it_refuses_is_refused() -> None:
    rig = DoorRig(num_tenants=1, num_waiting=3)
    rig.refuse(10)
    assert rig.gate.num_live == 3
    with pytest.raises(Refused):
        rig.admit(1)
