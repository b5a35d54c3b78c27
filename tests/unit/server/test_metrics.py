import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.messages import (
    EngineReady,
    EngineStats,
    FinishReason,
    RequestOutput,
    SamplingParams,
    StepReport,
)
from guidevane_runtime.core.tenants import RequestClass
from guidevane_runtime.server.choices import Choice
from guidevane_runtime.server.metrics import RequestTimes, ServerMetrics, count_buckets
from guidevane_runtime.server.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[2] / "data" / "server" / "metric_names.txt"


@pytest.fixture
def metrics() -> ServerMetrics:
    made = ServerMetrics(CollectorRegistry(), "m", 8192)
    made.engine_ready(EngineReady("b", 8192, 100, 50, 16, "float32", "cpu", SchedulerLimits(), 1.0))
    made.limits_target(SchedulerLimits())
    return made


def value(metrics: ServerMetrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})
    assert found is not None, name
    return found


def latency(metrics: ServerMetrics, name: str, request_class: RequestClass = RequestClass.INTERACTIVE) -> float:
    return value(metrics, name, **{"class": str(request_class)})


def run_request(
    metrics: ServerMetrics,
    tokenizer: Tokenizer,
    token_times_s: list[float],
    request_class: RequestClass = RequestClass.INTERACTIVE,
) -> None:
    """Arrives at 10, first step at 11, then one token at each time."""
    choice = Choice(0, (1, 2, 3), SamplingParams(max_tokens=9, seed=1), tokenizer)
    times = RequestTimes(arrival_s=10.0, request_class=request_class)
    metrics.request_accepted(3, 9)
    for i, now_s in enumerate(token_times_s):
        reason = FinishReason.LENGTH if i == len(token_times_s) - 1 else None
        # first_scheduled_s comes with every output, as the engine reports it.
        output = RequestOutput("r", (5,), (), reason, first_scheduled_s=11.0, num_preemptions=i)
        before = choice.num_tokens
        choice.feed(output)
        metrics.output_arrived(times, output, choice, choice.num_tokens - before, now_s)
    metrics.request_ended(times, choice, "length", token_times_s[-1])


def test_the_families_are_those_of_the_golden_file(metrics: ServerMetrics) -> None:
    page = generate_latest(metrics.registry).decode()
    found = [" ".join(match) for match in re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE)]
    assert sorted(found) == GOLDEN.read_text().splitlines()


def test_no_created_series_is_exposed(metrics: ServerMetrics, tokenizer: Tokenizer) -> None:
    run_request(metrics, tokenizer, [12.0])
    assert "_created" not in generate_latest(metrics.registry).decode()


def test_every_series_that_a_router_reads_is_there_from_the_start(metrics: ServerMetrics) -> None:
    assert value(metrics, "vllm:num_requests_running") == 0
    assert value(metrics, "vllm:num_requests_waiting") == 0
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0
    for reason in ("stop", "length", "abort", "error"):
        assert value(metrics, "vllm:request_success_total", finished_reason=reason) == 0
    info = "vllm:cache_config_info"
    labels = {"block_size": "16", "num_gpu_blocks": "50", "cache_dtype": "float32", "enable_prefix_caching": "True"}
    assert value(metrics, info, **labels) == 1


def test_one_ttft_per_request_and_one_itl_per_gap(metrics: ServerMetrics, tokenizer: Tokenizer) -> None:
    run_request(metrics, tokenizer, [13.0, 13.5, 14.5])
    assert latency(metrics, "vllm:time_to_first_token_seconds_count") == 1
    assert latency(metrics, "vllm:time_to_first_token_seconds_sum") == 3.0
    assert latency(metrics, "vllm:inter_token_latency_seconds_count") == 2
    assert latency(metrics, "vllm:inter_token_latency_seconds_sum") == 1.5
    assert latency(metrics, "vllm:request_time_per_output_token_seconds_sum") == 0.75


def test_latencies_of_offline_work_are_told_apart(metrics: ServerMetrics, tokenizer: Tokenizer) -> None:
    run_request(metrics, tokenizer, [13.0, 13.5, 14.5], RequestClass.OFFLINE)
    page = [sample for family in metrics.registry.collect() for sample in family.samples if "class" in sample.labels]
    seen = {(s.name, s.labels["class"]): s.value for s in page if s.name.endswith("_count")}
    assert len(seen) == 2 * 8
    assert {kind for (_, kind), count in seen.items() if count} == {"offline"}
    assert min(count for (_, kind), count in seen.items() if kind == "offline") == 1


def test_times_of_a_request_add_up(metrics: ServerMetrics, tokenizer: Tokenizer) -> None:
    run_request(metrics, tokenizer, [13.0, 13.5, 14.5])
    sums = {
        name: latency(metrics, f"vllm:request_{name}_time_seconds_sum")
        for name in ("queue", "prefill", "decode", "inference")
    }
    assert sums == {"queue": 1.0, "prefill": 2.0, "decode": 1.5, "inference": 3.5}
    assert latency(metrics, "vllm:e2e_request_latency_seconds_sum") >= sums["queue"] + sums["inference"]


def test_prompt_tokens_count_once_and_output_tokens_as_they_come(metrics: ServerMetrics, tokenizer: Tokenizer) -> None:
    run_request(metrics, tokenizer, [13.0, 13.5])
    assert value(metrics, "vllm:prompt_tokens_total") == 3
    assert value(metrics, "vllm:generation_tokens_total") == 2
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1


def test_a_request_without_a_token_has_no_ttft(metrics: ServerMetrics, tokenizer: Tokenizer) -> None:
    choice = Choice(0, (1,), SamplingParams(max_tokens=9, seed=1), tokenizer)
    metrics.request_ended(RequestTimes(arrival_s=10.0), choice, "abort", 12.0)
    assert latency(metrics, "vllm:time_to_first_token_seconds_count") == 0
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1


def test_gauges_follow_every_report_also_an_idle_one(metrics: ServerMetrics) -> None:
    busy = EngineStats(num_running=3, num_waiting=2, oldest_waiting_s=1.5, num_blocks_total=50, num_blocks_used=25)
    metrics.step(StepReport(1.0, stats=busy, step_s=0.1, num_prefill_tokens=10, num_decode_tokens=2))
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.5
    assert value(metrics, "vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert value(metrics, "guidevane_kv_blocks", state="free") == 25
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 12
    metrics.step(StepReport(2.0, stats=EngineStats(num_blocks_total=50)))
    assert value(metrics, "vllm:num_requests_running") == value(metrics, "vllm:kv_cache_usage_perc") == 0
    assert value(metrics, "guidevane_oldest_waiting_seconds") == 0
    assert value(metrics, "guidevane_step_seconds_count") == 1


def test_a_cached_block_is_neither_free_nor_used_and_does_not_count_as_kv_use(metrics: ServerMetrics) -> None:
    metrics.step(StepReport(1.0, stats=EngineStats(num_blocks_total=50, num_blocks_used=10, num_blocks_cached=25)))
    states = {state: value(metrics, "guidevane_kv_blocks", state=state) for state in ("used", "cached", "free")}
    assert states == {"used": 10, "cached": 25, "free": 15}
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.2


def test_prefix_queries_and_hits_count_on_over_an_engine_that_counts_from_zero(metrics: ServerMetrics) -> None:
    for queried, hit in ((100, 40), (150, 80)):
        stats = EngineStats(num_prefix_queried_tokens=queried, num_prefix_hit_tokens=hit)
        metrics.step(StepReport(1.0, stats=stats))
    metrics.engine_lost()
    metrics.engine_ready(EngineReady("b2", 8192, 100, 50, 16, "float32", "cpu", SchedulerLimits(), 1.0))
    metrics.step(StepReport(2.0, stats=EngineStats(num_prefix_queried_tokens=10, num_prefix_hit_tokens=5)))
    assert value(metrics, "vllm:prefix_cache_queries_total") == 160
    assert value(metrics, "vllm:prefix_cache_hits_total") == 85


def test_cached_prompt_tokens_count_once_and_are_not_computed(metrics: ServerMetrics, tokenizer: Tokenizer) -> None:
    choice, times = Choice(0, (1, 2, 3), SamplingParams(max_tokens=9, seed=1), tokenizer), RequestTimes(arrival_s=10.0)
    for now_s in (12.0, 13.0):
        output = RequestOutput("r", (5,), first_scheduled_s=11.0, num_cached_tokens=2)
        choice.feed(output)
        metrics.output_arrived(times, output, choice, 1, now_s)
    assert value(metrics, "vllm:prompt_tokens_cached_total") == 2
    assert value(metrics, "vllm:prompt_tokens_total") == 3
    assert value(metrics, "vllm:request_prefill_kv_computed_tokens_sum") == 1


def test_counters_go_on_over_an_engine_that_counts_from_zero(metrics: ServerMetrics) -> None:
    metrics.step(StepReport(1.0, stats=EngineStats(num_preemptions=4, num_recomputed_tokens=100)))
    metrics.engine_lost()
    metrics.engine_ready(EngineReady("b2", 8192, 100, 50, 16, "float32", "cpu", SchedulerLimits(), 1.0))
    metrics.step(StepReport(2.0, stats=EngineStats(num_preemptions=1, num_recomputed_tokens=10)))
    assert value(metrics, "vllm:num_preemptions_total") == 5
    assert value(metrics, "guidevane_preempted_tokens_recomputed_total") == 110


@pytest.mark.parametrize(
    ("family", "edge"),
    [
        ("vllm:inter_token_latency_seconds", "0.12"),
        ("vllm:inter_token_latency_seconds", "0.0025"),
        ("vllm:time_to_first_token_seconds", "1.5"),
        ("vllm:request_queue_time_seconds", "0.5"),
        ("vllm:request_queue_time_seconds", "0.001"),
    ],
)
def test_buckets_have_an_edge_at_the_default_slo_and_at_small_values(
    metrics: ServerMetrics, family: str, edge: str
) -> None:
    assert value(metrics, f"{family}_bucket", le=edge, **{"class": "interactive"}) == 0


def test_count_buckets_are_1_2_5_decades() -> None:
    assert count_buckets(600) == (1, 2, 5, 10, 20, 50, 100, 200, 500)


ESTIMATE = "guidevane_estimated_max_num_seqs"
BUSY = EngineStats(num_running=4, num_waiting=1, num_blocks_total=100, num_blocks_used=20)


def estimate(metrics: ServerMetrics) -> float | None:
    return metrics.registry.get_sample_value(ESTIMATE, {"model_name": "m", "engine": "0"})


def test_estimated_concurrency_is_absent_until_requests_wait_behind_others(metrics: ServerMetrics) -> None:
    metrics.step(StepReport(1.0, stats=EngineStats(num_running=4, num_blocks_total=100, num_blocks_used=20)))
    assert estimate(metrics) is None
    metrics.step(StepReport(2.0, stats=BUSY))
    assert estimate(metrics) == 19
    metrics.step(StepReport(3.0, stats=EngineStats(num_blocks_total=100)))
    assert estimate(metrics) == 19


def test_estimated_concurrency_goes_with_the_engine_it_was_seen_on(metrics: ServerMetrics) -> None:
    metrics.step(StepReport(1.0, stats=BUSY))
    metrics.engine_lost()
    assert estimate(metrics) is None
