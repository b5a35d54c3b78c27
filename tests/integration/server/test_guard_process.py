"""The guard in the real process, from its flags to its metrics."""

import asyncio
import time
from pathlib import Path
from typing import Any

FLAGS = ("--served-model-name", "tiny", "--dtype", "float32", "--kv-cache-memory", "4Mi")


async def test_a_line_given_as_a_flag_is_guarded(start_runtime: Any, tiny_model: Path, connect: Any) -> None:
    limits = {"maxModelLen": 2048, "longContextThresholdTokens": 64}
    lines = ("--slo-ttft-p95-ms", "1", "--slo-itl-p95-ms", "60000")
    with start_runtime(tiny_model, *FLAGS, *lines, limits=limits) as started:
        started.wait_for_ports()
        started.wait_for_engine()
        async with connect(started) as client:
            assert (await client.metrics())["guidevane_guard_level"] == 0
            await breach_until_it_gives_way(client)
            metrics = await client.metrics()
            assert metrics["guidevane_guard_line_breached{line=ttft_p95_ms}"] == 1
            moved = next(entry for entry in started.entries if entry["message"] == "guard moved")
            assert moved["reason"].endswith(", line 1: refusing long prompts")
            assert next(entry for entry in started.entries if entry["message"] == "targets changed")["itl_s"] == 60.0


async def test_lines_in_a_file_change_under_a_running_server(
    start_runtime: Any, tiny_model: Path, connect: Any, tmp_path: Path
) -> None:
    slo = tmp_path / "slo.json"
    slo.write_text('{"mode": "off", "ttftP95Milliseconds": 1}')
    limits = {"maxModelLen": 2048, "longContextThresholdTokens": 64}
    with start_runtime(tiny_model, *FLAGS, "--slo-file", str(slo), limits=limits) as started:
        started.wait_for_ports()
        started.wait_for_engine()
        async with connect(started) as client:
            slo.write_text('{"mode": "on", "ttftP95Milliseconds": 1}')
            await breach_until_it_gives_way(client)
            slo.write_text('{"mode": "off"}')
            await client.wait_for_metric("guidevane_guard_level", 0)
    modes = [entry["mode"] for entry in started.entries if entry["message"] == "protection lines changed"]
    assert modes == ["on", "off"]


async def breach_until_it_gives_way(client: Any) -> None:
    """No first token is out within 1 ms of its arrival over HTTP, several at once least of all."""
    deadline_s = time.monotonic() + 90.0
    while (await client.metrics())["guidevane_guard_level"] < 1:
        assert time.monotonic() < deadline_s, "the guard did not give way within 90 s"
        posts = (client.post("/v1/completions", {"prompt": "a", "max_tokens": 1}) for _ in range(8))
        assert {status for status, _, _ in await asyncio.gather(*posts)} == {200}
        await asyncio.sleep(0.2)
