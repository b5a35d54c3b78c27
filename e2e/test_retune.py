"""Story: the operator reads Prometheus, says what it would do, does it when asked, and keeps still when blind."""

import asyncio
from itertools import count

from e2e import support

SERVICE = "smollm2"
LONG_PROMPT = "Summarise: " + " ".join(f"item {i}" for i in range(300))


async def _load(url: str, stop: asyncio.Event) -> None:
    """Two chats beside two clients with long prompts: prefill stalls the chats, which is what the chunk gate is for."""
    numbers = count()

    async def ask(content: str, max_tokens: int) -> None:
        while not stop.is_set():
            # No two begin the same, so that none is in the prefix cache and each has to be computed.
            await support.chat(url, f"{next(numbers)}: {content}", max_tokens=max_tokens, ignore_eos=True)

    await asyncio.gather(*(ask("Tell a story.", 64) for _ in range(2)), *(ask(LONG_PROMPT, 4) for _ in range(2)))


def _retune(namespace: str) -> support.Manifest:
    return dict(support.get("llm", SERVICE, namespace)["status"].get("retune", {}))


def _target(namespace: str, limit: str) -> int:
    (pod,) = support.pods_of(SERVICE, namespace)
    readings = support.pod_metrics(pod["metadata"]["name"], namespace)
    return int(support.metric_sum(readings, "guidevane_limit", f'name="{limit}"', 'kind="target"'))


async def test_observe_recommends_and_auto_moves_one_knob_within_bounds(namespace: str) -> None:
    support.apply(support.sample("smollm2-cpu"), namespace)
    support.wait_ready(SERVICE, namespace)
    start_chunk = _target(namespace, "prefillChunkSize")
    stop = asyncio.Event()
    load = asyncio.create_task(_load(support.service_url(SERVICE, namespace), stop))

    said = await support.wait_for_async("a proposal", lambda: _retune(namespace).get("proposal"), timeout_s=120)
    assert said["knob"] == "prefillChunkSize"
    assert said["to"] < said["from"] == start_chunk
    assert "itl" in said["evidence"].lower()
    assert _target(namespace, "prefillChunkSize") == start_chunk, "Observe never acts"

    await asyncio.to_thread(support.patch_spec, SERVICE, namespace, {"retune": {"mode": "Auto"}})
    history = await support.wait_for_async("a move", lambda: _retune(namespace).get("history"), timeout_s=120)
    moved = history[-1]
    assert (moved["knob"], moved["from"]) == ("prefillChunkSize", start_chunk)
    assert moved["evidence"]
    await support.wait_for_async(
        "pods obey", lambda: _target(namespace, "prefillChunkSize") <= moved["to"], timeout_s=10
    )
    await support.wait_for_async("the event", lambda: support.events(namespace, "LimitsRetuned"), timeout_s=10)
    stop.set()
    await load


async def test_without_prometheus_nothing_moves_and_status_says_stale(namespace: str) -> None:
    monitoring, told = support.MONITORING_NAMESPACE, len(support.events(namespace, "MetricsLost"))
    stop = asyncio.Event()
    load = asyncio.create_task(_load(support.service_url(SERVICE, namespace), stop))
    try:
        support.kubectl("scale", "deployment/prometheus", "-n", monitoring, "--replicas=0")
        stale = await support.wait_for_async(
            "metrics Stale",
            lambda: (s := support.get("llm", SERVICE, namespace)["status"])["metrics"]["state"] == "Stale" and s,
            timeout_s=90,
        )
        limits, moves = stale["limits"]["desired"], len(stale["retune"].get("history", []))
        await asyncio.sleep(30)  # several retune intervals under the same load: the point is that nothing happens
        blind = support.get("llm", SERVICE, namespace)["status"]
        assert blind["limits"]["desired"] == limits
        assert len(blind["retune"].get("history", [])) == moves
        # Under load scrapes may have been lost before, and what repeats within a minute is folded into one event.
        assert 1 <= len(support.events(namespace, "MetricsLost")) <= told + 1
    finally:
        support.kubectl("scale", "deployment/prometheus", "-n", monitoring, "--replicas=1")
        stop.set()
        await load
    support.wait_for(
        "metrics Known again",
        lambda: support.get("llm", SERVICE, namespace)["status"]["metrics"]["state"] == "Known",
        timeout_s=90,
    )
