"""Starts what needs a process of its own: the suites of triton (see conftest.py) and settings of the math library."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run_suite(path: str, env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", str(HERE / path)]
    base = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Passive: on a busy machine threads that spin wait for each other for most of the time.
    suite_env = {"GUIDEVANE_KERNEL_TEST_SUITE": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        command,
        env=base | suite_env | env,
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, f"{path} ended with status {done.returncode}:\n{done.stdout}"


@needs_triton
@pytest.mark.interpreter
@pytest.mark.timeout(900)
def test_triton_kernels_match_fp64_on_the_interpreter():
    run_suite("interpreter", {"TRITON_INTERPRET": "1"})


@needs_triton
@pytest.mark.compile
@pytest.mark.timeout(900)
def test_triton_kernels_compile_for_gpus_that_are_not_here(tmp_path):
    run_suite("compile", {"TRITON_CACHE_DIR": str(tmp_path)})


def test_sequence_alone_gives_the_same_bits_on_any_number_of_threads_under_strict_mkl():
    run_suite("test_batch_invariance.py", {"MKL_CBWR": "AUTO,STRICT"})
