"""The server over a real engine loop and a fake model, in this process: what the guard does to it."""

import asyncio
import logging
from pathlib import Path

import pytest

from guidevane_api.pod_files import ProtectionLines
from guidevane_runtime.core.guard import Guard, GuardConfig, Sample
from guidevane_runtime.core.guard_steps import Line
from guidevane_runtime.server.guard_watch import watch_guard
from guidevane_runtime.server.watched_file import WatchedFile
from tests.integration.server.in_process import (
    TOKEN,
    house,
    until,
)

# ------------------------------------------------------------------------------------------------------------- guard


async def test_the_guard_moves_what_is_obeyed_and_leaves_the_target() -> None:
    guard = Guard(GuardConfig({Line.ITL: 100.0}))
    async with house(guard) as opened:
        await opened.tick(guard, Line.ITL, 300.0, 11)
        view = await opened.limits()
        assert (view["target"]["prefillChunkSize"], view["effective"]["prefillChunkSize"]) == (2048, 512)
        assert (view["epoch"], view["source"]) == (0, "Startup")
        assert await opened.metric("guidevane_guard_level{") == 1
        assert await opened.metric('guidevane_guard_line_breached{engine="0",line="itl_p95_ms"') == 1
        assert (
            await opened.metric('guidevane_limit{engine="0",kind="target",model_name="m",name="prefillChunkSize"')
            == 2048
        )
        await opened.tick(guard, Line.ITL, 10.0, 75)
        view = await opened.limits()
        assert view["effective"] == view["target"]
        assert await opened.metric("guidevane_guard_level{") == 0


async def test_a_patch_while_the_guard_acts_is_the_operators_and_is_guarded() -> None:
    guard = Guard(GuardConfig({Line.ITL: 100.0}))
    async with house(guard) as opened:
        await opened.tick(guard, Line.ITL, 300.0, 11)
        patch = {"epoch": 1, "limits": {"prefillChunkSize": 1024}}
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with opened.admin.patch("/admin/limits", json=patch, headers=headers) as response:
            view = await response.json()
            assert response.status == 200
        assert (view["epoch"], view["source"]) == (1, "Spec")
        assert (view["target"]["prefillChunkSize"], view["effective"]["prefillChunkSize"]) == (1024, 256)
        assert (
            await opened.metric('guidevane_limit{engine="0",kind="target",model_name="m",name="prefillChunkSize"')
            == 1024
        )


async def test_long_prompts_are_refused_beside_others_and_let_in_alone() -> None:
    guard = Guard(GuardConfig({Line.TTFT: 100.0}))
    body = {"prompt": "a" * 65, "max_tokens": 1}
    async with house(guard) as opened:
        await opened.tick(guard, Line.TTFT, 300.0, 11)
        async with opened.serving.post("/v1/completions", json=body) as response:
            assert response.status == 200
        async with opened.running("a"):
            async with opened.serving.post("/v1/completions", json=body) as response:
                refused = await response.json()
                assert (response.status, response.headers["Retry-After"]) == (503, "30")
            assert refused["error"]["code"] == "long_context"
            async with opened.serving.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}) as response:
                assert response.status == 200
        rejections = 'guidevane_admission_rejections_total{engine="0",model_name="m",reason="long_context"'
        assert await opened.metric(rejections) == 1


async def test_offline_work_is_held_back_while_the_guard_says_so_and_not_refused() -> None:
    guard = Guard(GuardConfig({Line.TTFT: 100.0}))
    offline = {"json": {"prompt": "a", "max_tokens": 1}, "headers": {"X-Request-Class": "offline", "X-Request-Id": "o"}}
    async with house(guard) as opened:
        await opened.tick(guard, Line.TTFT, 300.0, 22)
        async with opened.running("a"):
            post = asyncio.create_task(opened.serving.post("/v1/completions", **offline))
            await until(lambda: opened.services.stats.num_waiting == 1)
            _, body = await opened.ask("/admin/requests/o")
            (one,) = body["requests"]
            assert (one["state"], one["class"], one["heldBackBy"]["limit"]) == ("waiting", "offline", "offlinePaused")
            _, view = await opened.ask("/admin/tenants")
            assert view["offlinePaused"]
            # Without a file there is one tenant, without a name.
            assert [(one["name"], one["numInFlight"], one["numKeys"]) for one in view["tenants"]] == [("", 2, 0)]
            async with opened.serving.post("/v1/completions", json=offline["json"]) as response:
                assert response.status == 200
            await opened.tick(guard, Line.TTFT, 10.0, 60)
            async with await post as response:
                assert response.status == 200


async def test_a_dry_run_is_seen_and_not_felt() -> None:
    guard = Guard(GuardConfig({Line.ITL: 100.0, Line.TTFT: 100.0}, dry_run=True))
    async with house(guard) as opened:
        await opened.tick(guard, Line.ITL, 300.0, 40)
        view = await opened.limits()
        assert view["effective"] == view["target"]
        assert opened.services.gate.long_context_pause_s is None
        assert await opened.metric("guidevane_guard_level{") == 3


async def test_the_guard_is_asked_again_and_again() -> None:
    guard = Guard(GuardConfig({Line.ITL: 100.0}))
    async with house(guard) as opened:
        watching = asyncio.create_task(watch_guard(opened.services, guard, tick_s=0.01))
        for _ in range(20):
            guard.observe(Sample(Line.ITL, opened.clock(), 300.0))
        breached = opened.services.metrics.registry.get_sample_value
        labels = {"model_name": "m", "engine": "0", "line": "itl_p95_ms"}
        await until(lambda: breached("guidevane_guard_line_breached", labels) == 1)
        assert not watching.done()
        watching.cancel()
        await asyncio.wait((watching,))


async def test_new_lines_in_the_file_reach_the_guard_and_the_engine_while_it_watches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def heard() -> list[float | None]:
        return [vars(record)["itl_s"] for record in caplog.records if record.message == "targets changed"]

    guard = Guard(GuardConfig({Line.ITL: 100.0}))
    file = tmp_path / "slo.json"
    file.write_text('{"itlP95Milliseconds": 100}')
    slo_file = WatchedFile(file, "--slo-file", ProtectionLines)
    slo_file.read()
    async with house(guard) as opened:
        watching = asyncio.create_task(watch_guard(opened.services, guard, slo_file, tick_s=0.01))
        file.write_text('{"mode": "dry-run", "ttftP95Milliseconds": 700}')
        await until(lambda: guard.config.dry_run)
        assert guard.config.lines == {Line.TTFT: 700.0}
        file.write_text('{"itlP95Milliseconds": 70}')
        await until(lambda: heard()[-1:] == [0.07])
        watching.cancel()
        await asyncio.wait((watching,))
