"""What time or a compile has ended, and what a compile has brought in, is seen by explain() before the step sees it."""

from typing import Any

import pytest

from guidevane_runtime.core.explain import explain
from guidevane_runtime.core.messages import Explanation, FinishReason, Hold, SamplingParams, SetTenants, Submit
from guidevane_runtime.core.tenants import TenantPolicy, TenantTerms
from tests.unit.core.fake_grammar import FakeGrammar


def submit(rig: Any, name: str, *, deadline_s: float | None = None, num_prompt_tokens: int = 4) -> None:
    params = SamplingParams(max_tokens=8, seed=0)
    rig.scheduler.submit(Submit(name, (ord(name),) * num_prompt_tokens, params, rig.now_s, deadline_s=deadline_s))


def told(rig: Any) -> dict[str, Explanation]:
    return {one.request_id: one for one in explain(rig.scheduler, ["a", "b", "c"], rig.now_s)}


def test_a_running_request_past_its_deadline_is_no_part_of_the_next_step(make_rig) -> None:
    rig = make_rig()
    submit(rig, "a", deadline_s=1.0)
    rig.step()
    rig.now_s = 1.0
    assert told(rig) == {}
    assert rig.step() == {} and rig.ends("a") == [FinishReason.TIMEOUT]


def test_the_slot_of_one_past_its_deadline_is_free_already(make_rig) -> None:
    rig = make_rig(max_num_seqs=1)
    submit(rig, "a", deadline_s=1.0)
    rig.step()
    submit(rig, "b")
    assert told(rig)["b"].hold is Hold.MAX_NUM_SEQS
    rig.now_s = 1.0
    assert told(rig)["b"].hold is Hold.NOTHING
    assert "b" in rig.step()


def test_the_blocks_of_one_past_its_deadline_are_free_already(make_rig) -> None:
    rig = make_rig(num_blocks=10, kv_cache_utilization_limit_percent=50)
    submit(rig, "a", deadline_s=1.0, num_prompt_tokens=16)
    rig.step()
    submit(rig, "b", num_prompt_tokens=16)
    assert told(rig)["b"].hold is Hold.KV_LIMIT
    rig.now_s = 1.0
    assert told(rig)["b"].hold is Hold.NOTHING
    assert "b" in rig.step()


def test_the_cap_of_a_tenant_does_not_count_one_past_its_deadline(make_rig) -> None:
    rig = make_rig()
    rig.scheduler.set_tenants(SetTenants(TenantPolicy((TenantTerms("", max_in_flight=1),)), epoch=1))
    submit(rig, "a", deadline_s=1.0)
    rig.step()
    submit(rig, "b")
    assert told(rig)["b"].hold is Hold.TENANT_CAP
    rig.now_s = 1.0
    assert told(rig)["b"].hold is Hold.NOTHING


@pytest.mark.parametrize("deadline_s", [None, 1.5])
def test_who_has_waited_too_long_is_not_at_the_head_of_the_line(make_rig, deadline_s: float | None) -> None:
    """b can't come in beside a and holds back c, until its own time is over."""
    rig = make_rig(num_blocks=20, kv_cache_utilization_limit_percent=50, waiting_timeout_milliseconds=1500)
    submit(rig, "a", num_prompt_tokens=12)
    rig.step()
    submit(rig, "b", num_prompt_tokens=24, deadline_s=deadline_s)
    rig.now_s = 1.0
    submit(rig, "c", num_prompt_tokens=2, deadline_s=99.0)
    assert told(rig)["c"].held_at == "b"
    rig.now_s = 1.6
    after = told(rig)
    assert set(after) == {"a", "c"} and (after["c"].hold, after["c"].position) == (Hold.NOTHING, 1)
    assert "c" in rig.step() and rig.ends("b") == [FinishReason.TIMEOUT]


def test_one_whose_grammar_is_ready_has_its_place_already(make_rig) -> None:
    rig = make_rig()
    grammar = FakeGrammar()
    rig.submit("a", grammar=grammar)
    assert told(rig)["a"].hold is Hold.GRAMMAR
    grammar.is_ready = True
    assert told(rig)["a"].hold is Hold.NOTHING
    assert "a" in rig.step()


def test_one_whose_grammar_will_never_be_ready_has_ended_already(make_rig) -> None:
    rig = make_rig()
    grammar = FakeGrammar()
    rig.submit("a", grammar=grammar)
    grammar.error = "the schema took more than 10 s to compile; make it smaller"
    assert told(rig) == {}
    rig.listen()
    assert rig.end_output("a").error == grammar.error


def test_asking_during_a_step_leaves_it_the_blocks_that_it_reads(make_rig) -> None:
    rig = make_rig()
    submit(rig, "a", deadline_s=1.0)
    rig.step()
    batch = rig.plan()
    rig.now_s = 1.0
    assert told(rig) == {}
    assert all(rig.pool.num_refs(block_id) for seq in batch.seqs for block_id in seq.block_ids)
    rig.finish(batch)
    assert rig.pool.num_used == 0 and rig.ends("a") == [FinishReason.TIMEOUT]
