"""A fleet in virtual time: what one request costs by hand, then what must hold for any load."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guidevane_api.limits import SchedulerLimits
from guidevane_bench.report.build import Slo, build_report, to_bytes
from guidevane_bench.simulator.faults import Fault, FaultKind, draw_faults
from guidevane_bench.simulator.fleet import Outcome
from guidevane_bench.simulator.ledger import End, Entry
from guidevane_bench.workload.load import LoadSpec
from guidevane_bench.workload.request import LoadRequest
from guidevane_runtime.core.tenants import TenantPolicy, TenantTerms

Play = Callable[..., Outcome]
Burst = Callable[..., list[LoadRequest]]
LimitsOf = Callable[..., SchedulerLimits]


def ends(outcome: Outcome) -> dict[str, int]:
    return dict(Counter(str(entry.end) for entry in outcome.ledger.entries))


def bytes_of(outcome: Outcome) -> bytes:
    return to_bytes(build_report(outcome.ledger, Slo(), outcome.ended_s))


def test_lone_request_takes_the_time_of_its_steps(play: Play, burst: Burst) -> None:
    (entry,) = play(burst(1, prompt=10, output=5)).ledger.entries
    # One step of 10 ms and 10 prompt tokens, then four of 10 ms and one decode.
    assert entry.ttft_s == pytest.approx(0.020)
    assert entry.e2e_s == pytest.approx(0.020 + 4 * 0.011)
    assert entry.tpot_s == pytest.approx(0.011)
    assert (entry.queue_wait_s, entry.num_tokens) == (0, 5)


def test_request_that_comes_during_a_step_waits_for_its_end(play: Play, burst: Burst) -> None:
    first, second = play(burst(2, prompt=10, gap_s=0.005)).ledger.entries
    assert second.queue_wait_s == pytest.approx(0.015)
    # Its prefill stalls the first one's second token.
    assert first.group_itl.largest_s == pytest.approx(0.021)


def test_request_that_comes_as_a_step_ends_is_in_the_next_one(play: Play, burst: Burst) -> None:
    _, second = play(burst(2, prompt=10, gap_s=0.020)).ledger.entries
    assert second.queue_wait_s == 0


def test_requests_that_come_at_once_are_in_the_same_step(play: Play, burst: Burst) -> None:
    assert [entry.queue_wait_s for entry in play(burst(4)).ledger.entries] == [0, 0, 0, 0]


def test_requests_spread_over_pods_run_as_if_alone(play: Play, burst: Burst) -> None:
    alone = play(burst(1)).ledger.entries[0]
    outcome = play(burst(3), num_pods=3)
    assert {entry.pod for entry in outcome.ledger.entries} == {0, 1, 2}
    assert {entry.e2e_s for entry in outcome.ledger.entries} == {alone.e2e_s}


def test_request_goes_to_the_pod_with_the_fewest_in_flight(play: Play, burst: Burst) -> None:
    requests = [LoadRequest(0, 0.0, 10, 200), *(LoadRequest(n, n * 0.5, 10, 2) for n in (1, 2))]
    assert [entry.pod for entry in play(requests, num_pods=2).ledger.entries] == [0, 1, 1]


def test_full_queue_refuses_with_its_reason(play: Play, burst: Burst, limits_of: LimitsOf) -> None:
    outcome = play(burst(10), limits=limits_of(max_num_seqs=2, max_queued_requests=3))
    assert ends(outcome) == {"finished": 5, "rejected": 5}
    assert {entry.reason for entry in outcome.ledger.entries if entry.end is End.REJECTED} == {"concurrency"}


@pytest.mark.parametrize(
    ("request_", "limits", "reason"),
    [
        (LoadRequest(1, 0.0, 60, 5), {"max_queued_tokens": 64}, "token_budget"),
        (LoadRequest(1, 0.0, 60, 5), {"max_prompt_tokens": 59}, "context_length"),
        (LoadRequest(1, 0.0, 60, 5), {"max_output_tokens": 4}, "validation"),
        (LoadRequest(1, 0.0, 60, 5), {"max_model_len": 64}, "context_length"),
        (LoadRequest(1, 0.0, 160, 5), {}, "memory"),
    ],
)
def test_request_is_refused_at_the_door_with_the_servers_reason(
    play: Play, limits_of: LimitsOf, request_: LoadRequest, limits: dict[str, int], reason: str
) -> None:
    outcome = play([LoadRequest(0, 0.0, 10, 3), request_], limits=limits_of(**limits), num_blocks=10)
    assert [(entry.end, entry.reason) for entry in outcome.ledger.entries] == [
        (End.FINISHED, ""),
        (End.REJECTED, reason),
    ]


def tenants_of(*names: str) -> list[LoadRequest]:
    """One request each, all at once, in this order."""
    return [LoadRequest(number, 0.0, 10, 5, name) for number, name in enumerate(names)]


def test_a_tenant_at_its_cap_is_refused_and_another_one_comes_in(play: Play) -> None:
    policy = TenantPolicy((TenantTerms("a", max_in_flight=2),))
    outcome = play(tenants_of("a", "a", "a", "b", "b", "b"), tenants=policy)
    rejected = [(entry.request.tenant, entry.reason) for entry in outcome.ledger.entries if entry.end is End.REJECTED]
    assert rejected == [("a", "tenant_concurrency")]


def test_tenants_are_served_in_turn_by_their_weights(play: Play, limits_of: LimitsOf) -> None:
    policy = TenantPolicy((TenantTerms("a"), TenantTerms("b", weight=3)))
    requests = tenants_of(*["a"] * 12, *["b"] * 12)
    entries = play(requests, limits=limits_of(max_num_seqs=1), tenants=policy).ledger.entries
    first_eight = sorted(entries, key=lambda entry: entry.first_scheduled_s or 0.0)[:8]
    assert Counter(entry.request.tenant for entry in first_eight) == {"a": 2, "b": 6}


def test_request_that_waits_too_long_times_out(play: Play, limits_of: LimitsOf) -> None:
    requests = [LoadRequest(0, 0.0, 10, 100), LoadRequest(1, 0.0, 10, 5)]
    outcome = play(requests, limits=limits_of(max_num_seqs=1, waiting_timeout_milliseconds=500))
    late = outcome.ledger.entries[1]
    assert (late.end, late.ttft_s) == (End.TIMEOUT, None)
    assert late.e2e_s == pytest.approx(0.5, abs=0.02)


def test_scarce_blocks_show_as_preemptions_and_recomputed_tokens(play: Play, burst: Burst, limits_of: LimitsOf) -> None:
    limits = limits_of(kv_cache_utilization_limit_percent=100)
    requests = [LoadRequest(n, 0.0, 30, 2) for n in range(3)] + [LoadRequest(n, 0.1, 30, 200) for n in range(3, 7)]
    outcome = play(requests, limits=limits, num_blocks=20)
    assert ends(outcome) == {"finished": 7}
    assert outcome.num_scheduler_preemptions > 0 < outcome.num_recomputed_tokens
    assert sum(entry.num_preemptions for entry in outcome.ledger.entries) == outcome.num_scheduler_preemptions


def test_static_batch_lets_nobody_in_before_it_has_ended(play: Play, limits_of: LimitsOf) -> None:
    requests = [LoadRequest(0, 0.0, 10, 2), LoadRequest(1, 0.0, 10, 50), LoadRequest(2, 0.001, 10, 2)]
    limits = limits_of(max_num_seqs=2)
    static, continuous = (play(requests, limits=limits, is_static=flag).ledger.entries for flag in (True, False))
    assert static[2].first_scheduled_s == max(entry.ended_s or 0 for entry in static[:2])
    assert continuous[2].first_scheduled_s == continuous[0].ended_s


def test_static_batch_ends_what_waited_too_long(play: Play, limits_of: LimitsOf) -> None:
    requests = [LoadRequest(0, 0.0, 10, 100), LoadRequest(1, 0.1, 10, 5), LoadRequest(2, 0.9, 10, 5)]
    limits = limits_of(max_num_seqs=1, waiting_timeout_milliseconds=500)
    outcome = play(requests, limits=limits, is_static=True)
    assert [entry.end for entry in outcome.ledger.entries] == [End.FINISHED, End.TIMEOUT, End.FINISHED]


# ------------------------------------------------------------------------------------------------------------ faults


def death(at_s: float, pod: int = 0, duration_s: float = 1.0) -> Fault:
    return Fault(at_s, pod, FaultKind.POD_DEATH, duration_s)


def test_requests_of_a_dead_pod_are_lost_and_the_others_go_on(play: Play, burst: Burst) -> None:
    outcome = play(burst(4, output=50), num_pods=2, faults=(death(0.1),))
    assert {(entry.pod, entry.end) for entry in outcome.ledger.entries} == {(0, End.LOST), (1, End.FINISHED)}


def test_while_every_pod_is_dead_requests_are_refused_and_then_served_again(play: Play, burst: Burst) -> None:
    outcome = play(burst(4, gap_s=0.6), faults=(death(0.5),))
    assert [str(entry.end) for entry in outcome.ledger.entries] == ["finished", "rejected", "rejected", "finished"]
    assert outcome.ledger.entries[1].reason == "no_pod"


def test_pod_dies_once_however_often_it_is_told(play: Play, burst: Burst) -> None:
    outcome = play(burst(3, gap_s=1.0), faults=(death(0.5), death(0.6, duration_s=9.0)))
    assert [str(entry.end) for entry in outcome.ledger.entries] == ["finished", "rejected", "finished"]


def test_slow_pod_takes_longer_for_the_time_of_its_fault(play: Play, burst: Burst) -> None:
    slow = Fault(0.0, 0, FaultKind.SLOW_POD, 0.5, factor=3.0)
    first, second = play(burst(2, gap_s=1.0), faults=(slow,)).ledger.entries
    assert first.ttft_s == pytest.approx(3 * 0.020)
    assert second.ttft_s == pytest.approx(0.020)


def test_overlapping_slowdowns_multiply_and_end_one_by_one(play: Play, burst: Burst) -> None:
    faults = tuple(Fault(0.0, 0, FaultKind.SLOW_POD, duration_s, factor=3.0) for duration_s in (0.5, 1.5))
    ttfts = [entry.ttft_s for entry in play(burst(3, gap_s=1.0), faults=faults).ledger.entries]
    assert ttfts == pytest.approx([9 * 0.020, 3 * 0.020, 0.020])


# -------------------------------------------------------------------------------------------------- whatever the load

LOADS = st.lists(st.tuples(st.floats(0, 2), st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=40).map(
    lambda rows: [LoadRequest(number, *row) for number, row in enumerate(sorted(rows))]
)


def is_in_order(entry: Entry) -> bool:
    times = [entry.request.arrival_s, entry.first_scheduled_s, entry.first_token_s, entry.ended_s]
    known = [time for time in times if time is not None]
    return known == sorted(known)


@given(LOADS, st.integers(1, 3), st.integers(10, 40), st.integers(1, 6), st.booleans(), st.integers(0, 99))
@settings(max_examples=60)
def test_every_request_ends_exactly_once_in_order_of_time_and_the_same_again(
    play: Play,
    limits_of: LimitsOf,
    requests: list[LoadRequest],
    num_pods: int,
    num_blocks: int,
    max_num_seqs: int,
    is_static: bool,
    seed: int,
) -> None:
    limits = limits_of(max_num_seqs=max_num_seqs, max_queued_requests=8, waiting_timeout_milliseconds=400)
    faults = draw_faults(dict.fromkeys(FaultKind, 2), num_pods, 2.0, seed)
    setting: dict[str, Any] = {"num_pods": num_pods, "num_blocks": num_blocks, "faults": faults, "is_static": is_static}
    outcome = play(requests, limits=limits, **setting)
    entries = outcome.ledger.entries
    assert [entry.request for entry in entries] == requests
    assert all(entry.end is not None and is_in_order(entry) for entry in entries)
    finished = [entry for entry in entries if entry.end is End.FINISHED]
    # The scheduler stops a request at one token more than the KV cache holds.
    held = num_blocks * 16 + 1
    for entry in finished:
        assert entry.num_tokens == min(entry.request.num_output_tokens, held - entry.request.num_prompt_tokens)
    assert all(entry.num_tokens == 0 for entry in entries if entry.end in (End.REJECTED, End.TIMEOUT))
    assert bytes_of(play(requests, limits=limits, **setting)) == bytes_of(outcome)


def test_same_seed_gives_the_same_bytes_over_a_trace_with_faults(play: Play, trace: Any) -> None:
    def once(seed: int) -> bytes:
        faults = draw_faults({FaultKind.POD_DEATH: 3, FaultKind.SLOW_POD: 3}, 4, 80.0, seed)
        return bytes_of(play(LoadSpec(trace=trace).requests(), num_pods=4, faults=faults))

    assert once(1) == once(1) != once(2)


def test_time_of_the_series_never_goes_back(play: Play, burst: Burst) -> None:
    points = play(burst(50, gap_s=0.05), scrape_interval_s=0.25).series.points
    times = [point.time_s for point in points]
    assert times == sorted(times)
    assert len(times) > 10


def test_waste_is_the_unfilled_end_of_last_blocks(play: Play) -> None:
    outcome = play([LoadRequest(0, 0.0, 8, 100)], scrape_interval_s=0.05)
    # Sampled evenly while one request fills block after block of 16: nearly half a block of about 58 tokens.
    assert outcome.series.kv_waste_percent() == pytest.approx(12, abs=4)
