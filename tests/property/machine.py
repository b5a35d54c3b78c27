"""How far the state machines go, and how many steps they took.

The seed is that of pytest's --hypothesis-seed; how to replay a failure is in docs/testing.md.
"""

import os
from collections import Counter

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant

MIN_STEPS = 20_000
SIZES = {"SchedulerMachine": (500, 40), "EngineMachine": (100, 30), "DoorMachine": (150, 30)}
"""Examples of each machine, and steps of an example."""

num_steps: Counter[str] = Counter()
"""What was done in this run, by machine."""


class Machine(RuleBasedStateMachine):
    """Counts its steps."""

    @invariant()
    def a_step_is_over(self) -> None:
        num_steps[type(self).__name__] += 1


def size_of(machine: type[Machine]) -> settings:
    """As many examples as the table says, or as HYPOTHESIS_EXAMPLES."""
    examples, steps = SIZES[machine.__name__]
    return settings(
        max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", examples)),
        stateful_step_count=steps,
    )
