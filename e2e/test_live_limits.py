"""Story: spec.limits changes on running pods: within 5 s, no restart, no broken stream, and again after a restart."""

import asyncio
import time

from e2e import support

SERVICE = "smollm2"


def _pod(namespace: str) -> support.Manifest:
    (pod,) = support.pods_of(SERVICE, namespace)
    return pod


def _target(namespace: str, limit: str) -> int:
    readings = support.pod_metrics(_pod(namespace)["metadata"]["name"], namespace)
    return int(support.metric_sum(readings, "guidevane_limit", f'name="{limit}"', 'kind="target"'))


def _running(namespace: str) -> int:
    readings = support.pod_metrics(_pod(namespace)["metadata"]["name"], namespace)
    return int(support.metric_sum(readings, "vllm:num_requests_running"))


async def _ask_until(stop: asyncio.Event, url: str) -> list[support.Stream]:
    streams = []
    while not stop.is_set():
        streams.append(await support.chat(url, "Count.", max_tokens=20, ignore_eos=True))
    return streams


async def test_eight_streams_survive_limits_going_from_8_to_2_to_8(namespace: str) -> None:
    support.apply(support.sample("smollm2-cpu", retune={"mode": "Off"}), namespace)
    support.wait_ready(SERVICE, namespace)
    url, stop, before = support.service_url(SERVICE, namespace), asyncio.Event(), _pod(namespace)
    clients = [asyncio.create_task(_ask_until(stop, url)) for _ in range(8)]
    await support.wait_for_async("eight running", lambda: _running(namespace) == 8)

    in_force_s = []
    for wanted in (2, 8):
        start = time.monotonic()
        await asyncio.to_thread(support.patch_spec, SERVICE, namespace, {"limits": {"maxNumSeqs": wanted}})
        await support.wait_for_async("in force", lambda n=wanted: _target(namespace, "maxNumSeqs") == n)
        in_force_s.append(time.monotonic() - start)
        await support.wait_for_async(f"{wanted} running", lambda n=wanted: _running(namespace) == n)
    stop.set()
    streams = [stream for seen in await asyncio.gather(*clients) for stream in seen]

    assert max(in_force_s) <= 5, in_force_s
    assert [stream for stream in streams if not stream.whole] == []
    after = _pod(namespace)
    assert (after["metadata"]["uid"], support.restarts(after)) == (before["metadata"]["uid"], 0)


def test_limits_are_in_sync_and_their_epoch_is_in_status(namespace: str) -> None:
    synced = support.wait_for("LimitsInSync", support.has_condition(SERVICE, namespace, "LimitsInSync"))

    limits = synced["status"]["limits"]
    assert limits["desired"]["maxNumSeqs"] == 8
    assert limits["inSyncPods"] == 1
    readings = support.pod_metrics(_pod(namespace)["metadata"]["name"], namespace)
    assert int(support.metric_sum(readings, "guidevane_limits_epoch")) == limits["epoch"]


def test_limits_are_applied_again_after_a_container_restart(namespace: str) -> None:
    support.patch_spec(SERVICE, namespace, {"limits": {"maxNumSeqs": 5}})
    support.wait_for("in force", lambda: _target(namespace, "maxNumSeqs") == 5)
    pod = _pod(namespace)

    kill = "import os; os.kill(1, 15)"
    support.kubectl("exec", pod["metadata"]["name"], "-n", namespace, "--", "python3", "-c", kill)

    support.wait_for("container restarted", lambda: support.restarts(_pod(namespace)) == 1, timeout_s=90)
    support.wait_for("limits applied again", lambda: _target(namespace, "maxNumSeqs") == 5, timeout_s=90)
    again = support.wait_for("LimitsInSync", support.has_condition(SERVICE, namespace, "LimitsInSync"))
    assert again["status"]["limits"]["inSyncPods"] == 1
    assert _pod(namespace)["metadata"]["uid"] == pod["metadata"]["uid"]
