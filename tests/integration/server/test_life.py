"""Start, death of the engine, and the end."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

FLAGS = ("--served-model-name", "tiny", "--dtype", "float32", "--kv-cache-memory", "4Mi")
LONG = {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}


async def ready(client: Any) -> bool:
    status, _ = await client.get("/readyz")
    return bool(status == 200)


async def wait_until(client: Any, *, is_ready: bool) -> None:
    deadline_s = time.monotonic() + 120
    while await ready(client) is not is_ready:
        assert time.monotonic() < deadline_s, f"readiness is not {is_ready}"
        await asyncio.sleep(0.02)


async def stream(client: Any, body: dict[str, Any], begun: asyncio.Event) -> list[Any]:
    """Events of a stream; `begun` is set with the first."""
    events = []
    async with client.session.post(f"{client.runtime.url}/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: "):
                begun.set()
                data = line.removeprefix(b"data: ").strip()
                events.append(data.decode() if data == b"[DONE]" else json.loads(data))
    return events


async def test_a_live_server_is_not_ready_before_its_engine(start_runtime: Any, tiny_model: Path, connect: Any) -> None:
    with start_runtime(tiny_model, *FLAGS) as started:
        started.wait_for_ports()
        async with connect(started) as client:
            assert (await client.get("/livez"))[0] == 200
            status, body, headers = await client.post("/v1/completions", {"prompt": "a"})
            assert (status, body["error"]["code"]) == (503, "not_ready")
            assert int(headers["Retry-After"]) >= 1
            status, body = await client.admin("PATCH", {"epoch": 1, "limits": {"maxNumSeqs": 5}})
            assert (status, body["error"]["code"]) == (503, "not_ready")
            await wait_until(client, is_ready=True)
            assert (await client.get("/health"))[0] == (await client.get("/ping"))[0] == 200


async def test_sigterm_lets_requests_finish_refuses_new_ones_and_exits_0(
    start_runtime: Any, tiny_model: Path, connect: Any
) -> None:
    with start_runtime(tiny_model, *FLAGS, "--drain-seconds", "60") as started:
        started.wait_for_ports()
        async with connect(started) as client:
            await wait_until(client, is_ready=True)
            begun = asyncio.Event()
            in_flight = asyncio.create_task(stream(client, LONG, begun))
            await begun.wait()
            with started.engine_held():
                started.process.send_signal(signal.SIGTERM)
                await wait_until(client, is_ready=False)
                assert (await client.get("/livez"))[0] == 200
                status, body, headers = await client.post("/v1/completions", {"prompt": "a"})
                assert (status, body["error"]["code"], "Retry-After" in headers) == (503, "draining", True)
            events = await in_flight
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
        assert await asyncio.to_thread(started.wait_for_end) == 0


@pytest.mark.parametrize(("drain_s", "num_signals"), [(0, 1), (600, 2)])
async def test_what_does_not_finish_in_time_or_before_a_second_signal_gets_an_error_in_its_stream(
    start_runtime: Any, tiny_model: Path, connect: Any, drain_s: int, num_signals: int
) -> None:
    with start_runtime(tiny_model, *FLAGS, "--drain-seconds", str(drain_s)) as started:
        started.wait_for_ports()
        async with connect(started) as client:
            await wait_until(client, is_ready=True)
            begun = asyncio.Event()
            in_flight = asyncio.create_task(stream(client, {**LONG, "max_tokens": 8000}, begun))
            await begun.wait()
            started.process.send_signal(signal.SIGTERM)
            if num_signals == 2:
                await wait_until(client, is_ready=False)
                started.process.send_signal(signal.SIGTERM)
            events = await in_flight
        assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "shutdown"
        assert await asyncio.to_thread(started.wait_for_end) == 0


def test_sigterm_while_the_model_is_loaded_ends_with_status_0(start_runtime: Any, tiny_model: Path) -> None:
    with start_runtime(tiny_model, *FLAGS) as started:
        started.wait_for_ports()
        started.process.send_signal(signal.SIGTERM)
        assert started.wait_for_end() == 0


async def test_a_killed_engine_fails_its_requests_and_a_new_one_serves(
    start_runtime: Any, tiny_model: Path, connect: Any
) -> None:
    with start_runtime(tiny_model, *FLAGS) as started:
        started.wait_for_ports()
        async with connect(started) as client:
            await wait_until(client, is_ready=True)
            await client.admin("PATCH", {"epoch": 3, "limits": {"maxNumSeqs": 5}})
            begun = asyncio.Event()
            in_flight = asyncio.create_task(stream(client, LONG, begun))
            await begun.wait()
            os.kill(started.engine_pid, signal.SIGKILL)
            events = await in_flight
            assert events[-1] == "[DONE]"
            assert events[-2]["error"]["code"] == "engine_error" and events[-2]["error"]["request_id"]
            await wait_until(client, is_ready=False)
            assert (await client.get("/livez"))[0] == 200
            await wait_until(client, is_ready=True)
            status, _, _ = await client.post("/v1/completions", {"prompt": "a"})
            assert status == 200
            metrics = await client.metrics()
            assert metrics["guidevane_engine_restarts_total"] == 1
            assert metrics["guidevane_kv_blocks{state=used}"] == 0
            assert metrics["guidevane_limit{kind=effective,name=maxNumSeqs}"] == 5


async def test_a_hung_engine_turns_readiness_off(start_runtime: Any, tiny_model: Path, connect: Any) -> None:
    with start_runtime(tiny_model, *FLAGS, "--hang-seconds", "2") as started:
        started.wait_for_ports()
        async with connect(started) as client:
            await wait_until(client, is_ready=True)
            with started.engine_held():
                await wait_until(client, is_ready=False)
                status, body, _ = await client.post("/v1/completions", {"prompt": "a"})
                assert (status, body["error"]["code"]) == (503, "not_ready")
            await wait_until(client, is_ready=True)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/no/such/model", "/no/such/model does not exist"),
        ("hf://org/name", "has the scheme hf://"),
    ],
)
def test_a_model_that_is_not_there_ends_with_status_3_and_one_sentence(
    start_runtime: Any, model: str, words: str
) -> None:
    with start_runtime(model) as started:
        assert started.wait_for_end() == 3
        reason = Path(f"{started.log}.reason").read_text()
        assert words in reason and "\n" not in reason


def test_a_damaged_model_ends_with_status_3(start_runtime: Any, tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with start_runtime(tmp_path) as started:
        assert started.wait_for_end() == 3
        assert Path(f"{started.log}.reason").read_text()


def test_limits_above_the_envelope_stop_the_start(start_runtime: Any, tiny_model: Path) -> None:
    with start_runtime(tiny_model, "--envelope-max-num-seqs", "4", limits={"maxNumSeqs": 5}) as started:
        assert started.wait_for_end() == 3
        assert "maxNumSeqs is 5, above envelope.maxNumSeqs 4" in Path(f"{started.log}.reason").read_text()
