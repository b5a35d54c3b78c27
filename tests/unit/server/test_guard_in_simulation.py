"""The guard of a simulated pod hears what the guard of a server hears: one story, told to both."""

from prometheus_client import CollectorRegistry

from guidevane_bench.report.latency import LatencyHistogram
from guidevane_bench.simulator.ledger import Entry
from guidevane_bench.simulator.pod_guard import PodGuard
from guidevane_bench.workload.request import LoadRequest
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.door import Rejection
from guidevane_runtime.core.guard import Guard, GuardConfig, Sample
from guidevane_runtime.core.guard_steps import Line
from guidevane_runtime.core.messages import EngineStats, FinishReason, RequestOutput, SamplingParams, StepReport
from guidevane_runtime.core.tenants import RequestClass
from guidevane_runtime.server.choices import Choice
from guidevane_runtime.server.metrics import RequestTimes, ServerMetrics
from guidevane_runtime.server.text.tokenizer import Tokenizer

Heard = list[tuple[Line, float]]


class Recorder(Guard):
    """A guard that keeps what it hears."""

    def __init__(self) -> None:
        super().__init__(GuardConfig({Line.TTFT: 1.0}))
        self.heard: Heard = []

    def observe(self, sample: Sample) -> None:
        self.heard.append((sample.line, round(sample.value, 6)))


def tell_pod() -> Heard:
    """Let in, three tokens, the KV use of a step, refusals of every kind, a wait that was too long, offline work."""
    recorder = Recorder()
    pod, entry = PodGuard(recorder), Entry(LoadRequest(0, 10.0, 3, 9), LatencyHistogram())
    pod.hear_door(None, 10.0)
    for now_s in (12.5, 12.75, 13.5):
        pod.hear_outputs([RequestOutput("r", (5,), first_scheduled_s=11.0)], {"r": entry}, now_s)
        entry.num_tokens, entry.last_token_s = entry.num_tokens + 1, now_s
    pool = BlockPool(10, 16)
    pool.table().try_grow_to(3 * 16)
    pod.hear_kv_use(pool, 14.0)
    for why in Rejection:
        pod.hear_door(why, 15.0)
    waiting = Entry(LoadRequest(1, 10.0, 3, 9), LatencyHistogram())
    pod.hear_outputs([RequestOutput("w", finish_reason=FinishReason.TIMEOUT)], {"w": waiting}, 40.0)
    offline = Entry(LoadRequest(2, 10.0, 3, 9, request_class=RequestClass.OFFLINE), LatencyHistogram())
    for now_s in (42.5, 42.75):
        pod.hear_outputs([RequestOutput("o", (5,), first_scheduled_s=41.0)], {"o": offline}, now_s)
        offline.num_tokens, offline.last_token_s = offline.num_tokens + 1, now_s
    return recorder.heard


def tell_server(tokenizer: Tokenizer) -> Heard:
    """The same."""
    heard: Heard = []
    metrics = ServerMetrics(CollectorRegistry(), "m", 8192)
    metrics.on_sample = lambda line, value: heard.append((line, round(value, 6)))
    choice, times = Choice(0, (1, 2, 3), SamplingParams(max_tokens=9, seed=1), tokenizer), RequestTimes(arrival_s=10.0)
    metrics.request_accepted(3, 9)
    for now_s in (12.5, 12.75, 13.5):
        metrics.output_arrived(times, RequestOutput("r", (5,), first_scheduled_s=11.0), choice, 1, now_s)
    metrics.step(StepReport(14.0, stats=EngineStats(num_blocks_total=10, num_blocks_used=3)))
    for why in Rejection:
        metrics.rejected(why)
    metrics.rejected(Rejection.TIMEOUT)
    offline = RequestTimes(arrival_s=10.0, request_class=RequestClass.OFFLINE)
    for now_s in (42.5, 42.75):
        metrics.output_arrived(offline, RequestOutput("o", (5,), first_scheduled_s=41.0), choice, 1, now_s)
    return heard


def test_simulated_pod_hears_what_a_server_hears(tokenizer: Tokenizer) -> None:
    heard = tell_pod()
    assert heard == tell_server(tokenizer)
    assert {line for line, _ in heard} == set(Line)


def test_guard_hears_no_latency_of_offline_work(tokenizer: Tokenizer) -> None:
    waits = [value for line, value in tell_pod() if line in (Line.TTFT, Line.QUEUE_WAIT)]
    assert waits == [1000.0, 2500.0]
