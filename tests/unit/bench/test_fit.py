import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from guidevane_bench.errors import BenchError, FitError, InputError
from guidevane_bench.fit import MeasuredStep, fit_costs, read_steps, steps_to_bytes
from guidevane_bench.simulator.costs import CostModel, StepLoad, costs_to_bytes, read_costs

TRUE = CostModel(step_s=0.012, prefill_token_s=2e-4, decode_s=8e-4, kv_token_s=3e-7, prefill_pair_s=2e-8)


def loads(count: int, rng: random.Random) -> list[StepLoad]:
    found = []
    for _ in range(count):
        prefill, decodes = rng.choice([0, 0, 64, 300, 512]), rng.randrange(1, 16)
        context = rng.randrange(100, 2000)
        found.append(StepLoad(prefill, decodes, decodes * context + prefill, prefill * context))
    return found


def steps_of(costs: CostModel, count: int = 300, noise: float = 0.0) -> list[MeasuredStep]:
    rng = random.Random(5)
    return [MeasuredStep(load, costs.seconds(load) * rng.uniform(1 - noise, 1 + noise)) for load in loads(count, rng)]


def test_exact_steps_give_back_their_coefficients() -> None:
    fit = fit_costs(steps_of(TRUE))
    assert asdict(fit.costs) == pytest.approx(asdict(TRUE), rel=1e-6)
    assert fit.p95_error_percent < 1e-6


def test_noisy_steps_give_back_their_coefficients_nearly() -> None:
    fit = fit_costs(steps_of(TRUE, 3000, noise=0.1))
    assert fit.costs.step_s == pytest.approx(TRUE.step_s, rel=0.05)
    assert fit.costs.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.05)
    assert fit.costs.decode_s == pytest.approx(TRUE.decode_s, rel=0.1)
    assert abs(fit.total_error_percent) < 2


def test_interrupted_steps_do_not_count() -> None:
    steps = steps_of(TRUE, noise=0.02)
    steps[::25] = [MeasuredStep(step.load, step.step_s * 20) for step in steps[::25]]
    fit = fit_costs(steps)
    assert fit.num_outliers == 12
    assert fit.costs.decode_s == pytest.approx(TRUE.decode_s, rel=0.1)


@pytest.mark.parametrize("unused", ["prefill_token_s", "decode_s", "kv_token_s", "prefill_pair_s"])
def test_what_costs_nothing_gets_no_negative_coefficient(unused: str) -> None:
    costs = CostModel(**{**asdict(TRUE), unused: 0.0})
    fit = fit_costs(steps_of(costs, 500, noise=0.05))
    assert min(asdict(fit.costs).values()) >= 0
    assert abs(fit.total_error_percent) < 2


def test_steps_without_prefill_leave_its_cost_at_zero() -> None:
    decodes = [
        MeasuredStep(load, TRUE.seconds(load)) for load in loads(200, random.Random(1)) if not load.num_prefill_tokens
    ]
    assert fit_costs(decodes).costs.prefill_token_s == 0


def test_steps_that_are_all_alike_still_give_their_time() -> None:
    step = MeasuredStep(StepLoad(0, 4, 400, 0), 0.02)
    assert fit_costs([step] * 50).costs.seconds(step.load) == pytest.approx(0.02)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(FitError, match="19 steps"):
        fit_costs(steps_of(TRUE, 19))


def test_steps_survive_their_file(tmp_path: Path) -> None:
    steps = [MeasuredStep(StepLoad(1, 2, 3, 4), 0.5)]
    (tmp_path / "steps.jsonl").write_bytes(steps_to_bytes(steps))
    assert read_steps(tmp_path / "steps.jsonl") == steps


def test_cost_model_survives_its_file(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_bytes(costs_to_bytes(TRUE, about="a test"))
    assert read_costs(tmp_path / "costs.json") == TRUE


@pytest.mark.parametrize("name", ["costs_demo_cpu.json", "costs_8b_roofline.json"])
def test_shipped_cost_model_is_one_and_says_where_it_is_from(data: Path, name: str) -> None:
    assert read_costs(data / name).seconds(StepLoad(0, 1, 100, 0)) > 0
    assert json.loads((data / name).read_text())["about"]


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"coefficients_s": {"step_s": 0}}',
        '{"coefficients_s": {"step_s": 1, "decode_s": -1}}',
        '{"coefficients_s": {"step_s": 1, "decode": 1}}',
        '{"coefficients_s": {"step_s": "slow"}}',
    ],
)
def test_cost_model_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"costs\.json"):
        read_costs(path)


@pytest.mark.parametrize("read", [read_costs, read_steps])
def test_missing_file_is_named(read: object) -> None:
    assert callable(read)
    with pytest.raises(BenchError, match="gone"):
        read(Path("gone"))
