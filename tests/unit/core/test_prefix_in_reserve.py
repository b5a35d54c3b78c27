"""Text that a prefill in progress computes, and short prompts that come in before it: nobody computes it twice."""

from typing import Any

import pytest

from guidevane_runtime.core.explain import explain
from guidevane_runtime.core.messages import Hold

LIMITS = {"max_num_batched_tokens": 4096, "prefill_token_budget": 4096, "prefill_chunk_size": 2048}


def big_rig(make_rig: Any, **fields: Any) -> Any:
    return make_rig(num_blocks=4000, block_size=16, kv_cache_utilization_limit_percent=100, **(LIMITS | fields))


def test_siblings_wait_for_the_rest_of_their_prompt_though_it_is_short(make_rig) -> None:
    """n = 8: after the first chunk what is left would fit the reserve, and the step computes it already."""
    rig = big_rig(make_rig)
    siblings = [f"a{number}" for number in range(8)]
    for name in siblings:
        rig.submit(name, 4000)
    assert rig.step() == {"a0": 2048}
    assert rig.step() == {"a0": 1952}
    assert rig.step() == {"a0": 1} | dict.fromkeys(siblings[1:], 16)
    # Of the 250 blocks of the prompt all but the last one, which is never part of a hit, are held once.
    assert rig.pool.num_used == 249 + 8 + 1
    rig.run_to_end()
    assert len({rig.tokens(name) for name in siblings}) == 1


def test_a_short_prompt_of_other_text_still_passes(make_rig) -> None:
    rig = big_rig(make_rig, max_num_batched_tokens=2048)
    rig.submit("a0", 4000)
    rig.step()
    rig.submit("a1", 4000)
    rig.submit("b", 200)
    assert rig.step() == {"b": 200, "a0": 1848}


def test_it_does_not_wait_for_a_prefill_that_short_prompts_may_leave_nothing(make_rig) -> None:
    """Of two in progress only the first is sure to get on: who waited for the other might wait for long."""
    rig = big_rig(make_rig, max_num_batched_tokens=600, prefill_chunk_size=300)
    rig.submit("long", 3000)
    rig.submit("a0", 500)
    assert rig.step() == {"long": 300, "a0": 300}
    rig.submit("a1", 500)
    assert rig.step() == {"a1": 212, "long": 300, "a0": 88}


@pytest.mark.parametrize("name", ["a1", "a2"])
def test_explain_names_the_text_in_flight(make_rig, name: str) -> None:
    rig = big_rig(make_rig)
    for number in range(3):
        rig.submit(f"a{number}", 4000)
    rig.step()
    (told,) = explain(rig.scheduler, [name], rig.now_s)
    assert told.hold is Hold.PREFIX_IN_FLIGHT
