"""What must go on when the API server refuses, the operator dies, or metrics are gone."""

import asyncio
import dataclasses
import itertools
from typing import Any

import aiohttp
import kmock
import pytest

from tests.integration.operator.api_server import LLM

KNOWN = {
    "kv_percent": 40,
    "running_per_pod": 8,
    "waiting": 4,
    "preemptions": 0,
    "finished": 60,
    "prompt_tokens": 90000,
    "generation_tokens": 3000,
    "ttft_p95_ms": 900,
    "ttft_p95_ms:samples": 60,
    "itl_p95_ms": 300,
    "itl_p95_ms:samples": 3000,
    "itl_p99_ms": 400,
    "itl_p99_ms:samples": 3000,
    "queue_wait_p95_ms": 100,
    "queue_wait_p95_ms:samples": 60,
    "guard_level": 0,
}
"""ITL far above its line, TTFT with room: the chunk should be halved."""

FAST = {
    "intervalSeconds": 2,
    "windowSeconds": 10,
    "settleSeconds": {"raise": 11, "cut": 2},
    "minSamplesPerWindow": 10,
}
MONITORING = {"scrapeIntervalSeconds": 1}


@pytest.fixture(autouse=True)
def quick(cluster: Any) -> None:
    """Settle times of the least size that the schema takes, at eight times the speed."""
    cluster.speed = 8.0


@pytest.mark.parametrize("faults", [[409], [422], [403], [400], [500] * 5], ids=str)
async def test_a_refused_status_write_does_not_end_the_loops(cluster: Any, faults: list[int]) -> None:
    await cluster.start_operator()
    await cluster.add_service()
    await cluster.until(lambda: cluster.status().get("observedGeneration") == 1)

    cluster.api.status_faults = list(faults)
    await cluster.add_service(limits={"maxNumSeqs": 2})

    await cluster.until(lambda: cluster.status().get("observedGeneration") == 2)
    assert not cluster.api.status_faults
    await cluster.add_service(limits={"maxNumSeqs": 4})
    await cluster.until(lambda: cluster.status()["limits"]["desired"]["maxNumSeqs"] == 4)
    assert cluster.running.faults() == {}


async def test_a_new_operator_resumes_limits_and_epoch_that_the_tuner_set(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(retune=FAST | {"mode": "Auto"}, monitoring=MONITORING)
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")
    cluster.prometheus.pods, cluster.prometheus.values = ("chat-0",), KNOWN
    await cluster.until(lambda: cluster.status().get("limits", {}).get("source") == "Retune")
    limits = cluster.status()["limits"]
    deployment = cluster.deployment()
    await cluster.stop_operator()
    engine.accepted.clear()

    await cluster.start_operator()

    await cluster.until(lambda: engine.accepted)
    assert engine.accepted[0].epoch == limits["epoch"]
    assert engine.limits.prefill_chunk_size == limits["desired"]["prefillChunkSize"]
    await cluster.until(lambda: cluster.status()["retune"]["state"] == "Settling")
    assert cluster.status()["limits"]["epoch"] == limits["epoch"]
    assert cluster.deployment()["spec"] == deployment["spec"]


async def test_auto_moves_one_knob_and_status_says_why(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(retune=FAST | {"mode": "Auto"}, monitoring=MONITORING)
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")
    cluster.prometheus.pods, cluster.prometheus.values = ("chat-0",), KNOWN

    history = await cluster.until(lambda: cluster.status().get("retune", {}).get("history"))

    move = history[-1]
    assert (move["knob"], move["from"], move["to"]) == ("prefillChunkSize", 2048, 1024)
    assert (move["rule"], move["applied"]) == ("ItlHigh", True)
    assert "itlP95 300/120ms" in move["evidence"]
    await cluster.until(lambda: engine.limits.prefill_chunk_size <= 1024)
    assert engine.limits.max_num_seqs == 8
    await cluster.until(lambda: "LimitsRetuned" in cluster.events())


async def test_the_tuner_waits_while_the_guard_acts_and_both_ends_of_that_are_told(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(retune=FAST | {"mode": "Auto"}, monitoring=MONITORING, slo={"guard": "On"})
    await cluster.until(cluster.deployment)
    await cluster.add_pod("chat-0")
    cluster.prometheus.pods, cluster.prometheus.over = ("chat-0",), ("itl_p95_ms",)
    cluster.prometheus.values = KNOWN | {"guard_level": 2}

    await cluster.until(lambda: cluster.status().get("retune", {}).get("state") == "Guarded")
    assert cluster.status()["guard"] == {"level": 2, "lines": ["itlP95Milliseconds"]}
    assert cluster.status()["retune"]["message"] == "the guard gives way: level 2, over itlP95Milliseconds"
    await cluster.until(lambda: "GuardGaveWay" in cluster.events())
    looks = cluster.prometheus.queries
    await cluster.until(lambda: cluster.prometheus.queries >= looks + 8)
    assert "history" not in cluster.status()["retune"]

    cluster.prometheus.values, cluster.prometheus.over = KNOWN, ()

    await cluster.until(lambda: cluster.status()["retune"].get("history"))
    await cluster.until(lambda: "GuardRecovered" in cluster.events())
    assert cluster.status()["guard"] == {"level": 0, "lines": []}


async def test_a_level_that_pods_do_not_say_moves_nothing(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(retune=FAST | {"mode": "Auto"}, monitoring=MONITORING, slo={"guard": "On"})
    await cluster.until(cluster.deployment)
    await cluster.add_pod("chat-0")
    cluster.prometheus.pods = ("chat-0",)
    cluster.prometheus.values = {name: value for name, value in KNOWN.items() if name != "guard_level"}

    await cluster.until(lambda: "level is not known" in cluster.status().get("retune", {}).get("message", ""))

    assert cluster.status()["retune"]["state"] == "Blind"
    assert "guard" not in cluster.status()


@pytest.mark.parametrize(("mode", "annotations"), [("Observe", {}), ("Auto", {"guidevane.dev/paused": "true"})])
async def test_observe_and_paused_say_what_they_would_do_and_move_nothing(
    cluster: Any, mode: str, annotations: dict[str, str]
) -> None:
    await cluster.start_operator()
    service = cluster.service(retune=FAST | {"mode": mode}, monitoring=MONITORING)
    await cluster.api.put(LLM, service)
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")
    await cluster.until(lambda: cluster.condition("LimitsInSync").get("status") == "True")
    service["metadata"]["annotations"] = annotations
    await cluster.api.put(LLM, service)
    cluster.prometheus.pods, cluster.prometheus.values = ("chat-0",), KNOWN

    proposal = await cluster.until(lambda: cluster.status().get("retune", {}).get("proposal"))

    assert (proposal["knob"], proposal["to"], proposal["applied"]) == ("prefillChunkSize", 1024, False)
    assert cluster.status()["retune"]["state"] == "Observing"
    assert cluster.status()["limits"]["epoch"] == 1
    assert engine.limits.prefill_chunk_size == 2048


async def test_lost_metrics_mean_no_move_one_event_and_stale_in_status(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(retune=FAST | {"mode": "Auto"}, monitoring=MONITORING)
    await cluster.until(cluster.deployment)
    await cluster.add_pod("chat-0")
    calm = KNOWN | {"itl_p95_ms": 60, "itl_p99_ms": 70}
    cluster.prometheus.pods, cluster.prometheus.values = ("chat-0",), calm
    await cluster.until(lambda: cluster.status().get("metrics", {}).get("state") == "Known")

    cluster.prometheus.broken, cluster.prometheus.values = True, KNOWN
    await cluster.until(lambda: cluster.status()["metrics"]["state"] == "Stale")
    asked = cluster.prometheus.queries
    await cluster.until(lambda: cluster.prometheus.queries > asked + 5)

    assert cluster.condition("MetricsFresh")["status"] == "False"
    assert cluster.events().count("MetricsLost") == 1
    assert cluster.status()["limits"]["epoch"] == 1
    cluster.prometheus.broken, cluster.prometheus.values = False, calm
    await cluster.until(lambda: "MetricsRecovered" in cluster.events())
    await cluster.until(lambda: cluster.condition("MetricsFresh")["status"] == "True")


async def test_a_changed_spec_takes_precedence_over_the_tuner(cluster: Any) -> None:
    await cluster.start_operator()
    blocks = {"retune": FAST | {"mode": "Auto"}, "monitoring": MONITORING}
    await cluster.add_service(**blocks)
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")
    cluster.prometheus.pods, cluster.prometheus.values = ("chat-0",), KNOWN
    await cluster.until(lambda: cluster.status().get("limits", {}).get("source") == "Retune")
    cluster.prometheus.values = KNOWN | {"itl_p95_ms": 60, "itl_p99_ms": 70}
    await cluster.add_service(**blocks, slo={"ttftP95Milliseconds": 3000})
    await cluster.until(lambda: cluster.status()["observedGeneration"] == 2)
    assert cluster.status()["limits"]["source"] == "Retune"

    await cluster.add_service(**blocks, limits={"maxNumSeqs": 8, "prefillChunkSize": 512})

    await cluster.until(lambda: engine.limits.prefill_chunk_size == 512)
    assert cluster.status()["limits"]["source"] == "Spec"


async def test_a_calm_service_costs_no_writes(cluster: Any) -> None:
    await cluster.start_operator()
    await cluster.add_service(retune=FAST | {"mode": "Auto"}, monitoring=MONITORING)
    await cluster.until(cluster.deployment)
    await cluster.add_pod("chat-0")
    calm = KNOWN | {"itl_p95_ms": 60, "itl_p99_ms": 70}
    cluster.prometheus.pods, cluster.prometheus.values = ("chat-0",), calm
    await cluster.until(lambda: cluster.status().get("retune", {}).get("state") == "Idle")
    for kind in ("SLOMet", "LimitsInSync", "Ready"):
        await cluster.until(lambda kind=kind: cluster.condition(kind).get("status") == "True")
    writes, asked = dict(cluster.api.writes), cluster.prometheus.queries

    await cluster.until(lambda: cluster.prometheus.queries > asked + 4)

    assert dict(cluster.api.writes) == writes


async def health(cluster: Any) -> int:
    """Status of /healthz, once its server listens."""
    url = f"http://127.0.0.1:{cluster.health_port}/healthz"
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        while True:
            try:
                async with session.get(url) as response:
                    return int(response.status)
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.05)


async def test_the_health_route_says_200_while_all_loops_are_alive(cluster: Any, unused_tcp_port: int) -> None:
    cluster.health_port = unused_tcp_port
    await cluster.start_operator()
    await cluster.until(lambda: not cluster.running.faults())
    assert await health(cluster) == 200


async def test_the_health_route_says_500_when_a_loop_is_late(cluster: Any, unused_tcp_port: int) -> None:
    cluster.health_port = unused_tcp_port
    await cluster.start_operator()
    await cluster.until(lambda: not cluster.running.faults())

    cluster.running.loops[0].pulse.clock = lambda: float("inf")

    assert await health(cluster) == 500


async def test_leases_are_renewed_while_the_api_server_is_away(cluster: Any) -> None:
    cluster.settings = cluster.settings.model_copy(update={"resync_seconds": 1.0})
    await cluster.start_operator()
    await cluster.add_service(limits={"maxNumSeqs": 3})
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")
    await cluster.until(lambda: cluster.condition("LimitsInSync").get("status") == "True")

    cluster.api.away = True
    record = next(cluster.running.directory.get(key) for key in cluster.running.directory)
    await cluster.until(lambda: record.needs_refresh)
    engine.accepted.clear()

    await cluster.until(lambda: len(engine.accepted) > 5)
    cluster.api.away = False
    await cluster.until(lambda: not record.needs_refresh)
    assert cluster.running.faults() == {}


async def test_an_api_server_restored_from_a_backup_is_followed(cluster: Any) -> None:
    cluster.settings = cluster.settings.model_copy(update={"resync_seconds": 1.0})
    await cluster.start_operator()
    await cluster.add_service(limits={"maxNumSeqs": 3})
    await cluster.until(lambda: cluster.status().get("observedGeneration") == 1)

    cluster.api.versions = itertools.count(1)
    await cluster.add_service(limits={"maxNumSeqs": 5})

    assert await cluster.until(lambda: cluster.status()["limits"]["desired"]["maxNumSeqs"] == 5)


async def test_of_two_operators_alive_at_once_the_pods_obey_one_epoch(cluster: Any) -> None:
    twin = dataclasses.replace(cluster)
    await cluster.start_operator()
    await twin.start_operator()
    try:
        await cluster.add_service()
        await cluster.until(cluster.deployment)
        engine = await cluster.add_pod("chat-0")
        for value in (4, 2, 6):
            await cluster.add_service(limits={"maxNumSeqs": value})
            await cluster.until(lambda wanted=value: engine.limits.max_num_seqs == wanted)
        await cluster.until(lambda: cluster.condition("LimitsInSync").get("status") == "True")
        assert cluster.status()["limits"]["epoch"] == engine.epoch == 4
    finally:
        await twin.stop_operator()


async def test_watches_whose_versions_are_too_old_are_begun_again(cluster: Any) -> None:
    await cluster.start_operator()
    gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}
    begun = cluster.api.watches_begun
    for resource in (LLM, "v1/pods", "apps/v1/deployments"):
        await cluster.api._buses[kmock.resource(resource)].put(gone)
    await cluster.until(lambda: cluster.api.watches_begun >= begun + 3)

    await cluster.add_service()
    await cluster.until(cluster.deployment)
    engine = await cluster.add_pod("chat-0")
    await cluster.until(lambda: engine.accepted)
    await cluster.api.delete_object("apps/v1/deployments", "chat")
    assert await cluster.until(cluster.deployment)
