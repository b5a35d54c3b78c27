"""Files of cost models. The model itself is the scheduler's own, which learns it while it runs."""

import json
from dataclasses import asdict, fields
from math import inf
from pathlib import Path

from guidevane_bench.errors import InputError, sentence_of
from guidevane_runtime.core.plan import StepLoad, load_of
from guidevane_runtime.core.step_time import CostModel

__all__ = ["COEFFICIENTS", "CostModel", "StepLoad", "costs_to_bytes", "load_of", "read_costs"]


COEFFICIENTS = tuple(field.name for field in fields(CostModel))


def costs_to_bytes(costs: CostModel, **about: object) -> bytes:
    """The file: coefficients in seconds, and where they come from."""
    return (json.dumps({"coefficients_s": asdict(costs), **about}, indent=1) + "\n").encode()


def read_costs(path: Path) -> CostModel:
    """A file of `guidevane-bench fit`, or one written by hand with the same coefficients."""
    try:
        given = dict(json.loads(path.read_text(encoding="utf-8"))["coefficients_s"])
        unknown = sorted(set(given) - set(COEFFICIENTS))
        costs = CostModel(**{name: float(value) for name, value in given.items() if name not in unknown})
    except OSError as error:
        raise InputError(f"cost model {path} can't be read: {error.strerror}; make one with fit") from error
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{path} is no cost model: {sentence_of(error)}; it is JSON with coefficients_s, make one with fit"
        ) from error
    if unknown or not all(0 <= value < inf for value in asdict(costs).values()) or not costs.step_s:
        raise InputError(
            f"cost model {path} has {given}; coefficients are {', '.join(COEFFICIENTS)}, none below 0, step_s above it"
        )
    return costs
