import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from guidevane_bench.__main__ import main


@pytest.fixture
def simulate(data: Path, trace: Path) -> list[str]:
    costs = str(data / "costs_8b_roofline.json")
    return ["simulate", "--trace", str(trace), "--limit", "50", "--costs", costs]


def test_simulation_prints_a_report(simulate: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*simulate, "--title", "Fifty"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("# Fifty\n")
    assert "| requests | 50 |" in captured.out
    assert "us a step" in captured.err


def test_same_command_writes_the_same_bytes(simulate: list[str], tmp_path: Path) -> None:
    written = []
    for name in ("one", "two"):
        path = tmp_path / name
        assert main([*simulate, "--pods", "2", "--faults", "pod_death=1,slow_pod=1", "--json", str(path)]) == 0
        written.append(path.read_bytes())
    assert written[0] == written[1]
    assert json.loads(written[0])["fleet"]["faults"]


def test_two_reports_are_compared(simulate: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("continuous.json", "static.json")]
    for path, mode in zip(paths, ("continuous", "static"), strict=True):
        assert main([*simulate, "--batching", mode, "--json", path]) == 0
    assert main(["compare", *paths]) == 0
    assert "| ttft p95, ms |" in capsys.readouterr().out


def test_fit_writes_a_cost_model_that_simulate_reads(
    simulate: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, costs = tmp_path / "steps.jsonl", tmp_path / "costs.json"
    rows = [(0, n % 7 + 1, 50 * n + 9, 0, 0.01 + 0.001 * (n % 7)) for n in range(40)]
    names = ("num_prefill_tokens", "num_decodes", "num_kv_tokens", "num_prefill_pairs", "step_s")
    steps.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    assert main(["fit", str(steps), "--out", str(costs), "--about", "made up"]) == 0
    assert main([*simulate, "--costs", str(costs)]) == 0
    assert "decode_s, us" in capsys.readouterr().out
    assert json.loads(costs.read_text())["about"] == "made up"


def test_plots_are_written_where_matplotlib_is_and_asked_for_where_it_is_not(
    simulate: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main([*simulate, "--plots", str(tmp_path / "plots")])
    if importlib.util.find_spec("matplotlib"):
        assert status == 0
        assert {path.name for path in (tmp_path / "plots").iterdir()} == {"latency.svg", "series.svg"}
    else:
        assert status == 2
        assert "guidevane[bench]" in capsys.readouterr().err


def test_tenants_file_says_who_may_have_how_much(simulate: list[str], tmp_path: Path) -> None:
    tenants, report = tmp_path / "tenants.json", tmp_path / "report.json"
    tenants.write_text(json.dumps({"tenants": [{"name": "0", "maxInFlight": 1}]}))
    assert main([*simulate, "--tenants", str(tenants), "--time-scale", "0.01", "--json", str(report)]) == 0
    by_tenant = json.loads(report.read_text())["tenants"]
    assert by_tenant["0"]["ends"] == {"finished": 1, "rejected/tenant_concurrency": 27}
    assert all(set(one["ends"]) == {"finished"} for name, one in by_tenant.items() if name != "0")


def test_tenants_file_that_is_not_there_is_named(simulate: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*simulate, "--tenants", "nowhere.json"]) != 0
    assert "--tenants nowhere.json" in capsys.readouterr().err


def test_controller_is_found_by_its_name(simulate: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_controller.py").write_text("class Calm:\n    def decide(self, sample):\n        return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main([*simulate, "--controller", "my_controller:Calm"]) == 0


def test_a_target_keeps_gaps_short_while_prompts_come_in(data: Path, tmp_path: Path) -> None:
    costs, path = str(data / "costs_8b_roofline.json"), tmp_path / "report.json"
    load = ["--arrivals", "poisson:rate=4", "--lengths", "fixed:prompt=1500,output=100", "--duration", "40"]
    itl_p99_ms = []
    for target in ([], ["--itl-target-ms", "30"]):
        assert main(["simulate", "--costs", costs, *load, *target, "--json", str(path)]) == 0
        itl_p99_ms.append(json.loads(path.read_text())["all"]["itl"]["p99_ms"])
    assert itl_p99_ms[1] <= 30 < itl_p99_ms[0]


@pytest.mark.parametrize(("share", "is_bounded"), [("0.5", True), ("0", False)])
def test_a_reserve_keeps_short_prompts_from_waiting_for_long_ones(
    share: str, is_bounded: bool, data: Path, tmp_path: Path
) -> None:
    costs, path = str(data / "costs_8b_roofline.json"), tmp_path / "report.json"
    load = ["--trace", str(data / "long_among_short.csv"), "--limit", "40", "--num-blocks", "30000"]
    limits = ["--limits", '{"maxModelLen": 131072, "prefillTokenBudget": 512}']
    assert main(["simulate", "--costs", costs, *load, *limits, "--short-reserve", share, "--json", str(path)]) == 0
    longest_ms = json.loads(path.read_text())["fairness"]["longest_queue_wait_ms"]
    assert (longest_ms < 100) == is_bounded


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--controller", "no_such_module:Calm"], "no_such_module"),
        (["--limits", '{"speed": 1}'], "speed"),
        (["--itl-target-ms", "0"], "--itl-target-ms"),
        (["--short-reserve", "1.5"], "--short-reserve"),
        (["--limits", '{"prefillChunkSize": 9000}'], "prefillChunkSize"),
        (["--pods", "0"], "--pods"),
        (["--num-blocks", "0"], "--num-blocks"),
        (["--limit", "0"], "--limit"),
        (["--time-scale", "0"], "--time-scale"),
        (["--faults", "fire=1"], "fire"),
        (["--limits-script", "gone.jsonl"], "gone.jsonl"),
    ],
)
def test_option_that_makes_no_sense_ends_with_its_name(
    simulate: list[str], extra: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*simulate, *extra]) == 2
    assert named in capsys.readouterr().err


def test_simulation_of_the_documentation_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = Path(__file__).parents[3]
    monkeypatch.chdir(repo)
    blocks = (repo / "docs" / "simulator.md").read_text().split("```")[1::2]
    (command,) = (block for block in blocks if block.strip().startswith("guidevane-bench simulate"))
    assert main(shlex.split(command.replace("\\\n", " "))[1:]) == 0
    assert "## Tenants" in capsys.readouterr().out


def test_module_starts_without_torch() -> None:
    code = "import guidevane_bench.__main__, sys; print(sorted({'torch', 'asyncio', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
