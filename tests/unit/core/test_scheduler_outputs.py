"""What a client is told of each token, and of the end."""

from guidevane_runtime.core.messages import FinishReason, TokenLogprobs
from guidevane_runtime.core.plan import SampledToken, StepOutput


def test_logprobs_of_a_token_travel_with_it(make_rig) -> None:
    rig = make_rig()
    rig.submit("a", num_logprobs=0)
    logprobs = TokenLogprobs(7, -0.5)
    for sampled in (SampledToken(7, logprobs), SampledToken(8)):
        rig.scheduler.apply(rig.plan(), StepOutput((sampled,)))
    rig.listen()
    assert [(out.new_token_ids, out.logprobs) for out in rig.outputs] == [((7,), (logprobs,)), ((8,), ())]


def test_every_output_says_when_the_request_first_ran_and_has_no_error(make_rig) -> None:
    rig = make_rig()
    rig.submit("a", max_tokens=3)
    rig.now_s = 2.5
    rig.run_to_end()
    assert [(out.first_scheduled_s, out.error) for out in rig.outputs] == [(2.5, "")] * 3


def test_the_end_names_the_stop_id_that_brought_it(make_rig) -> None:
    rig = make_rig()
    rig.submit("a", stop_token_ids=frozenset({9}))
    for token_id in (7, 9):
        rig.scheduler.apply(rig.plan(), StepOutput((SampledToken(token_id),)))
    rig.listen()
    assert [(out.finish_reason, out.stop_token_id) for out in rig.outputs] == [(None, None), (FinishReason.STOP, 9)]
