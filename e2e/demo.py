"""`make demo`: one LLMService on a real cluster, from kubectl apply to limits that retune themselves.

Outside the node this brings the cluster up and runs itself again inside it; KEEP=1 leaves everything up.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from itertools import count, pairwise

from e2e import support
from e2e.__main__ import cluster, reason_not_to_run

NAMESPACE = "demo"
SERVICE = "smollm2"
BOLD, DIM, GREEN, RED, RESET = (
    ("\033[1m", "\033[2m", "\033[32m", "\033[31m", "\033[0m") if sys.stdout.isatty() else [""] * 5
)
START = time.monotonic()
WATCH_S = 150
"""Longest watch over the tuner: four moves with their settle time."""
AFTER_S = 15
"""How long the load goes on under the last limits."""


def step(title: str) -> None:
    print(f"\n{BOLD}[{time.monotonic() - START:5.0f} s] {title}{RESET}", flush=True)


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def check(claim: str, holds: bool) -> None:
    """Print a claim with its verdict; a demo that does not show what it says is a failed demo."""
    print(f"  {GREEN + 'ok' if holds else RED + 'FAILED'}{RESET}  {claim}", flush=True)
    if not holds:
        raise SystemExit(f"demo: not shown: {claim}")


def show(*args: str) -> None:
    print(f"{DIM}  $ kubectl {' '.join(args)}{RESET}")
    print("\n".join("  " + line for line in support.kubectl(*args).splitlines()), flush=True)


# ------------------------------------------------------------------------------------------------ the acts


async def serve() -> None:
    step("kubectl apply -f manifests/samples/smollm2-cpu.yaml")
    support.delete_namespace(NAMESPACE)
    support.kubectl("create", "namespace", NAMESPACE)
    support.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    say(
        support.kubectl(
            "apply", "-n", NAMESPACE, "-f", str(support.REPO / "manifests/samples/smollm2-cpu.yaml")
        ).strip()
    )
    support.wait_ready(SERVICE, NAMESPACE)
    show("get", "llm", "-n", NAMESPACE)


async def answer(url: str) -> None:
    step("A chat answer, streamed through the Service")
    question = "What do guide vanes do in a water turbine? Answer in two sentences."
    say(f"{DIM}{question}{RESET}")
    print("  ", end="")
    seen = await support.chat(url, question, max_tokens=64, on_text=lambda text: print(text, end="", flush=True))
    print()
    check(f"whole stream: {len(seen.token_times_s)} deltas, finish_reason {seen.finish_reason}", seen.whole)


async def trim_by_hand(url: str) -> None:
    step("Eight streams running while spec.limits.maxNumSeqs goes from 8 to 2 to 8")
    pods_before = [(pod["metadata"]["name"], support.restarts(pod)) for pod in support.pods_of(SERVICE, NAMESPACE)]
    stop = asyncio.Event()
    clients = [asyncio.create_task(_client(url, stop, number)) for number in range(8)]
    await support.wait_for_async("eight requests running", lambda: _running() == 8)
    for wanted in (2, 8):
        start = time.monotonic()
        await asyncio.to_thread(support.patch_spec, SERVICE, NAMESPACE, {"limits": {"maxNumSeqs": wanted}})
        await support.wait_for_async(f"maxNumSeqs {wanted} in force", lambda n=wanted: _limits_are(n, "target"))
        in_force = time.monotonic() - start
        await support.wait_for_async(f"{wanted} running", lambda n=wanted: _running() == n)
        check(
            f"maxNumSeqs {wanted} in force on every pod after {in_force:.1f} s (5 s at most), by their own metrics",
            in_force <= 5,
        )
        say(f"    vllm:num_requests_running is {wanted} after {time.monotonic() - start:.1f} s")
    stop.set()
    streams = [stream for client in await asyncio.gather(*clients) for stream in client]
    broken = [stream.error or stream.finish_reason for stream in streams if not stream.whole]
    check(f"{len(streams)} streams, none broken {broken[:3] or ''}".rstrip(), not broken)
    pods_after = [(pod["metadata"]["name"], support.restarts(pod)) for pod in support.pods_of(SERVICE, NAMESPACE)]
    check("same pods, no restart", pods_before == pods_after)


async def _client(url: str, stop: asyncio.Event, number: int) -> list[support.Stream]:
    """One client that asks again and again, one answer after the other."""
    streams = []
    while not stop.is_set():
        streams.append(await support.chat(url, f"Count upwards from {number}.", max_tokens=24, ignore_eos=True))
    return streams


def _pods() -> list[str]:
    return [pod["metadata"]["name"] for pod in support.pods_of(SERVICE, NAMESPACE)]


def _running() -> int:
    return int(
        sum(support.metric_sum(support.pod_metrics(pod, NAMESPACE), "vllm:num_requests_running") for pod in _pods())
    )


def _limits_are(wanted: int, kind: str) -> bool:
    series = ("guidevane_limit", 'name="maxNumSeqs"', f'kind="{kind}"')
    return all(int(support.metric_sum(support.pod_metrics(pod, NAMESPACE), *series)) == wanted for pod in _pods())


async def trim_itself(url: str) -> None:
    step("retune.mode: Auto under a burst of long prompts")
    support.patch_spec(SERVICE, NAMESPACE, {"retune": {"mode": "Auto"}})
    stop = asyncio.Event()
    load = asyncio.create_task(_burst(url, stop))
    moves = await _watch_moves()
    await asyncio.sleep(AFTER_S)  # what the clients see under the last limits
    stop.set()
    gaps, end = await load, time.monotonic()
    first = moves[0]
    check(
        f"{first['knob']} moved from {first['from']} to {moves[-1]['to']}, a reason with each move",
        all(m["evidence"] for m in moves),
    )
    chunk = support.metric_sum(
        support.pod_metrics(_pods()[0], NAMESPACE), "guidevane_limit", 'name="prefillChunkSize"', 'kind="target"'
    )
    check(f"the pods obey: prefillChunkSize {chunk:.0f} by their own metrics", int(chunk) == moves[-1]["to"])
    before = _p95([gap for when, gap in gaps if when < first["seenAt"]])
    after = _p95([gap for when, gap in gaps if when > end - AFTER_S])
    check(
        f"ITL p95 that the clients saw: {before * 1000:.0f} ms before the first move, {after * 1000:.0f} ms now",
        after < before,
    )
    show("get", "events", "-n", NAMESPACE, "--field-selector", "reason=LimitsRetuned")


async def _watch_moves() -> list[support.Manifest]:
    """The operator's moves, told as they come, until ITL is inside its SLO or nothing is left to move."""
    moves: list[support.Manifest] = []
    deadline = time.monotonic() + WATCH_S
    while time.monotonic() < deadline:
        service = await asyncio.to_thread(support.get, "llm", SERVICE, NAMESPACE)
        status, target = service["status"], service["spec"]["slo"]["itlP95Milliseconds"]
        history = status["retune"].get("history", [])
        for move in reversed(history[: max(0, len(history) - len(moves))]):
            moves.append({**move, "seenAt": time.monotonic()})
            say(f"{move['knob']} {move['from']} -> {move['to']}  by rule {move['rule']}: {move['evidence']}")
        settled = status["retune"]["state"] != "Settling"
        if moves and settled and (status["slo"].get("itlP95Milliseconds") or target + 1) <= target:
            say(f"ITL p95 is inside its SLO of {target} ms; state {status['retune']['state']}")
            return moves
        if moves and status["retune"]["state"] == "Infeasible":
            say(f"nothing is left to move: {status['retune']['message']}")
            return moves
        await asyncio.sleep(1)
    if not moves:
        raise TimeoutError(f"a move by the operator: not within {WATCH_S} s")
    say(f"still above the SLO of {target} ms after {WATCH_S} s")
    return moves


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1] if len(values) > 1 else 0.0


async def _burst(url: str, stop: asyncio.Event) -> list[tuple[float, float]]:
    """Two chatting clients beside two that send long prompts; the chats' gaps between tokens as (when, seconds)."""
    gaps: list[tuple[float, float]] = []

    async def chatting(number: int) -> None:
        while not stop.is_set():
            seen = await support.chat(url, f"Tell a story about number {number}.", max_tokens=96, ignore_eos=True)
            times = seen.token_times_s
            gaps.extend((later, later - earlier) for earlier, later in pairwise(times))

    async def long_prompts(number: int) -> None:
        words = " ".join(f"item {number}-{i}" for i in range(160))
        for turn in count():
            if stop.is_set():
                return
            # No two begin the same, so that none is in the prefix cache and each has to be computed.
            await support.chat(url, f"{turn}-{number}: summarise this list: {words}", max_tokens=4)

    await asyncio.gather(*(chatting(n) for n in range(2)), *(long_prompts(n) for n in range(2)))
    return gaps


async def inside() -> None:
    acts: list[Callable[[str], Awaitable[None]]] = [answer, trim_by_hand, trim_itself]
    await serve()
    url = support.service_url(SERVICE, NAMESPACE)
    for act in acts:
        await act(url)
    step("kubectl get llm -o wide")
    show("get", "llm", "-n", NAMESPACE, "-o", "wide")


# ------------------------------------------------------------------------------------------------ outside


def outside() -> int:
    kind = os.environ.get("CLUSTER", "node")
    if reason := reason_not_to_run(kind):
        print(f"make demo can't run here: {reason}\nmake demo-local shows the runtime alone, without a cluster.")
        return 1
    keep = bool(os.environ.get("KEEP"))
    step("Cluster, images, operator, Prometheus")
    try:
        failed = cluster("up") or cluster("images") or cluster("exec", "--", sys.executable, "-m", "e2e.install")
        failed = failed or cluster("exec", "--", sys.executable, "-m", "e2e.demo", "--inside")
    finally:
        if not keep:
            step("Teardown")
            cluster("down")
    if keep:
        print(f"\n{BOLD}The cluster is up.{RESET} Use it:")
        print(f"  {sys.executable} -m e2e.cluster kubectl get llm -A -o wide")
        print(f"  {sys.executable} -m e2e.cluster kubectl edit llm {SERVICE} -n {NAMESPACE}")
        print(f"  {sys.executable} -m e2e.cluster exec -- bash      # a shell inside the node; services answer there")
        print(f"  {sys.executable} -m e2e.cluster down")
    print(f"\n{BOLD}demo {'FAILED' if failed else 'done'} in {time.monotonic() - START:.0f} s{RESET}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.demo", description=__doc__)
    parser.add_argument("--inside", action="store_true", help="run the acts against the cluster that kubectl points at")
    if not parser.parse_args().inside:
        return outside()
    try:
        asyncio.run(inside())
    except (TimeoutError, support.KubectlError, subprocess.TimeoutExpired) as error:
        print(f"{RED}demo: {error}{RESET}\n{support.describe(NAMESPACE)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
