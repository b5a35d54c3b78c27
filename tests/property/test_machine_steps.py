from tests.property.machine import MIN_STEPS, SIZES


def test_the_state_machines_take_enough_steps_together() -> None:
    assert sum(examples * steps for examples, steps in SIZES.values()) >= MIN_STEPS
