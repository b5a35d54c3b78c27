import pytest

from guidevane_bench.simulator.ledger import ConservationError, End, Ledger
from guidevane_bench.workload.request import LoadRequest
from guidevane_runtime.core.messages import FinishReason, RequestOutput

REQUEST = LoadRequest(0, 0.0, 4, 2, "a")
LAST = RequestOutput("0", new_token_ids=(1,), finish_reason=FinishReason.LENGTH, first_scheduled_s=0.5)


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.open("0", REQUEST)
    return ledger


def test_second_end_is_a_fault(ledger: Ledger) -> None:
    ledger.close("0", End.LOST, 1.0)
    with pytest.raises(ConservationError, match="twice"):
        ledger.close("0", End.FINISHED, 2.0)


def test_output_after_the_end_is_a_fault(ledger: Ledger) -> None:
    ledger.take([LAST], 1.0)
    with pytest.raises(ConservationError, match="after its end"):
        ledger.take([LAST], 2.0)


def test_request_without_an_end_is_a_fault(ledger: Ledger) -> None:
    with pytest.raises(ConservationError, match="1 requests never ended"):
        ledger.ensure_all_ended()


def test_same_id_twice_is_a_fault(ledger: Ledger) -> None:
    with pytest.raises(ConservationError, match="twice"):
        ledger.open("0", REQUEST)


@pytest.mark.parametrize(
    ("reason", "scheduled_s", "end"),
    [
        (FinishReason.STOP, 0.5, End.FINISHED),
        (FinishReason.LENGTH, 0.5, End.FINISHED),
        (FinishReason.TIMEOUT, None, End.TIMEOUT),
        (FinishReason.ERROR, None, End.REJECTED),
        (FinishReason.ERROR, 0.5, End.FAILED),
        (FinishReason.ABORT, 0.5, End.FAILED),
    ],
)
def test_each_way_to_finish_is_an_end(
    ledger: Ledger, reason: FinishReason, scheduled_s: float | None, end: End
) -> None:
    ((_, entry),) = ledger.take([RequestOutput("0", finish_reason=reason, first_scheduled_s=scheduled_s)], 1.0)
    assert entry.end is end
