"""The report on a small trace: two tenants ask for too much, three for little."""

from pathlib import Path

import pytest

from guidevane_bench.fairness_report import read, replay
from guidevane_runtime.core.messages import Submit


@pytest.fixture
def trace(tmp_path: Path) -> list[Submit]:
    lines = ["arrival_s,prompt_tokens,output_tokens,tenant"]
    for number in range(120):
        tenant = "hog" if number % 2 else "busy"
        lines.append(f"{number / 100},200,300,{tenant}")
    lines += [f"{2 + number},20,10,small{number}" for number in range(3)]
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    return read(str(tmp_path / "trace.csv"))


def test_everybody_is_served_the_same_in_the_end_and_the_small_wait_less(trace: list[Submit]) -> None:
    fair, fcfs = replay(trace, is_fair=True), replay(trace, is_fair=False)
    assert fair.served == fcfs.served
    assert fair.served["hog"] == 60 * (200 + 2 * 300) and fair.served["small0"] == 20 + 2 * 10
    for number in range(3):
        assert fair.waits_s[f"small{number}"] < fcfs.waits_s[f"small{number}"] / 2


def test_each_figure_is_there_for_both(trace: list[Submit]) -> None:
    fair = replay(trace, is_fair=True).rows()
    assert len(fair) == 6 and all(value >= 0 for value in fair.values())
    assert 0 < fair["widest service gap of two backlogged tenants"] <= fair["its VTC bound"]
    assert 0 < fair["Jain index of backlogged tenants, mean of windows"] <= 1
