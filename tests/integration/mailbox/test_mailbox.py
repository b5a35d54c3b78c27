import socket

import pytest

from guidevane_runtime.core.messages import FinishReason, RequestOutput, SamplingParams, Submit, TokenLogprobs
from guidevane_runtime.engine.mailbox import FrameBuffer, Mailbox, MailboxClosedError, encode
from guidevane_runtime.engine.stream import RequestStream, merged

SUBMIT = Submit("a", tuple(range(1000)), SamplingParams(max_tokens=1, seed=2), arrival_s=0.5)


@pytest.mark.parametrize("size", [1, 3, 7, 4096])
def test_messages_survive_any_cut_of_the_stream(size: int) -> None:
    wire = encode(SUBMIT) * 2
    buffer, received = FrameBuffer(), []
    for start in range(0, len(wire), size):
        buffer.feed(wire[start : start + size])
        received += list(buffer.messages())
    assert received == [SUBMIT, SUBMIT]


def test_all_the_mail_that_is_there_comes_at_once() -> None:
    server, engine = socket.socketpair()
    mailbox = Mailbox(engine)
    server.sendall(encode(SUBMIT) + encode("more"))
    assert mailbox.take(1.0) == [SUBMIT, "more"]
    assert mailbox.take(0.0) == []
    mailbox.close()
    server.close()


def test_what_comes_with_the_first_message_is_not_lost() -> None:
    """A Shutdown or new limits, sent while the engine's process starts."""
    server, engine = socket.socketpair()
    mailbox = Mailbox(engine)
    server.sendall(encode("settings") + encode(SUBMIT) + encode("more"))
    assert mailbox.take_first() == "settings"
    assert mailbox.take(0.0) == [SUBMIT, "more"]
    mailbox.close()
    server.close()


def test_a_mailbox_whose_other_side_is_gone_says_so() -> None:
    server, engine = socket.socketpair()
    mailbox = Mailbox(engine)
    server.close()
    with pytest.raises(MailboxClosedError):
        mailbox.take(1.0)
    with pytest.raises(MailboxClosedError):
        mailbox.put(SUBMIT)
    mailbox.close()


def test_outputs_that_were_not_read_are_merged_into_one() -> None:
    parts = [
        RequestOutput("a", (1,), (TokenLogprobs(1, -0.5),), first_scheduled_s=1.0),
        RequestOutput("a", (2, 3), (TokenLogprobs(2, -0.1), TokenLogprobs(3, -0.2)), first_scheduled_s=1.0),
        RequestOutput(
            "a", (4,), finish_reason=FinishReason.STOP, stop_token_id=4, first_scheduled_s=1.0, num_preemptions=2
        ),
    ]
    whole = merged(parts)
    assert whole.new_token_ids == (1, 2, 3, 4) and [entry.token_id for entry in whole.logprobs] == [1, 2, 3]
    assert (whole.finish_reason, whole.stop_token_id, whole.num_preemptions) == (FinishReason.STOP, 4, 2)


async def test_a_slow_reader_gets_everything_and_one_end() -> None:
    stream = RequestStream("a")
    for token_id in range(50):
        stream.put(RequestOutput("a", (token_id,)))
    first = await anext(stream)
    stream.put(RequestOutput("a", (50,), finish_reason=FinishReason.LENGTH))
    stream.put(RequestOutput("a", finish_reason=FinishReason.ERROR, error="late"))
    rest = [output async for output in stream]
    assert first.new_token_ids == tuple(range(50))
    assert [(output.new_token_ids, output.finish_reason) for output in rest] == [((50,), FinishReason.LENGTH)]
