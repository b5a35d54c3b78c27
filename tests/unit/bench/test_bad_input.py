"""What can't be used ends with exit status 2 and one sentence that names it, before anything is simulated."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from guidevane_bench.__main__ import main
from guidevane_bench.cli.progress import CLEAR_LINE, shown
from guidevane_bench.workload.request import LoadRequest

GENERATED = ["--arrivals", "poisson:rate=5", "--lengths", "fixed:prompt=9,output=2"]
HEAD = "prompt_tokens,output_tokens"


@pytest.fixture
def costs(data: Path) -> list[str]:
    return ["--costs", str(data / "costs_8b_roofline.json")]


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What it says on its way out: one line, and nothing on stdout."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("guidevane-bench: ")
    return line


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "there is no load; give --trace FILE"),
        (["--arrivals", "poisson:rate=5"], "--lengths KIND"),
        (["--lengths", "fixed:prompt=9,output=2"], "--arrivals KIND"),
        (["--arrivals", "poisson", "--lengths", "fixed:prompt=9,output=2"], "--arrivals 'poisson' lacks rate"),
        (["--arrivals", "poisson:rate=-1", "--lengths", "fixed:prompt=9,output=2"], "--arrivals has 'rate=-1'"),
        (["--arrivals", "poisson:rate=inf", "--lengths", "fixed:prompt=9,output=2"], "--arrivals has 'rate=inf'"),
        (["--arrivals", "poisson:rate=1e-9", "--lengths", "fixed:prompt=9,output=2"], "gives no request"),
        (["--arrivals", "gamma:rate=5,cv=1e-200", "--lengths", "fixed:prompt=9,output=2"], "'cv=1e-200'"),
        (["--arrivals", "gamma:rate=5,cv=1e200", "--lengths", "fixed:prompt=9,output=2"], "'cv=1e200'"),
        (["--arrivals", "poisson:rate=5", "--lengths", "lognormal:prompt=9,output=2,cv=1e200"], "'cv=1e200'"),
        (["--arrivals", "poisson:rate=5", "--lengths", "lognormal:prompt=1e300,output=2"], "'prompt=1e300'"),
        (["--arrivals", "curve:gone.csv", "--lengths", "fixed:prompt=9,output=2"], "curve:FILE=PEAK_RATE"),
        (["--arrivals", "curve:gone.csv=5", "--lengths", "fixed:prompt=9,output=2"], "gone.csv can't be read"),
        ([*GENERATED, "--limit", "5"], "--trace FILE, or leave out --limit"),
        ([*GENERATED, "--duration", "nan"], "--duration: 'nan'"),
        ([*GENERATED, "--duration", "1e12"], "--duration is"),
        ([*GENERATED, "--duration", "0"], "--duration: '0'"),
        ([*GENERATED, "--seed", "x"], "--seed: invalid int value: 'x'"),
        ([*GENERATED, "--offline-share", "1.5"], "--offline-share: '1.5'"),
        ([*GENERATED, "--offline-tenants", "a"], "--offline-tenants has 'a'"),
        ([*GENERATED, "--offline-tenants", "a", "--offline-share", "0.1"], "not allowed with"),
        ([*GENERATED, "--pods", "0"], "--pods: '0' is not a whole number from 1 to"),
        ([*GENERATED, "--pods", "1.5"], "--pods: '1.5'"),
        ([*GENERATED, "--pods", "-1"], "--pods: '-1'"),
        ([*GENERATED, "--pods", "100000", "--num-blocks", "100000"], "--pods 100000"),
        ([*GENERATED, "--num-blocks", "99999999999"], "--num-blocks"),
        ([*GENERATED, "--scrape-interval", "0"], "--scrape-interval"),
        ([*GENERATED, "--scrape-interval", "nan"], "--scrape-interval"),
        ([*GENERATED, "--scrape-interval", "1e-12"], "--scrape-interval"),
        ([*GENERATED, "--itl-target-ms", "nan"], "--itl-target-ms"),
        ([*GENERATED, "--ttft-slo-ms", "nan"], "--ttft-slo-ms"),
        ([*GENERATED, "--tpot-slo-ms", "-5"], "--tpot-slo-ms"),
        ([*GENERATED, "--slo-itl-p95-ms", "nan"], "--slo-itl-p95-ms"),
        ([*GENERATED, "--guard", "dry-run"], "--guard dry-run has no line"),
        ([*GENERATED, "--guard", "maybe"], "--guard"),
        ([*GENERATED, "--limits", ""], "--limits"),
        ([*GENERATED, "--limits", "[]"], "--limits"),
        ([*GENERATED, "--limits", '{"maxNumSeqs": 0}'], "maxNumSeqs"),
        ([*GENERATED, "--limits", '{"maxNumSeqs": 1e99}'], "maxNumSeqs"),
        ([*GENERATED, "--faults", "pod_death"], "--faults has 'pod_death'"),
        ([*GENERATED, "--faults", "pod_death=-1"], "--faults has 'pod_death=-1'"),
        ([*GENERATED, "--faults", "pod_death=1,pod_death=2"], "--faults has 'pod_death=2'"),
        ([*GENERATED, "--faults", "pod_death=99999999999"], "--faults has"),
        ([*GENERATED, "--controller", "json:loads"], "--controller 'json:loads'"),
        ([*GENERATED, "--controller", "os:getcwd"], "--controller 'os:getcwd'"),
        ([*GENERATED, "--controller", ".x:y"], "--controller '.x:y'"),
        ([*GENERATED, "--controller", "memory"], "memory-aware"),
        ([*GENERATED, "--lim", "5"], "--lim"),
        ([*GENERATED, "--speed", "5"], "--speed"),
        ([*GENERATED, "--json", "no/such/folder/report.json"], "--json no/such/folder/report.json"),
        ([*GENERATED, "--markdown", "."], "--markdown . is a folder"),
        ([*GENERATED, "--json", "same", "--markdown", "same"], "--json and --markdown are both same"),
    ],
)
def test_option_that_can_not_be_used_is_named(
    options: list[str], named: str, costs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in complaint(["simulate", *costs, *options], capsys)


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("empty.csv", "", "holds no request"),
        ("header.csv", f"{HEAD}\n", "holds no request"),
        ("columns.csv", "a,b\n1,2\n", "request 1: it has none of prompt_tokens"),
        ("short.csv", f"{HEAD}\n9,2\n9\n", "request 2: it has none of output_tokens"),
        ("long.csv", f"{HEAD}\n9,2\n9,2,7,7\n", "request 2: it has more cells"),
        ("words.csv", f"{HEAD}\n9,2\nmany,2\n", "request 2: prompt_tokens is 'many'"),
        ("zero.csv", f"{HEAD}\n9,0\n", "request 1: output_tokens is '0'"),
        ("nan.csv", f"arrival_s,{HEAD}\nnan,9,2\n", "request 1: arrival_s is 'nan'"),
        ("inf.csv", f"arrival_s,{HEAD}\ninf,9,2\n", "request 1: arrival_s is 'inf'"),
        ("past.csv", f"arrival_s,{HEAD}\n-1,9,2\n", "request 1: arrival_s is '-1'"),
        ("none.csv", f"arrival_s,{HEAD}\n,9,2\n", "request 1: arrival_s is empty"),
        ("ages.csv", f"arrival_s,{HEAD}\n0,9,2\n1e12,9,2\n", "lasts more than"),
        ("date.csv", f"TIMESTAMP,{HEAD}\nyesterday,9,2\n", "request 1: Invalid isoformat string"),
        ("nul.csv", f"{HEAD}\n9,\0\n", "nul.csv"),
        ("broken.jsonl", '{"prompt_tokens": 9, "output_tokens": 2}\n{\n', "line 2 is no JSON"),
        ("list.jsonl", "[9, 2]\n", "request 1: no object"),
        ("ids.jsonl", '{"prompt_tokens": 9, "output_tokens": 2, "hash_ids": ["a"]}\n', "request 1: hash_ids is"),
        ("infinite.jsonl", '{"prompt_tokens": Infinity, "output_tokens": 2}\n', "request 1: prompt_tokens is inf"),
    ],
)
def test_trace_that_can_not_be_read_is_named_with_its_request(
    name: str, text: str, named: str, costs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    line = complaint(["simulate", *costs, "--trace", str(tmp_path / name)], capsys)
    assert name in line and named in line


def test_trace_that_is_no_text_or_a_folder_is_named(
    costs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)))
    for path in (tmp_path / "binary.csv", tmp_path):
        assert str(path) in complaint(["simulate", *costs, "--trace", str(path)], capsys)


def test_byte_order_mark_of_a_spreadsheet_hides_no_column(costs: list[str], tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.csv", tmp_path / "report.json"
    trace.write_text(f"\N{ZERO WIDTH NO-BREAK SPACE}arrival_s, {HEAD}\n0,9,2\n60,9,2\n")
    assert main(["simulate", *costs, "--trace", str(trace), "--json", str(report)]) == 0
    assert json.loads(report.read_text())["duration_s"] > 60


@pytest.mark.parametrize(
    ("option", "text", "named"),
    [
        ("--limits-script", "{", "line 1"),
        ("--limits-script", "[]", "line 1"),
        ("--limits-script", '\n{"at_s": 5}', "line 2"),
        ("--limits-script", '{"at_s": -5, "limits": {}}', "at_s is -5"),
        ("--limits-script", '{"at_s": NaN, "limits": {}}', "at_s is nan"),
        ("--limits-script", '{"at_s": 5, "limits": {}, "until_s": 9}', "until_s"),
        ("--limits-script", '{"at_s": 5, "limits": {"speed": 1}}', "speed"),
        ("--limits-script", '{"at_s": 5, "limits": {}, "mode": "hard"}', "hard"),
        ("--limits-script", '{"at_s": 5, "limits": {"prefillChunkSize": 9000}}', "prefillChunkSize"),
        ("--tenants", "{", "JSON"),
        ("--tenants", '{"tenants": [{"name": "a", "weight": 0}]}', "weight"),
        ("--tenants", '{"tenant": []}', "tenant"),
        ("--costs", "{", "no cost model"),
        ("--costs", "[]", "no cost model"),
        ("--costs", "{}", "lacks 'coefficients_s'"),
        ("--costs", '{"coefficients_s": [1, 2]}', "no cost model"),
        ("--costs", '{"coefficients_s": {"step_s": NaN}}', "step_s above it"),
        ("--costs", '{"coefficients_s": {"step_s": Infinity}}', "step_s above it"),
        ("--costs", '{"coefficients_s": {"step_s": 0}}', "step_s above it"),
        ("--costs", '{"coefficients_s": {"step_s": 1, "speed": 1}}', "speed"),
    ],
)
def test_file_of_an_option_that_says_something_else_is_named(
    option: str, text: str, named: str, costs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "given"
    path.write_text(text)
    line = complaint(["simulate", *GENERATED, *costs, option, str(path)], capsys)
    assert str(path) in line and named in line


@pytest.mark.parametrize("text", ["t_s\n1\n", "t_s,relative_rate\n1\n", "t_s,relative_rate\nnan,1\n", "\0"])
def test_rate_curve_that_is_none_is_named(
    text: str, costs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "curve.csv").write_text(text)
    load = ["--arrivals", f"curve:{tmp_path}/curve.csv=5", "--lengths", "fixed:prompt=9,output=2"]
    assert "curve.csv" in complaint(["simulate", *costs, *load], capsys)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "COMMAND"),
        (["simulat"], "'simulat'"),
        (["simulate"], "--costs"),
        (["capacity", "--arrivals", "poisson:rate=1"], "--arrivals poisson:rate=1"),
        (["capacity", "--lengths", "fixed:prompt=9,output=2", "--setups", "fast-9"], "--setups has 'fast-9'"),
        (["capacity", "--lengths", "fixed:prompt=9,output=2", "--setups", "static-99999999999"], "--setups has"),
        (["capacity", "--lengths", "fixed:prompt=9,output=2", "--setups", "guidevane+magic"], "--setups has"),
        (["capacity", "--requests", "0"], "--requests"),
        (["capacity", "--start-rate", "1e9", "--lengths", "fixed:prompt=9,output=2"], "--start-rate"),
        (["record", "--model", "nowhere", *GENERATED], "--model nowhere"),
        (["record", "--model", "nowhere", "--num-threads", "0", *GENERATED], "--num-threads"),
        (["record", "--model", "nowhere", "--dtype", "int3", *GENERATED], "--dtype"),
        (["record", "--model", "nowhere", "--steps", "no/such/steps", *GENERATED], "--steps no/such/steps"),
        (["fit", "gone.jsonl", "--out", "costs.json"], "gone.jsonl"),
        (["fit", "gone.jsonl", "--out", "no/such/costs.json"], "--out no/such/costs.json"),
        (["compare", "gone.json", "gone.json"], "gone.json"),
    ],
)
def test_other_commands_say_what_is_wrong_as_well(
    arguments: list[str], named: str, costs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[:1] == ["capacity"]:
        arguments = [*arguments, *costs]
    assert named in complaint(arguments, capsys)


@pytest.mark.parametrize("text", ["5", "[]", "{}", '{"all": {}, "kind": "simulated", "title": "x"}', "{"])
def test_report_that_is_none_is_not_compared(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text(text)
    assert "report.json" in complaint(["compare", f"{tmp_path}/report.json", f"{tmp_path}/report.json"], capsys)


@pytest.mark.parametrize(("name", "value"), [("step_s", "1e999"), ("num_decodes", "-1"), ("num_kv_tokens", "1e999")])
def test_step_that_no_engine_made_is_not_fitted(
    name: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step: dict[str, Any] = dict.fromkeys(("num_prefill_tokens", "num_decodes", "num_kv_tokens", "num_prefill_pairs"), 1)
    line = json.dumps({**step, "step_s": 0.1, name: 7777}).replace("7777", value)
    (tmp_path / "steps.jsonl").write_text(f"{line}\n" * 30)
    assert "steps.jsonl" in complaint(["fit", f"{tmp_path}/steps.jsonl", "--out", f"{tmp_path}/costs"], capsys)


def test_report_that_can_not_be_written_is_named_before_the_run(
    costs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    line = complaint(["simulate", *costs, *GENERATED, "--plots", f"{tmp_path}/file/plots"], capsys)
    assert "--plots" in line and "is a file" in line


def test_disk_that_is_full_is_told_without_a_traceback(costs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *costs, *GENERATED, "--json", "/dev/full"]) == 2
    assert "--json /dev/full can't be written" in capsys.readouterr().err


def test_reader_that_has_seen_enough_is_no_error(costs: list[str]) -> None:
    command = [sys.executable, "-m", "guidevane_bench", "simulate", *costs, *GENERATED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait() == 0
    assert "Traceback" not in said and "BrokenPipe" not in said


# -------------------------------------------------------------------------------------------------------- progress


class Terminal:
    """Remembers what it shows."""

    def __init__(self, is_terminal: bool) -> None:
        self.shown = ""
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> None:
        self.shown += text

    def flush(self) -> None:
        """Nothing is kept back."""


def watched(is_terminal: bool) -> tuple[list[LoadRequest], str]:
    """What comes out, and what is shown, of a load that takes a second for each request."""
    requests = [LoadRequest(number, 10.0 * number, 1, 1) for number in range(5)]
    terminal, seconds = Terminal(is_terminal), iter(range(100))
    with shown(requests, terminal, lambda: float(next(seconds))) as arriving:  # type: ignore[arg-type]
        taken = list(arriving)
    return taken, terminal.shown


def test_terminal_shows_how_far_a_long_run_is_and_is_left_clean() -> None:
    taken, text = watched(is_terminal=True)
    assert [request.number for request in taken] == [0, 1, 2, 3, 4]
    assert "20 of 40 s simulated, 2 of 5 requests, 3 s so far" in text
    assert text.endswith(CLEAR_LINE)


def test_log_file_gets_no_progress() -> None:
    taken, text = watched(is_terminal=False)
    assert (len(taken), text) == (5, "")
