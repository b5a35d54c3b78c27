"""A cost model from measured steps: least squares of relative errors, no coefficient below 0, without outliers.

Relative, as a decode of 20 ms matters as much as a prefill of 2 s; and relative to what the model says, not to what was
measured: noise only ever makes a step longer, and the second would favour the lucky ones. Five unknowns at most, so the
constraint is met by trying every subset of them: the best fit whose coefficients are all positive is the answer (Lawson
& Hanson 1974, chapter 23, which gets there with fewer tries).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import fsum, inf
from pathlib import Path
from statistics import median
from typing import Any

from guidevane_bench.errors import FitError, InputError, sentence_of
from guidevane_bench.simulator.costs import COEFFICIENTS, CostModel, StepLoad

MIN_STEPS = 20
OUTLIER_MADS = 6.0
"""A step whose relative error is so many median deviations off was interrupted by something else."""
NUM_ROUNDS = 3
"""Of fitting and leaving out: the set is stable after two on measured steps."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One line of the recorder's file."""

    load: StepLoad
    step_s: float

    def to_json(self) -> dict[str, float]:
        return {**self.load._asdict(), "step_s": round(self.step_s, 9)}


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost model, and how well it says what was measured."""

    costs: CostModel
    num_steps: int
    num_outliers: int
    median_error_percent: float
    """Half of the steps are nearer than this."""
    p95_error_percent: float
    total_error_percent: float
    """Of the time of all steps together: above 0 when the model is too slow."""

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["costs"]
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}


def read_steps(path: Path) -> list[MeasuredStep]:
    """JSON lines with the fields of StepLoad and step_s."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [_measured(record) for record in records]
    except OSError as error:
        raise InputError(f"steps {path} can't be read: {error.strerror}; make them with record") from error
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        fields = ", ".join((*StepLoad._fields, "step_s"))
        raise InputError(f"steps {path}: {sentence_of(error)}; a line is JSON with {fields}") from error


def _measured(record: Mapping[str, Any]) -> MeasuredStep:
    step = MeasuredStep(StepLoad(*(int(record[name]) for name in StepLoad._fields)), float(record["step_s"]))
    if min(step.load) < 0 or not 0 <= step.step_s < inf:
        raise ValueError(f"a step has {dict(record)}, which no step can")
    return step


def steps_to_bytes(steps: Iterable[MeasuredStep]) -> bytes:
    """What read_steps reads."""
    return "".join(json.dumps(step.to_json()) + "\n" for step in steps).encode()


def fit_costs(steps: Sequence[MeasuredStep]) -> Fit:
    """Raises FitError when there are too few steps, or none of them took time."""
    measured = [step for step in steps if step.step_s > 0]
    if len(measured) < MIN_STEPS:
        raise FitError(f"there are {len(measured)} steps that took time, {MIN_STEPS} are needed; record a longer load")
    kept = measured
    costs = _least_squares(kept, [step.step_s for step in kept])
    for _ in range(NUM_ROUNDS):
        kept = _without_outliers(costs, measured)
        costs = _least_squares(kept, [costs.seconds(step.load) for step in kept])
    errors = sorted(abs(_error(costs, step)) for step in kept)
    measured_s = sum(step.step_s for step in kept)
    return Fit(
        costs,
        num_steps=len(kept),
        num_outliers=len(measured) - len(kept),
        median_error_percent=100 * median(errors),
        p95_error_percent=100 * errors[int(0.95 * (len(errors) - 1))],
        total_error_percent=100 * (sum(costs.seconds(step.load) for step in kept) / measured_s - 1),
    )


def _error(costs: CostModel, step: MeasuredStep) -> float:
    return costs.seconds(step.load) / step.step_s - 1


def _without_outliers(costs: CostModel, steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    errors = [_error(costs, step) for step in steps]
    middle = median(errors)
    spread = median(abs(error - middle) for error in errors)
    # Nothing is an outlier of an exact fit but for rounding.
    most = max(OUTLIER_MADS * spread, 1e-6)
    return [step for step, error in zip(steps, errors, strict=True) if abs(error - middle) <= most]


def _least_squares(steps: Sequence[MeasuredStep], expected_s: Sequence[float]) -> CostModel:
    """Errors are relative to expected_s.

    The fixed cost is always among the unknowns: without one, an empty step would be free.
    """
    weights = [1 / seconds for seconds in expected_s]
    rows = [[value * weight for value in (1, *step.load)] for step, weight in zip(steps, weights, strict=True)]
    targets = [step.step_s * weight for step, weight in zip(steps, weights, strict=True)]
    square = _sumprod(targets, targets)
    # A column that is zero throughout says nothing; scaling the others keeps the equations well conditioned.
    scales = [max(row[i] for row in rows) for i in range(len(COEFFICIENTS))]
    usable = [i for i, scale in enumerate(scales) if scale > 0]
    products = _normal_equations(rows, targets, scales, usable)
    best_error, best = float("inf"), CostModel(0.0)
    for size in range(len(usable)):
        for others in combinations(usable[1:], size):
            chosen = (usable[0], *others)
            solved = _solve([[products[i, j] for j in chosen] + [products[i, -1]] for i in chosen])
            if solved is None or min(solved) < 0 or solved[0] <= 0:
                continue
            # Sum of squares of what is left.
            error = square - sum(x * products[i, -1] for i, x in zip(chosen, solved, strict=True))
            # Fewer coefficients win when more do not fit better.
            if error < best_error - 1e-9 * square:
                named = {COEFFICIENTS[i]: x / scales[i] for i, x in zip(chosen, solved, strict=True)}
                best_error, best = error, CostModel(**named)
    assert best.step_s > 0, "the fixed cost alone always fits with a positive value"
    return best


def _normal_equations(
    rows: Sequence[Sequence[float]], targets: Sequence[float], scales: Sequence[float], usable: Sequence[int]
) -> dict[tuple[int, int], float]:
    """Products of scaled columns; (i, -1) is column i times the targets."""
    columns = {i: [row[i] / scales[i] for row in rows] for i in usable}
    products = {(i, j): _sumprod(columns[i], columns[j]) for i in usable for j in usable}
    return {**products, **{(i, -1): _sumprod(columns[i], targets) for i in usable}}


def _sumprod(left: Iterable[float], right: Iterable[float]) -> float:
    return fsum(a * b for a, b in zip(left, right, strict=True))


def _solve(equations: Sequence[Sequence[float]]) -> list[float] | None:
    """Gauss-Jordan with pivots; None when the equations do not determine every unknown."""
    matrix = [list(equation) for equation in equations]
    size = len(matrix)
    smallest = 1e-12 * max(matrix[i][i] for i in range(size))
    for i in range(size):
        pivot = max(range(i, size), key=[abs(row[i]) for row in matrix].__getitem__)
        if abs(matrix[pivot][i]) < smallest:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        matrix[i] = [value / matrix[i][i] for value in matrix[i]]
        for k in range(size):
            if k != i:
                matrix[k] = [a - matrix[k][i] * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return [row[-1] for row in matrix]
