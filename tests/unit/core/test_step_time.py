"""The online model of step times: what it learns, what it drops, and how it finds its way back."""

import random
from collections.abc import Callable, Iterator

import pytest

from guidevane_runtime.core.plan import StepLoad
from guidevane_runtime.core.step_time import CostModel, OutlierGate, StepTimeModel

CPU = CostModel(0.016, 7e-4, 1e-3, 8e-6, 4e-7)
GPU = CostModel(0.0065, 4e-5, 2e-5, 3.9e-8)
DECODES = StepLoad(0, 8, 2400, 0)
MIXED = StepLoad(256, 8, 2400 + 512, 256 * 512)
Spoil = Callable[[float], float]


def loads(seed: int, num_steps: int) -> Iterator[StepLoad]:
    """Streams that come and go, and every third step a chunk of a prompt."""
    rng = random.Random(seed)
    for _ in range(num_steps):
        decodes, chunk = rng.randint(1, 30), rng.choice([0, 0, 64, 200, 512])
        context = decodes * rng.randint(50, 800)
        start = rng.choice([0, 512, 2000]) if chunk else 0
        yield StepLoad(chunk, decodes, context + (start + chunk if chunk else 0), chunk * (start + chunk))


def teach(model: StepTimeModel, costs: CostModel, num_steps: int = 300, spoil: Spoil = float, seed: int = 0) -> None:
    """spoil: what is measured where a step really takes so long."""
    for load in loads(seed, num_steps):
        model.learn(load, spoil(costs.seconds(load)))


def taught(costs: CostModel, num_steps: int = 300, spoil: Spoil = float) -> StepTimeModel:
    model = StepTimeModel()
    teach(model, costs, num_steps, spoil)
    return model


def predicted(model: StepTimeModel, load: StepLoad) -> float:
    assert model.costs is not None
    return model.costs.seconds(load)


@pytest.mark.parametrize("costs", [CPU, GPU])
def test_exact_steps_are_predicted_exactly(costs) -> None:
    model = taught(costs, 1000)
    for load in (DECODES, MIXED, StepLoad(512, 1, 2900, 512 * 2560)):
        assert predicted(model, load) == pytest.approx(costs.seconds(load), rel=0.01)


@pytest.mark.parametrize("costs", [CPU, GPU])
def test_noise_of_ten_percent_is_averaged_out(costs) -> None:
    rng = random.Random(1)
    model = taught(costs, 1000, lambda took_s: took_s * rng.gauss(1.0, 0.1))
    for load in (DECODES, MIXED):
        assert predicted(model, load) == pytest.approx(costs.seconds(load), rel=0.05)


def test_nothing_is_predicted_before_enough_steps() -> None:
    model = StepTimeModel()
    for load in [DECODES, MIXED] * (StepTimeModel.MIN_STEPS // 2):
        assert model.costs is None
        model.learn(load, CPU.seconds(load))
    assert model.costs is not None


def test_nothing_is_predicted_while_prefill_was_hardly_seen() -> None:
    model = StepTimeModel()
    for load in [DECODES] * 500 + [MIXED] * (StepTimeModel.MIN_PREFILL_STEPS - 1):
        model.learn(load, CPU.seconds(load))
    assert model.costs is None
    model.learn(MIXED, CPU.seconds(MIXED))
    assert model.costs is not None


def test_steps_that_no_clock_measured_teach_nothing() -> None:
    model = StepTimeModel()
    for load in loads(0, 500):
        model.learn(load, 0.0)
    assert model.costs is None


def test_no_coefficient_is_below_zero() -> None:
    """A machine on which prefill seems to make a step shorter."""
    model = StepTimeModel()
    for load in loads(0, 500):
        model.learn(load, 0.1 - 1e-4 * load.num_prefill_tokens + 1e-4 * load.num_decodes)
        costs = model.costs
        if costs:
            assert min(costs.step_s, costs.prefill_token_s, costs.decode_s, costs.kv_token_s, costs.prefill_pair_s) >= 0


def test_a_step_that_something_held_up_changes_no_prediction() -> None:
    model = taught(CPU)
    before = model.costs
    model.learn(DECODES, 20 * CPU.seconds(DECODES))
    assert model.costs == before


def test_one_step_in_ten_held_up_changes_predictions_little() -> None:
    rng = random.Random(2)
    model = taught(CPU, 1000, lambda took_s: took_s + (0.5 if rng.random() < 0.1 else 0.0))
    assert predicted(model, MIXED) == pytest.approx(CPU.seconds(MIXED), rel=0.02)


@pytest.mark.parametrize("factor", [3.0, 0.4])
def test_a_machine_that_is_another_one_from_now_on_is_believed_after_a_row_of_steps(factor) -> None:
    model = taught(CPU)
    teach(model, CPU, OutlierGate.NUM_IN_A_ROW * 4, lambda took_s: took_s * factor, seed=1)
    for load in (DECODES, MIXED):
        assert predicted(model, load) == pytest.approx(factor * CPU.seconds(load), rel=0.05)


def test_prefill_alone_can_get_dearer() -> None:
    """Steps with prefill are judged apart: they never come in a row when most steps have none."""
    model, dearer = taught(CPU), CostModel(0.016, 21e-4, 1e-3, 8e-6, 4e-7)
    for _ in range(40):
        for load in (DECODES, DECODES, MIXED):
            model.learn(load, dearer.seconds(load))
    assert predicted(model, MIXED) == pytest.approx(dearer.seconds(MIXED), rel=0.05)
    assert predicted(model, DECODES) == pytest.approx(dearer.seconds(DECODES), rel=0.05)


def test_first_steps_that_compiled_kernels_are_overcome() -> None:
    model = StepTimeModel()
    for number, load in enumerate(loads(3, 150)):
        model.learn(load, CPU.seconds(load) * (50 if number < 20 else 1))
    assert predicted(model, MIXED) == pytest.approx(CPU.seconds(MIXED), rel=0.1)


def test_costs_of_prefill_survive_a_day_without_any() -> None:
    """Weights of old steps fade to nothing beside the new ones, and are scaled down on the way."""
    model = taught(CPU)
    for _ in range(120_000):
        model.learn(DECODES, CPU.seconds(DECODES))
    assert predicted(model, MIXED) == pytest.approx(CPU.seconds(MIXED), rel=0.05)


def test_it_follows_what_changes_slowly() -> None:
    """Within 10 % all the time: no step is an outlier, and old ones are forgotten."""
    model = taught(CPU)
    factor = 1.0
    for load in loads(5, 4000):
        factor += 0.0005
        model.learn(load, factor * CPU.seconds(load))
    assert predicted(model, MIXED) == pytest.approx(factor * CPU.seconds(MIXED), rel=0.12)
