"""The real thing: `python -m guidevane_runtime` with its engine process, on a tiny model with random weights."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy
import pytest
from safetensors.numpy import save_file

from tests.byte_tokenizer import byte_tokenizer
from tests.integration.server.tenants import LIMITS as TENANT_LIMITS
from tests.integration.server.tenants import TENANTS, TenantsFile

TOKEN = "a-token-for-tests"
WAIT_S = 120.0
"""Longest wait for anything that has to come: how soon is no claim of these tests, and machines are busy."""
VOCAB_SIZE = 258
CONTEXT = 16384

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and loop.index0 > 0 %}"
    "{{ raise_exception('a system message must come first') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{{ tone }}{% endif %}"
)


@dataclass
class RuntimeProcess:
    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""
    admin_url: str = ""

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Log lines of the server; the engine writes lines of its own between them. What has no end yet is no line."""
        *lines, _ = self.log.read_text(errors="replace").split("\n")
        return [json.loads(line) for line in lines if line.startswith("{")]

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(
            int(pid) for pid in children if b"guidevane_runtime.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )

    @contextmanager
    def engine_held(self) -> Iterator[None]:
        """The engine stands still: no request of it ends, and it reads no mail."""
        engine = self.engine_pid
        os.kill(engine, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(engine, signal.SIGCONT)

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """The first truthy value of the condition."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            if found := condition():
                return found
            time.sleep(0.05)
        raise TimeoutError(f"not within {WAIT_S} s; the log says:\n{self.log.read_text(errors='replace')[-4000:]}")

    def wait_for_end(self) -> int:
        """The exit status."""
        return self.process.wait(WAIT_S)

    def wait_for_ports(self) -> None:
        for name, attribute in (("serving", "url"), ("admin", "admin_url")):
            port = self.wait_for(lambda name=name: self._port(name))
            setattr(self, attribute, f"http://127.0.0.1:{port}")

    def wait_for_engine(self) -> None:
        self.wait_for(lambda: any(entry["message"] == "engine ready" for entry in self.entries))

    def _port(self, name: str) -> int | None:
        if self.process.poll() is not None:
            raise RuntimeError(f"the runtime ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
        found = [entry["port"] for entry in self.entries if entry.get("port_name") == name]
        return found[0] if found else None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama with two layers of 32, one token per byte, and a chat template that can refuse."""
    folder = tmp_path_factory.mktemp("tiny-model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE})
    )
    # <beyond> is one more than the model has rows for, as fine-tuned models have it.
    byte_tokenizer("<s>", "</s>", "<beyond>").save(str(folder / "tokenizer.json"))
    save_file(random_weights(config), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def random_weights(config: dict[str, Any]) -> dict[str, numpy.ndarray[Any, Any]]:
    random = numpy.random.default_rng(7)
    hidden, inner, kv = config["hidden_size"], config["intermediate_size"], 2 * config["head_dim"]

    def matrix(rows: int, columns: int) -> numpy.ndarray[Any, Any]:
        return random.normal(0, 0.1, (rows, columns)).astype(numpy.float32)

    weights = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, hidden), "model.norm.weight": numpy.ones(hidden, "f4")}
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = numpy.ones(hidden, "f4")
    return weights


StartRuntime = Callable[..., Any]


@pytest.fixture(scope="session")
def start_runtime(tmp_path_factory: pytest.TempPathFactory) -> StartRuntime:
    """A context manager: the runtime with these flags, ended at the exit."""
    folder = tmp_path_factory.mktemp("runtime")
    token_file = folder / "token"
    token_file.write_text(TOKEN)

    @contextmanager
    def start(model: Path | str, *flags: str, limits: dict[str, int] | None = None) -> Iterator[RuntimeProcess]:
        log = folder / f"log-{time.monotonic_ns()}"
        limits_file = folder / f"limits-{time.monotonic_ns()}.json"
        limits_file.write_text(json.dumps(limits or {}))
        command = [sys.executable, "-m", "guidevane_runtime", "--model", str(model), "--host", "127.0.0.1"]
        command += ["--port", "0", "--admin-port", "0", "--admin-token-file", str(token_file), "--log-format", "json"]
        command += ["--limits-file", str(limits_file), "--num-threads", "1", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GUIDEVANE_TERMINATION_LOG": f"{log}.reason"}
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        runtime = RuntimeProcess(process, log)
        try:
            yield runtime
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    return start


TINY_FLAGS = ("--served-model-name", "tiny", "--dtype", "float32", "--kv-cache-memory", "4Mi")


@pytest.fixture(scope="session")
def runtime(start_runtime: StartRuntime, tiny_model: Path) -> Iterator[RuntimeProcess]:
    """One runtime on the tiny model that tests share; each leaves it idle, with its start-up limits."""
    limits = {
        "maxModelLen": 2048,
        "maxNumSeqs": 8,
        "maxQueuedRequests": 64,
        "maxOutputTokens": 1500,
        "waitingTimeoutMilliseconds": 60000,
    }
    with start_runtime(tiny_model, *TINY_FLAGS, limits=limits) as started:
        started.wait_for_ports()
        started.wait_for_engine()
        yield started


@pytest.fixture(scope="session")
def tenants_file(tmp_path_factory: pytest.TempPathFactory) -> TenantsFile:
    made = TenantsFile(tmp_path_factory.mktemp("tenants"))
    made.write(TENANTS)
    return made


@pytest.fixture(scope="session")
def tenants_runtime(
    start_runtime: StartRuntime, tiny_model: Path, tenants_file: TenantsFile
) -> Iterator[RuntimeProcess]:
    """Two at once; who waits, waits long. Tests share it, and leave it idle, with the file as it was."""
    flags = (*TINY_FLAGS, "--tenants-file", str(tenants_file.path))
    with start_runtime(tiny_model, *flags, limits=TENANT_LIMITS) as started:
        started.wait_for_ports()
        started.wait_for_engine()
        yield started


class Client:
    """What tests do to a runtime, over HTTP."""

    def __init__(self, session: aiohttp.ClientSession, runtime: RuntimeProcess) -> None:
        self.session = session
        self.runtime = runtime

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any, Any]:
        """Status, JSON, headers."""
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self.session.post(self.runtime.url + path, data=data, **more) as response:
            return response.status, await response.json(content_type=None), response.headers

    async def get(self, path: str) -> tuple[int, bytes]:
        async with self.session.get(self.runtime.url + path) as response:
            return response.status, await response.read()

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Every event of a stream; the last one is the string [DONE]."""
        async with self.session.post(self.runtime.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            lines = (await response.text()).split("\n\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(line) if line != "[DONE]" else line for line in data]

    async def admin(self, method: str, body: Any = None, token: str = TOKEN) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"}
        url = f"{self.runtime.admin_url}/admin/limits"
        async with self.session.request(method, url, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def metrics(self) -> dict[str, float]:
        """Series to value; labels that are the same everywhere are left out."""
        _, page = await self.get("/metrics")
        lines = [line for line in page.decode().splitlines() if line and not line.startswith("#")]
        pairs = (line.rsplit(" ", 1) for line in lines)
        return {_short(series): float(value) for series, value in pairs}

    async def wait_for_metric(self, name: str, value: float) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while (found := (await self.metrics())[name]) != value:
            assert time.monotonic() < deadline_s, f"{name} is {found}, not {value}, after {WAIT_S} s"
            await asyncio.sleep(0.02)

    async def wait_until_idle(self) -> None:
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "guidevane_kv_blocks{state=used}"):
            await self.wait_for_metric(name, 0)


def _short(series: str) -> str:
    name, _, labels = series.rstrip("}").partition("{")
    kept = [label for label in labels.split(",") if label and not label.startswith(("engine=", "model_name="))]
    return f"{name}{{{','.join(kept)}}}".replace('"', "").replace("{}", "")


@pytest.fixture
async def client(runtime: RuntimeProcess) -> AsyncIterator[Client]:
    async with connected(runtime) as opened:
        yield opened


class connected:  # noqa: N801 - reads like the function that it is used as
    """An HTTP session to a runtime."""

    def __init__(self, runtime: RuntimeProcess) -> None:
        self._runtime = runtime

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return Client(self._session, self._runtime)

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()


@pytest.fixture(scope="session")
def connect() -> Callable[[RuntimeProcess], connected]:
    return connected
