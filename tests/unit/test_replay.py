"""The command that stands below a failed property test fails in the same way."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PROPERTY = """
from hypothesis import given, strategies as st

@given(st.lists(st.integers(0, 10**9), min_size=3))
def test_sums_are_small(numbers):
    assert sum(numbers) < 10**9, sorted(numbers)
"""


def run(command: list[str], folder: Path, **environment: str) -> str:
    paths = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTEST_ADDOPTS": "-p tests.conftest", **environment}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def failure(output: str) -> list[str]:
    return re.findall(r"^E  .*", output, re.MULTILINE)


@pytest.mark.parametrize("examples", ["", "70"])
def test_a_failure_is_replayed_by_the_command_below_it(tmp_path: Path, examples: str) -> None:
    (tmp_path / "test_it.py").write_text(PROPERTY)
    environment = {"HYPOTHESIS_EXAMPLES": examples}
    first = run(["-m", "pytest", "--hypothesis-seed=7", "--hypothesis-profile=unshrunk"], tmp_path, **environment)
    (line,) = re.findall(r"^.*python -m pytest .*$", first, re.MULTILINE)
    assert "hypothesis seed: 7" in first and line.endswith("test_it.py::test_sums_are_small --hypothesis-seed=7")
    assert line.startswith(f"HYPOTHESIS_EXAMPLES={examples} " if examples else "python ")
    command = shlex.split(line[line.index("-m pytest") :])
    again = run([*command, "--hypothesis-profile=unshrunk"], tmp_path, **environment)
    assert failure(again) == failure(first) != []
