"""The guard in virtual time: a step of load up and down, lines one by one, floors, lock-out, dry run."""

import itertools
import re
from collections.abc import Mapping

import pytest

from guidevane_api.limits import Envelope, SchedulerLimits, limit_violations
from guidevane_runtime.core.guard import Guard, GuardConfig, GuardDecision, Sample
from guidevane_runtime.core.guard_steps import CUTS, LADDERS, Line, Step

LINES = {Line.TTFT: 1500.0, Line.ITL: 120.0, Line.QUEUE_WAIT: 500.0, Line.KV_USE: 88.0, Line.REJECTS: 1.0}
TARGET = SchedulerLimits()
OVER = {line: bound * 2 for line, bound in LINES.items()}
CALM = {line: bound * 0.5 for line, bound in LINES.items()}
BETWEEN = {line: bound * 0.95 for line, bound in LINES.items()}
"""Under the line, not well under."""


class Drive:
    """A guard under constant values, second by second, with every decision kept."""

    def __init__(
        self, lines: Mapping[Line, float] = LINES, *, target: SchedulerLimits = TARGET, **config: float
    ) -> None:
        self.guard = Guard(GuardConfig(lines, **config))  # type: ignore[arg-type]
        self.target = target
        self.now_s = 1000.0
        self.decisions: list[GuardDecision] = []

    def run(
        self, seconds: int, *values: Mapping[Line, float], per_s: int = 20, waiting_s: float = 0.0
    ) -> GuardDecision:
        for _ in range(seconds):
            for line, value in {k: v for some in values for k, v in some.items()}.items():
                for i in range(per_s):
                    self.guard.observe(Sample(line, self.now_s + i / per_s, value))
            self.now_s += 1.0
            self.decisions.append(self.guard.tick(self.now_s, self.target, waiting_s))
        return self.decisions[-1]

    def run_to_level(self, level: int, *values: Mapping[Line, float]) -> GuardDecision:
        for _ in range(2000):
            if self.run(1, *values).level == level:
                return self.decisions[-1]
        raise AssertionError(f"level {level} was never reached; it is {self.guard.level}")


def only(line: Line, values: Mapping[Line, float]) -> dict[Line, float]:
    return {line: values[line]}


def cut_fields(decision: GuardDecision, target: SchedulerLimits = TARGET) -> set[str]:
    before, after = target.model_dump(), decision.effect.limits.model_dump()
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize("line", [Line.TTFT, Line.ITL, Line.QUEUE_WAIT, Line.KV_USE])
def test_a_step_of_load_is_answered_in_the_lines_order_and_taken_back_in_reverse(line: Line) -> None:
    drive = Drive()
    assert drive.run(60, CALM).level == 0
    seen: list[tuple[Step, ...]] = []
    for _ in range(120):
        drive.run(1, CALM, only(line, OVER))
        seen += [drive.guard.steps] if drive.guard.steps not in seen else []
    ladder = LADDERS[line]
    assert seen == [ladder[:count] for count in range(len(ladder) + 1)]
    back: list[tuple[Step, ...]] = []
    for _ in range(300):
        drive.run(1, CALM)
        back += [drive.guard.steps] if drive.guard.steps not in back else []
    assert back == [ladder[:count] for count in range(len(ladder), -1, -1)]
    assert drive.decisions[-1].effect.limits == TARGET


def test_the_first_step_comes_after_t_up_and_each_further_one_after_as_long_again() -> None:
    drive = Drive(t_up_s=12.0)
    drive.run(60, CALM)
    drive.run(70, CALM, only(Line.ITL, OVER))
    levels = [decision.level for decision in drive.decisions[60:]]
    rises = [i for i in range(1, len(levels)) if levels[i] > levels[i - 1]]
    assert rises == [12, 24, 36, 48, 60]


@pytest.mark.parametrize(("share", "is_breached"), [(0.98, False), (1.02, True)])
def test_a_line_is_breached_from_just_above_it(share: float, is_breached: bool) -> None:
    for line, bound in LINES.items():
        assert (line in Drive().run(10, {line: bound * share}).breached) == is_breached


def test_a_burst_shorter_than_t_up_changes_nothing() -> None:
    drive = Drive()
    drive.run(30, CALM)
    drive.run(1, CALM, only(Line.TTFT, OVER))
    drive.run(30, CALM)
    assert {decision.level for decision in drive.decisions} == {0}


def test_it_stays_while_a_line_is_under_but_not_well_under() -> None:
    drive = Drive()
    drive.run_to_level(1, CALM, only(Line.TTFT, OVER))
    assert drive.run(200, CALM, only(Line.TTFT, BETWEEN)).level == 1
    assert drive.run(45, CALM).level == 0


def test_each_step_back_comes_t_down_after_the_one_before() -> None:
    drive = Drive()
    drive.run_to_level(3, CALM, only(Line.TTFT, OVER))
    since = len(drive.decisions)
    drive.run(130, CALM)
    levels = [decision.level for decision in drive.decisions[since - 1 :]]
    falls = [i for i in range(1, len(levels)) if levels[i] < levels[i - 1]]
    assert [b - a for a, b in itertools.pairwise(falls)] == [30, 30] and falls[0] >= 30


def test_a_reject_rate_just_under_its_line_holds_nothing_up() -> None:
    drive = Drive()
    drive.run_to_level(1, CALM, only(Line.TTFT, OVER))
    assert drive.run(45, CALM, only(Line.REJECTS, BETWEEN)).level == 0


def test_between_the_two_it_tries_a_step_back_after_a_while() -> None:
    """L11: no reject line may have been given, and long prompts are refused all the time."""
    drive = Drive({Line.TTFT: 1500.0})
    drive.run_to_level(2, only(Line.TTFT, OVER))
    # The window holds what was over for 10 s more.
    assert drive.run(308, only(Line.TTFT, BETWEEN)).level == 2
    assert drive.run(4, only(Line.TTFT, BETWEEN)).level == 1
    assert drive.run(290, only(Line.TTFT, BETWEEN)).level == 1
    assert drive.run(15, only(Line.TTFT, BETWEEN)).level == 0


@pytest.mark.parametrize(
    ("line", "first"),
    [
        (Line.ITL, {"prefill_chunk_size"}),
        (Line.TTFT, set()),
        (Line.QUEUE_WAIT, set()),
        (Line.KV_USE, set()),
    ],
)
def test_each_line_has_a_first_step_of_its_own(line: Line, first: set[str]) -> None:
    """A smaller chunk would worsen TTFT; for memory and waiting, long prompts go first."""
    decision = Drive().run_to_level(1, CALM, only(line, OVER))
    assert cut_fields(decision) == first
    assert decision.effect.refuses_long_context == (not first)
    assert decision.line is line and decision.breached == {line}


def test_chunks_never_shrink_for_ttft_or_queue_wait() -> None:
    drive = Drive()
    drive.run(300, CALM, only(Line.TTFT, OVER), only(Line.QUEUE_WAIT, OVER))
    assert not {"prefill_chunk_size", "prefill_token_budget"} & cut_fields(drive.decisions[-1])


def test_another_line_adds_its_steps_and_takes_none_back() -> None:
    drive = Drive()
    drive.run_to_level(2, CALM, only(Line.ITL, OVER))
    decision = drive.run_to_level(3, CALM, only(Line.KV_USE, OVER))
    assert drive.guard.steps == (Step.CUT_CHUNKS, Step.REFUSE_LONG_CONTEXT, Step.CUT_KV_LIMIT)
    assert cut_fields(decision) == {"prefill_chunk_size", "kv_cache_utilization_limit_percent"}


def test_the_line_that_is_breached_most_leads() -> None:
    drive = Drive()
    decision = drive.run(5, CALM, {Line.TTFT: 1600.0, Line.ITL: 600.0})
    assert decision.line is Line.ITL and decision.breached == {Line.TTFT, Line.ITL}


def test_a_move_says_what_and_why() -> None:
    drive = Drive()
    decision = drive.run_to_level(1, CALM, only(Line.ITL, OVER))
    assert re.fullmatch(r"itl_p95_ms is 2[34]\d, line 120: smaller prefill chunks", decision.reason)
    assert drive.run_to_level(0, CALM).reason == "taken back: smaller prefill chunks"
    assert drive.run(1, CALM).reason == ""


@pytest.mark.parametrize("target", [TARGET, SchedulerLimits(**dict.fromkeys(SchedulerLimits.model_fields, 1))])
def test_floors_hold_however_long_everything_is_over(target: SchedulerLimits) -> None:
    drive = Drive(target=target)
    for line in (Line.KV_USE, Line.ITL, Line.TTFT):
        drive.run(80, CALM, only(line, OVER))
    drive.run(500, OVER, waiting_s=1000.0)
    assert set(drive.guard.steps) == set(Step)
    for decision in drive.decisions:
        limits = decision.effect.limits
        assert limits.max_num_seqs >= 1
        for name, cut in CUTS.items():
            assert min(cut.floor, getattr(target, name)) <= getattr(limits, name) <= getattr(target, name)
        assert not limit_violations(limits, Envelope())
    assert drive.decisions[-1].effect.limits.max_queued_requests == min(2, target.max_queued_requests)


def test_at_the_end_of_a_ladder_only_the_queue_gets_shorter() -> None:
    drive = Drive()
    drive.run_to_level(5, CALM, only(Line.KV_USE, OVER))
    before = drive.decisions[-1].effect.limits
    after = drive.run(10, CALM, only(Line.KV_USE, OVER)).effect.limits
    assert after.max_queued_requests == before.max_queued_requests // 2
    assert (after.max_num_seqs, after.prefill_token_budget) == (before.max_num_seqs, before.prefill_token_budget)


def test_what_was_cut_comes_back_bit_by_bit() -> None:
    """Halved at once, whole again by 5 % of what is left at a time."""
    drive = Drive()
    drive.run_to_level(4, CALM, only(Line.KV_USE, OVER))
    assert drive.decisions[-1].effect.limits.max_num_seqs == 16
    drive.run_to_level(3, CALM)
    values = [drive.run(1, CALM).effect.limits.max_num_seqs for _ in range(16)]
    assert values == sorted(values) and values[0] < 20 and values[-1] == 32
    assert max(b - a for a, b in itertools.pairwise(values)) <= 2


def test_a_little_that_is_left_grows_slowly() -> None:
    """It is near what the load allows, and the target is far above that."""
    drive = Drive({Line.QUEUE_WAIT: 500.0})
    drive.run(62, only(Line.QUEUE_WAIT, OVER))
    assert drive.decisions[-1].effect.limits.max_queued_requests == 16
    drive.run_to_level(2, CALM)
    assert drive.run(15, CALM).effect.limits.max_queued_requests in range(30, 36)
    assert drive.run(60, CALM).effect.limits.max_queued_requests == TARGET.max_queued_requests


def test_recovery_waits_while_a_line_is_over() -> None:
    drive = Drive()
    drive.run_to_level(4, CALM, only(Line.KV_USE, OVER))
    before = drive.run_to_level(3, CALM).effect.limits.max_num_seqs
    assert drive.run(5, CALM, only(Line.TTFT, OVER)).effect.limits.max_num_seqs == before


def test_without_samples_everything_decays_to_normal() -> None:
    """L11: whoever is locked out sends no samples."""
    drive = Drive()
    drive.run(300, OVER)
    assert drive.guard.level > 0
    decision = drive.run(600)
    assert (decision.level, decision.breached, decision.effect.limits) == (0, frozenset(), TARGET)


def test_a_reject_rate_over_its_line_loosens_when_resources_are_not_over() -> None:
    """L11: between the lines and well under them it would stay for ever; not while it refuses."""
    drive = Drive()
    drive.run_to_level(3, CALM, only(Line.TTFT, OVER))
    assert drive.run(200, BETWEEN).level == 3
    decision = drive.run_to_level(0, BETWEEN, only(Line.REJECTS, OVER))
    assert decision.line is None and decision.breached == {Line.REJECTS}
    assert decision.reason == "admission_reject_rate_max is 2, line 1: taken back: refusing long prompts"


def test_a_reject_rate_never_tightens() -> None:
    drive = Drive()
    drive.run(300, CALM, {Line.REJECTS: 100.0})
    assert {decision.level for decision in drive.decisions} == {0}
    assert drive.decisions[-1].breached == {Line.REJECTS}


def test_one_refusal_alone_is_no_reject_rate() -> None:
    drive = Drive()
    drive.guard.observe(Sample(Line.REJECTS, drive.now_s, 100.0))
    assert drive.run(1).breached == frozenset()


def test_a_reject_rate_does_not_loosen_while_a_resource_is_over() -> None:
    drive = Drive()
    drive.run(300, CALM, only(Line.TTFT, OVER), only(Line.REJECTS, OVER))
    assert drive.guard.level == 3


def test_a_standstill_is_no_calm() -> None:
    """Nothing starts, so nothing is sampled; the oldest that waits tells."""
    drive = Drive({Line.QUEUE_WAIT: 500.0})
    assert drive.run(11, waiting_s=0.4).level == 0
    assert drive.run(11, waiting_s=30.0).level == 1


def test_too_few_samples_say_nothing() -> None:
    drive = Drive({Line.TTFT: 100.0}, min_samples=20)
    for _ in range(60):
        drive.guard.observe(Sample(Line.TTFT, drive.now_s, 9000.0))
        drive.run(1)
    assert drive.guard.level == 0


def test_a_line_that_was_not_given_protects_nothing() -> None:
    drive = Drive({Line.TTFT: 1500.0})
    assert drive.run(100, {Line.ITL: 9999.0, Line.TTFT: 10.0}).breached == frozenset()


def test_dry_run_reports_and_changes_nothing() -> None:
    drive = Drive(dry_run=True)
    drive.run(300, OVER)
    assert drive.decisions[-1].level > 0 and drive.decisions[-1].breached
    for decision in drive.decisions:
        assert decision.effect.limits is TARGET
        assert not decision.effect.refuses_long_context and not decision.effect.pauses_offline


def test_a_new_target_is_cut_as_the_old_one_was() -> None:
    drive = Drive()
    drive.run_to_level(4, CALM, only(Line.KV_USE, OVER))
    assert drive.guard.effect(SchedulerLimits(max_num_seqs=10)).limits.max_num_seqs == 5


@pytest.mark.parametrize("lines", [{**LINES, Line.ITL: 1000.0}, {Line.TTFT: 1500.0}], ids=["raised", "removed"])
def test_steps_for_a_line_that_is_raised_or_removed_are_taken_back_one_by_one(lines: Mapping[Line, float]) -> None:
    drive = Drive()
    drive.run_to_level(2, CALM, only(Line.ITL, OVER))
    drive.guard.protect(lines)
    assert drive.run(25, CALM, only(Line.ITL, OVER)).level == 2, "no calm of 30 s yet"
    assert drive.run(10, CALM, only(Line.ITL, OVER)).level == 1
    assert drive.run(30, CALM, only(Line.ITL, OVER)).level == 0


def test_a_line_that_is_lowered_judges_the_samples_that_are_there() -> None:
    drive = Drive()
    drive.run(60, CALM)
    drive.guard.protect({**LINES, Line.TTFT: 100.0})
    assert drive.run(1).line is Line.TTFT
    assert drive.run(10, CALM).level == 1


def test_a_line_that_is_new_has_a_window_of_its_own() -> None:
    drive = Drive({Line.TTFT: 1500.0})
    drive.run(60, OVER)
    drive.guard.protect({Line.TTFT: 1500.0, Line.ITL: 120.0})
    assert drive.run(1).breached == {Line.TTFT}, "what was dropped before is not heard of now"
    assert drive.run(2, OVER).breached == {Line.TTFT, Line.ITL}


def test_a_guard_that_stands_down_leaves_the_limits_whole_at_once() -> None:
    drive = Drive()
    drive.run_to_level(4, CALM, only(Line.KV_USE, OVER))
    drive.guard.stand_down()
    decision = drive.run(60, OVER)
    assert (decision.level, decision.breached, decision.effect.limits) == (0, frozenset(), TARGET)
    drive.guard.protect(LINES)
    assert drive.run(10, OVER).level == 0, "a line has to be over for 10 s again"
    assert drive.run(2, OVER).level == 1


@pytest.mark.parametrize("was_dry", [True, False])
def test_between_a_dry_run_and_earnest_the_guard_starts_from_normal(was_dry: bool) -> None:
    drive = Drive(dry_run=was_dry)
    drive.run_to_level(3, CALM, only(Line.ITL, OVER))
    drive.guard.protect(LINES, dry_run=not was_dry)
    assert (drive.guard.level, drive.guard.effect(TARGET).limits) == (0, TARGET)
    drive.run_to_level(1, CALM, only(Line.ITL, OVER))
    assert bool(cut_fields(drive.decisions[-1])) is was_dry


@pytest.mark.parametrize("config", [{"t_up_s": 5.0}, {"lines": {Line.ITL: 0.0}}])
def test_a_config_that_cannot_work_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"raise t_up_s|leave out"):
        GuardConfig(**{"lines": LINES, **config})  # type: ignore[arg-type]
