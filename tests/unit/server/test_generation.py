"""What happens to the engine's requests when something goes wrong on our side of the mailbox."""

import types
from typing import Any, cast

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.door import AdmissionGate, Capacity
from guidevane_runtime.core.leases import Standing
from guidevane_runtime.core.messages import AbortCause, FinishReason, RequestOutput, SamplingParams, Submit
from guidevane_runtime.engine.stream import RequestStream
from guidevane_runtime.errors import DeadlineExceeded, WaitedTooLong
from guidevane_runtime.server.choices import Choice
from guidevane_runtime.server.generation import Generation
from guidevane_runtime.server.live_requests import LiveRequests
from guidevane_runtime.server.metrics import ServerMetrics
from guidevane_runtime.server.services import Services
from guidevane_runtime.server.text.tokenizer import Tokenizer


class Engine:
    """Gives every request one output, and remembers what it was told."""

    def __init__(self, output: RequestOutput) -> None:
        self.output = output
        self.aborted: list[AbortCause] = []

    def submit(self, submit: Submit) -> RequestStream:
        stream = RequestStream(submit.request_id)
        stream.put(replace(self.output, request_id=submit.request_id))
        return stream

    def abort(self, request_id: str, cause: AbortCause) -> None:
        self.aborted.append(cause)


def make_services(engine: Engine) -> Services:
    gate = AdmissionGate(limits=SchedulerLimits, clock=lambda: 0.0)
    gate.engine_ready(Capacity(num_blocks=100, block_size=16), load_s=0.0)
    metrics = ServerMetrics(CollectorRegistry(), "tiny", 100)
    parts: Any = types.SimpleNamespace(
        engine=engine, gate=gate, metrics=metrics, clock=lambda: 0.0, live=LiveRequests()
    )
    return cast(Services, parts)


@pytest.mark.parametrize(
    ("tokens", "why", "error", "refused"),
    [
        ((), "", WaitedTooLong, {"timeout": 1}),
        ((), "the deadline passed", DeadlineExceeded, {"deadline_exceeded": 1}),
        ((1,), "the deadline passed", DeadlineExceeded, {}),
    ],
)
async def test_what_times_out_is_refused_once_per_body_unless_it_had_begun_to_answer(
    tokenizer: Tokenizer, tokens: tuple[int, ...], why: str, error: type[WaitedTooLong], refused: dict[str, int]
) -> None:
    timeout = RequestOutput("", finish_reason=FinishReason.TIMEOUT, error=why)
    services = make_services(Engine(timeout))
    choices = [Choice(i, (1,), SamplingParams(max_tokens=100, seed=1), tokenizer) for i in range(3)]
    for choice in choices:
        choice.feed(RequestOutput("", tokens))
    with pytest.raises(error):
        async with Generation(services, choices, services.gate.enter(Standing(), 3), client_id="c") as generation:
            await generation.next()
    assert counted(services.metrics, "guidevane_admission_rejections_total", "reason") == refused
    assert counted(services.metrics, "vllm:request_success_total", "finished_reason") == {"abort": 3}
    assert services.gate.num_live == 0


def counted(metrics: ServerMetrics, name: str, label: str) -> dict[str, float]:
    """Samples above 0, by label."""
    samples = [sample for family in metrics.registry.collect() for sample in family.samples if sample.name == name]
    return {sample.labels[label]: sample.value for sample in samples if sample.value}


async def test_a_choice_that_we_fail_on_is_no_longer_run_by_the_engine(tokenizer: Tokenizer) -> None:
    class Damaged(Choice):
        def feed(self, output: RequestOutput) -> Any:
            raise ZeroDivisionError("a fault of ours")

    engine = Engine(RequestOutput("", (1,)))
    services = make_services(engine)
    choice = Damaged(0, (1,), SamplingParams(max_tokens=100, seed=1), tokenizer)
    leases = services.gate.enter(Standing())
    with pytest.raises(ZeroDivisionError):
        async with Generation(services, [choice], leases, client_id="c") as generation:
            await generation.next()
    assert engine.aborted == [AbortCause.CANCELLED]
    assert services.gate.num_live == 0
