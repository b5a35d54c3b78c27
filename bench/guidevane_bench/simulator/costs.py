"""Files of cost models. The model itself is the scheduler's own, which learns it while it runs."""

import json
from dataclasses import asdict, fields
from pathlib import Path

from guidevane_bench.errors import InputError
from guidevane_runtime.core.plan import StepLoad, load_of
from guidevane_runtime.core.step_time import CostModel

__all__ = ["COEFFICIENTS", "CostModel", "StepLoad", "load_of", "read_costs", "write_costs"]


COEFFICIENTS = tuple(field.name for field in fields(CostModel))


def write_costs(path: Path, costs: CostModel, **about: object) -> None:
    """Coefficients in seconds, and where they come from."""
    path.write_text(json.dumps({"coefficients_s": asdict(costs), **about}, indent=1) + "\n", encoding="utf-8")


def read_costs(path: Path) -> CostModel:
    """A file of `guidevane-bench fit`, or one written by hand with the same coefficients."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))["coefficients_s"]
        unknown = sorted(set(given) - set(COEFFICIENTS))
        costs = CostModel(**{name: float(value) for name, value in given.items() if name not in unknown})
    except OSError as error:
        raise InputError(f"cost model {path} can't be read: {error.strerror}; make one with fit") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} is no cost model: {error}; it is JSON with coefficients_s, make one with fit"
        ) from error
    if unknown or min(asdict(costs).values()) < 0 or costs.step_s <= 0:
        raise InputError(
            f"cost model {path} has {given}; coefficients are {', '.join(COEFFICIENTS)}, none below 0, step_s above it"
        )
    return costs
