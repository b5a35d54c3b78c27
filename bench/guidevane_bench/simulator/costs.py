"""How long a step takes: linear in what it computes and reads.

Prefill and decode are apart because a decode reads all the weights for one token; context is apart because attention
reads it whatever the token; pairs are apart because attention of a prefill grows with the product of chunk and context.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from guidevane_bench.errors import InputError
from guidevane_runtime.core.plan import ScheduledBatch


class StepLoad(NamedTuple):
    """What one step computes."""

    num_prefill_tokens: int
    num_decodes: int
    num_kv_tokens: int
    """Tokens of context, summed over the sequences of the step, its own tokens included."""
    num_prefill_pairs: int
    """Query tokens times context, summed over prefills."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds: fixed per step, and per unit of a StepLoad."""

    step_s: float
    prefill_token_s: float = 0.0
    decode_s: float = 0.0
    kv_token_s: float = 0.0
    prefill_pair_s: float = 0.0

    def seconds(self, load: StepLoad) -> float:
        return (
            self.step_s
            + self.prefill_token_s * load.num_prefill_tokens
            + self.decode_s * load.num_decodes
            + self.kv_token_s * load.num_kv_tokens
            + self.prefill_pair_s * load.num_prefill_pairs
        )


COEFFICIENTS = tuple(field.name for field in fields(CostModel))


def load_of(batch: ScheduledBatch) -> StepLoad:
    """Measure a plan. One pass: the simulator spends its time here and in the scheduler."""
    prefill = decodes = kv = pairs = 0
    for seq in batch.seqs:
        length = len(seq.token_ids)
        context = seq.start + length
        kv += context
        if length == 1 and seq.samples:
            decodes += 1
        else:
            prefill += length
            pairs += length * context
    return StepLoad(prefill, decodes, kv, pairs)


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
