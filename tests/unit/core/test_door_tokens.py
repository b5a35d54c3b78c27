"""The ladder in virtual time: what a prompt may be, queued tokens, and the guard's long prompts."""

import pytest

from guidevane_runtime.core.door import Capacity, Rejection, Reported
from guidevane_runtime.core.tenants import TenantTerms
from tests.unit.core.door_house import HERE, A, B, House, refusal

# -------------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "reason"),
    [
        (90, 10, None),
        (99, None, None),
        (90, 11, Rejection.CONTEXT_LENGTH),
        (100, None, Rejection.CONTEXT_LENGTH),
        (50, 50, None),
        (10, 51, Rejection.VALIDATION),
    ],
)
def test_a_request_must_fit_the_context(num_prompt: int, max_tokens: int | None, reason: Rejection | None) -> None:
    house = House(max_model_len=100, max_prompt_tokens=100, max_output_tokens=50)

    def check() -> None:
        house.gate.check_prompt(num_prompt, max_tokens)

    if reason is None:
        check()
    else:
        assert refusal(check).reason is reason


@pytest.mark.parametrize(("max_tokens", "asked", "together"), [(20, 20, 110), (None, 1, 91)])
def test_what_does_not_fit_the_context_is_told_with_the_sum(max_tokens: int | None, asked: int, together: int) -> None:
    house = House(max_model_len=90)
    assert str(refusal(lambda: house.gate.check_prompt(90, max_tokens))) == (
        f"the prompt has 90 tokens and asks for {asked} more, {together} together, "
        "above the context length 90; shorten the prompt or lower max_tokens"
    )


def test_a_prompt_at_its_own_limit_comes_in_and_one_above_is_told_what_to_do() -> None:
    house = House(max_prompt_tokens=40)
    house.gate.check_prompt(40, 1)
    found = str(refusal(lambda: house.gate.check_prompt(41, 1)))
    assert found == "the prompt has 41 tokens, limits.maxPromptTokens is 40; shorten the prompt"


def test_a_request_that_asks_for_too_much_output_takes_no_place() -> None:
    house = House(max_output_tokens=50)
    assert refusal(lambda: house.gate.admit(HERE, 10, 51)).reason is Rejection.VALIDATION
    assert house.gate.num_live == 0


def test_of_those_inside_only_the_ones_that_do_not_run_wait() -> None:
    house = House(max_num_seqs=2, max_queued_requests=3)
    house.enter(count=5)
    house.gate.observe(Reported(num_running=2, num_waiting=3))
    assert str(refusal(house.enter)).startswith("3 requests wait, this asks for 1 more")


def test_a_lease_for_each_prompt_is_charged_or_none() -> None:
    house = House()
    with pytest.raises(ValueError, match="zip"):
        house.gate.charge(house.enter(count=2), (1, 2, 3))


def test_the_client_reads_its_own_name_of_max_tokens() -> None:
    house = House(max_output_tokens=50)
    found = refusal(lambda: house.gate.check_prompt(10, 51, "max_completion_tokens"))
    assert found.param == "max_completion_tokens"
    assert str(found) == "max_completion_tokens is 51, limits.maxOutputTokens is 50; lower max_completion_tokens"


def test_a_text_that_no_tokenising_makes_short_enough_is_too_long() -> None:
    house = House(max_prompt_tokens=50)
    house.gate.check_text(50 * 8, 8)
    found = refusal(lambda: house.gate.check_text(51 * 8, 8))
    assert found.reason is Rejection.CONTEXT_LENGTH
    assert "408 characters, which are 51 tokens or more, limits.maxPromptTokens is 50" in str(found)


def test_a_prompt_above_its_own_limit_is_too_long() -> None:
    found = refusal(lambda: House(max_prompt_tokens=50).gate.check_prompt(51, 1))
    assert (found.reason, found.wait_s) == (Rejection.CONTEXT_LENGTH, None)
    assert "51 tokens, limits.maxPromptTokens is 50" in str(found)


def test_a_prompt_that_the_cache_cannot_hold_never_fits_and_is_not_to_come_back() -> None:
    house = House()
    house.gate.engine_ready(Capacity(num_blocks=4, block_size=16), load_s=0.0)
    house.gate.check_prompt(63, 1)
    found = refusal(lambda: house.gate.check_prompt(64, 1))
    assert (found.reason, found.wait_s) == (Rejection.NEVER_FITS, None)
    assert "64 tokens" in str(found)


def test_queued_tokens_are_those_without_a_first_token() -> None:
    house = House(max_queued_tokens=100)
    first = house.wait(90)
    found = refusal(lambda: house.wait(20))
    assert found.reason is Rejection.QUEUED_TOKENS
    assert str(found) == "90 prompt tokens wait, this adds 20, limits.maxQueuedTokens is 100"
    first.start()
    house.wait(20)
    assert house.gate.num_queued_tokens == 20


def test_a_prompt_above_the_cap_comes_in_when_nothing_waits() -> None:
    assert House(max_queued_tokens=100).wait(500).held.num_queued_tokens == 500


def test_a_refusal_for_its_tokens_takes_no_place() -> None:
    house = House(max_queued_tokens=100)
    house.wait(90)
    refusal(lambda: house.wait(20))
    assert (house.gate.num_live, house.gate.num_queued_tokens) == (1, 90)


def test_queued_tokens_of_a_tenant_have_a_cap_and_a_reason_of_their_own() -> None:
    house = House(TenantTerms("a", max_queued_tokens=100))
    house.wait(90, A)
    found = refusal(lambda: house.wait(20, A))
    assert found.reason is Rejection.TENANT_TOKENS
    assert "tenant 'a' would have 110 prompt tokens waiting, its maxQueuedTokens is 100" in str(found)
    house.wait(20, B)


def test_a_hog_leaves_the_last_tenth_of_the_tokens_to_tenants_below_their_share() -> None:
    house = House(TenantTerms("a"), TenantTerms("b"), max_queued_tokens=1000)
    house.wait(500, A)
    house.wait(400, A)
    assert refusal(lambda: house.wait(1, A)).reason is Rejection.QUEUED_TOKENS
    house.wait(100, B)
    assert refusal(lambda: house.wait(1, B)).reason is Rejection.QUEUED_TOKENS


def test_a_tenant_alone_may_be_above_its_cap_of_tokens() -> None:
    assert House(TenantTerms("a", max_queued_tokens=100)).wait(500, A).held.num_queued_tokens == 500


@pytest.mark.parametrize(("wanted", "expected"), [(None, 50), (16, 16), (70, 50)])
def test_the_default_of_max_tokens_is_clipped(wanted: int | None, expected: int) -> None:
    gate = House(max_model_len=100, max_output_tokens=50).gate
    assert gate.default_max_tokens(10, wanted) == expected
    assert gate.default_max_tokens(95, wanted) == 5


# ----------------------------------------------------------------------------------------------------------- the guard


@pytest.fixture
def guarded() -> House:
    """Long prompts are refused for 30 s, and one request is inside."""
    house = House(long_context_threshold_tokens=100)
    house.enter()
    house.gate.long_context_pause_s = 30.0
    return house


def test_long_prompts_are_refused_while_the_guard_says_so(guarded: House) -> None:
    found = refusal(lambda: guarded.gate.charge(guarded.enter(count=2), [5, 101]))
    assert (found.reason, found.wait_s) == (Rejection.LONG_CONTEXT, 30.0)
    assert "the prompt has 101 tokens" in str(found)


def test_short_prompts_come_in_while_long_ones_are_refused(guarded: House) -> None:
    assert guarded.wait(100).held.num_queued_tokens == 100


def test_long_prompts_come_in_when_the_guard_is_calm(guarded: House) -> None:
    guarded.gate.long_context_pause_s = None
    assert guarded.wait(5000).held.num_queued_tokens == 5000


def test_a_long_prompt_that_is_alone_is_never_locked_out() -> None:
    house = House(long_context_threshold_tokens=100)
    house.gate.long_context_pause_s = 30.0
    house.gate.charge(house.enter(count=2), [5000, 5000])
    assert house.gate.num_queued_tokens == 10_000
