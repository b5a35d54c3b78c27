import json
from collections.abc import Callable

from guidevane_bench.report.build import Slo, build_report, series_json, to_bytes
from guidevane_bench.report.compare import compare
from guidevane_bench.report.markdown import to_markdown
from guidevane_bench.simulator.faults import Fault, FaultKind
from guidevane_bench.simulator.fleet import Outcome
from guidevane_bench.workload.request import LoadRequest

Play = Callable[..., Outcome]


def two_tenants() -> list[LoadRequest]:
    return [LoadRequest(n, 0.1 * n, 10, 5, "ab"[n % 2]) for n in range(10)]


def report_of(outcome: Outcome, slo: Slo | None = None) -> dict[str, object]:
    return build_report(outcome.ledger, slo or Slo(), outcome.ended_s, title="A run", kind="simulated")


def test_report_counts_all_and_each_tenant(play: Play) -> None:
    report = json.loads(to_bytes(report_of(play(two_tenants()))))
    assert report["all"]["num_requests"] == 10
    assert report["all"]["ends"] == {"finished": 10}
    assert [report["tenants"][name]["num_requests"] for name in "ab"] == [5, 5]
    assert report["all"]["output_tokens"] == 50
    assert report["all"]["good_percent"] == 100
    assert report["fairness"]["jain_index"] == 1


def test_request_that_misses_one_half_of_the_slo_is_not_good(play: Play) -> None:
    outcome = play(two_tenants())
    for slo in (Slo(ttft_ms=1.0), Slo(tpot_ms=1.0)):
        report = report_of(outcome, slo)
        assert report["all"]["goodput_per_s"] == 0  # type: ignore[index]


def test_lost_request_is_not_good_and_named_with_its_reason(play: Play) -> None:
    fault = Fault(0.005, 0, FaultKind.POD_DEATH, 0.01)
    figures = build_report(play(two_tenants(), faults=(fault,)).ledger, Slo(), 1.0)["all"]
    assert figures["ends"] == {"finished": 9, "lost/pod_death": 1}
    assert figures["good_percent"] == 90


def test_series_is_thinned_to_what_a_plot_needs(play: Play) -> None:
    outcome = play(two_tenants(), scrape_interval_s=0.0005)
    assert len(outcome.series.points) > 1000
    assert len(series_json(outcome.series)) <= 720


def test_markdown_has_the_figures_and_the_tenants(play: Play) -> None:
    text = to_markdown(report_of(play(two_tenants())))
    assert text.startswith("# A run\n")
    assert "| finished | 10 |" in text
    assert "## Tenants" in text
    assert "None" not in text


def test_run_of_nothing_has_a_report(play: Play) -> None:
    assert "| requests | 0 |" in to_markdown(report_of(play([])))


def test_comparison_says_how_much_the_second_differs(play: Play) -> None:
    one, two = report_of(play(two_tenants())), report_of(play(two_tenants()[:5]))
    text = compare(one, two, ["ten", "five"])
    assert "|  | ten | five | change, % |" in text
    assert "| goodput per s |" in text
