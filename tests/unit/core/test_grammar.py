"""Requests whose output follows a grammar: they wait for it outside the line, and it follows accepted tokens only."""

from typing import Any

import pytest

from guidevane_api.admin import ShrinkMode
from guidevane_runtime.core.explain import explain
from guidevane_runtime.core.messages import AbortCause, FinishReason, Hold
from guidevane_runtime.core.plan import SampledToken, StepOutput
from tests.unit.core.fake_grammar import FakeGrammar


def told(rig: Any, name: str) -> Hold:
    (explanation,) = explain(rig.scheduler, [name], rig.now_s)
    return explanation.hold


def test_a_request_without_its_grammar_holds_nothing_and_others_pass(make_rig) -> None:
    rig = make_rig(max_num_seqs=2)
    rig.submit("a", grammar=FakeGrammar())
    rig.submit("b")
    assert rig.step() == {"b": 4}
    assert rig.pool.num_used == 1 and told(rig, "a") is Hold.GRAMMAR
    assert [request.request_id for request in rig.scheduler.waiting] == ["a"]
    assert rig.scheduler.stats(rig.now_s).num_waiting == 1


def test_any_number_that_never_compile_take_no_slot_from_anybody(make_rig) -> None:
    """C2: more than one search looks at, and more than there are slots."""
    rig = make_rig(max_num_seqs=2, max_queued_requests=1000)
    for number in range(300):
        rig.submit(f"a{number}", grammar=FakeGrammar())
    for name in "xyz":
        rig.submit(name)
    rig.step()
    assert rig.running() == {"x", "y"}
    for _ in range(100):
        rig.step()
    assert all(rig.ends(name) == [FinishReason.LENGTH] for name in "xyz")


def test_it_takes_its_own_place_when_the_grammar_is_ready(make_rig) -> None:
    rig = make_rig(max_num_seqs=1)
    grammar = FakeGrammar()
    rig.submit("a", grammar=grammar)
    for name in "bc":
        rig.submit(name, max_tokens=2)
    rig.step()
    grammar.is_ready = True
    rig.step(2)
    assert rig.running() == {"a"}


def test_one_that_is_ready_when_it_comes_lines_up_at_once(make_rig) -> None:
    rig = make_rig()
    rig.submit("a", grammar=FakeGrammar(is_ready=True))
    assert rig.step() == {"a": 4}


def test_a_compile_that_failed_ends_the_request_with_what_was_wrong(make_rig) -> None:
    """I3: a compile that takes too long fails like any other, and stops nobody."""
    rig = make_rig()
    grammar = FakeGrammar()
    rig.submit("a", grammar=grammar)
    rig.submit("b")
    rig.step()
    grammar.error = "the schema took more than 10 s to compile; make it smaller"
    rig.step()
    assert rig.ends("a") == [FinishReason.ERROR] and rig.end_output("a").error == grammar.error
    rig.run_to_end()
    assert rig.ends("b") == [FinishReason.LENGTH]
    assert rig.scheduler.stats(rig.now_s).num_waiting == 0


def test_it_can_time_out_and_be_aborted_like_all_who_wait(make_rig) -> None:
    rig = make_rig(waiting_timeout_milliseconds=1000)
    rig.submit("a", grammar=FakeGrammar())
    rig.submit("b", grammar=FakeGrammar())
    rig.scheduler.abort("b", AbortCause.CLIENT_GONE)
    rig.now_s += 2.0
    rig.plan()
    assert (rig.ends("a"), rig.ends("b")) == ([FinishReason.TIMEOUT], [FinishReason.ABORT])
    assert len(rig.scheduler.waiting) == 0


def test_an_engine_with_nothing_but_compiles_has_no_work_until_one_is_ready(make_rig) -> None:
    rig = make_rig()
    grammar = FakeGrammar()
    rig.submit("a", grammar=grammar)
    assert not rig.scheduler.has_work and not rig.plan().seqs
    grammar.is_ready = True
    assert rig.plan().seqs and rig.scheduler.has_work


def test_tenants_gather_no_credit_while_they_compile(make_rig) -> None:
    rig = make_rig(max_num_seqs=1)
    grammar = FakeGrammar()
    rig.submit("a", tenant="slow", grammar=grammar)
    for number in range(10):
        rig.submit(f"b{number}", tenant="busy", max_tokens=2)
    rig.step(10)
    grammar.is_ready = True
    rig.step(4)
    service = [rig.scheduler._waiting.virtual_service(tenant) for tenant in ("slow", "busy")]
    assert service[0] >= service[1] - 2 * (4 + 2 * 2)


@pytest.mark.parametrize("num_steps", range(1, 9))
@pytest.mark.parametrize("in_flight", [False, True])
def test_it_follows_the_output_token_by_token_across_a_preemption(make_rig, num_steps: int, in_flight: bool) -> None:
    """I2: nothing to roll back, nothing told twice."""
    rig = make_rig(max_num_seqs=2)
    grammar = FakeGrammar(is_ready=True)
    rig.submit("x", max_tokens=30)
    rig.submit("a", grammar=grammar, max_tokens=8, priority=1)
    rig.step(num_steps)
    batch = rig.plan() if in_flight else None
    rig.set_limits(ShrinkMode.PREEMPT, max_num_seqs=1)
    if batch:
        rig.finish(batch)
    rig.step(2)
    rig.set_limits(max_num_seqs=2)
    rig.run_to_end()
    assert tuple(grammar.accepted) == rig.tokens("a") and len(grammar.accepted) == 8


def test_a_row_that_fails_moves_it_no_further(make_rig) -> None:
    rig = make_rig()
    grammar = FakeGrammar(is_ready=True)
    rig.submit("a", grammar=grammar)
    rig.step(2)
    batch = rig.plan()
    rig.scheduler.apply(batch, StepOutput((SampledToken(7, error="logits are not finite"),)))
    rig.listen()
    assert tuple(grammar.accepted) == rig.tokens("a") and len(grammar.accepted) == 2
