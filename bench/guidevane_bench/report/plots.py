"""Plots of a report. matplotlib is imported here only: a report needs none."""

from pathlib import Path

from guidevane_bench.errors import SpecError
from guidevane_bench.report.build import Report

SIZE_INCHES = (8.0, 4.5)


def draw(report: Report, folder: Path) -> list[Path]:
    """Write latency curves, and the fleet over time if the report has it, as SVG."""
    try:
        import matplotlib
    except ImportError as error:
        raise SpecError("--plots needs matplotlib; install guidevane[bench]") from error
    # No display, and no date and no random ids in the files: the same report gives the same bytes.
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "guidevane"
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [_latencies(report, folder / "latency.svg")]
    if report.get("series"):
        drawn.append(_series(report, folder / "series.svg"))
    if report.get("guard"):
        drawn.append(_guard(report, folder / "guard.svg"))
    return drawn


def _latencies(report: Report, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=SIZE_INCHES)
    classes = report["classes"] if len(report["classes"]) > 1 else {}
    for who, figures in {"": report["all"], **classes}.items():
        for name, label in (("ttft_curve", "TTFT"), ("itl_curve", "ITL")):
            if points := figures[name]:
                axes.step(*zip(*points, strict=True), where="post", label=f"{label} {who}".strip())
    axes.set(xscale="log", xlabel="milliseconds", ylabel="share at or below", title=report.get("title", ""))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _series(report: Report, path: Path) -> Path:
    from matplotlib import pyplot

    series = report["series"]
    figure, (upper, lower) = pyplot.subplots(2, sharex=True, figsize=SIZE_INCHES)
    times = [point["time_s"] for point in series]
    for name in ("running", "waiting"):
        upper.plot(times, [point[name] for point in series], label=name)
    lower.plot(times, [point["kv_use_percent"] for point in series], label="KV use, %")
    lower.set(xlabel="seconds", ylim=(0, 100))
    for axes in (upper, lower):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _guard(report: Report, path: Path) -> Path:
    from matplotlib import pyplot

    points = list(report["guard"]["highest_level"])
    last_s, last_level = points[-1]
    points.append((max(last_s, report["duration_s"]), last_level))
    figure, axes = pyplot.subplots(figsize=SIZE_INCHES)
    axes.step([time_s for time_s, _ in points], [level for _, level in points], where="post")
    axes.set(xlabel="seconds", ylabel="highest level of any pod", title="guard")
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
