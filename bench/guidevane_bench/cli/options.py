"""Options that several subcommands share."""

import argparse
from pathlib import Path

from guidevane_api.limits import PartialLimits, SchedulerLimits, limit_violations
from guidevane_bench.errors import SpecError
from guidevane_bench.report.build import Report, Slo, to_bytes
from guidevane_bench.report.markdown import to_markdown
from guidevane_bench.report.plots import draw
from guidevane_bench.simulator.control import UNBOUNDED
from guidevane_bench.workload.load import LoadSpec
from guidevane_bench.workload.traces import TraceCut
from guidevane_runtime.core.guard import GuardConfig
from guidevane_runtime.core.guard_steps import Line


def add_run(parser: argparse.ArgumentParser) -> None:
    """What every subcommand that plays a load takes."""
    add_load(parser)
    add_pod(parser)
    add_report(parser)


def add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--trace", type=Path, help="CSV or Mooncake JSON lines: arrivals and lengths, or lengths only")
    group.add_argument("--limit", type=int, help="first so many requests of the trace")
    group.add_argument("--time-scale", type=float, default=1.0, help="factor on gaps of the trace")
    group.add_argument("--length-scale", type=float, default=1.0, help="factor on token counts of the trace")
    group.add_argument("--max-prompt", type=int, help="cut prompts of the trace at so many tokens")
    group.add_argument("--max-output", type=int, help="cut outputs of the trace at so many tokens")
    group.add_argument(
        "--arrivals",
        default="",
        help="poisson:rate=5 | gamma:rate=5,cv=3 | ramp:start=1,end=9 | onoff:"
        "rate=5,on=30,off=30 | diurnal:rate=5,amplitude=0.8,period=86400 | curve:FILE=PEAK_RATE",
    )
    group.add_argument(
        "--lengths",
        default="",
        help="fixed:prompt=200,output=50 | lognormal:prompt=200,output=50,cv=1"
        " | longtail:prompt=100,output=40,long=800,share=0.05",
    )
    group.add_argument("--duration", type=float, default=60.0, help="seconds of --arrivals (default: %(default)s)")
    group.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and faults (default: %(default)s)")


def load_of_options(options: argparse.Namespace) -> LoadSpec:
    cut = TraceCut(options.limit, options.time_scale, options.length_scale, options.max_prompt, options.max_output)
    if min(cut.time_scale, cut.length_scale, options.duration) <= 0:
        raise SpecError("--time-scale, --length-scale and --duration must be above 0")
    if any(most is not None and most < 1 for most in (cut.max_requests, cut.max_prompt_tokens, cut.max_output_tokens)):
        raise SpecError("--limit, --max-prompt and --max-output must be 1 or more")
    return LoadSpec(options.trace, cut, options.arrivals, options.lengths, options.duration, options.seed)


def add_pod(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pod")
    group.add_argument("--limits", default="{}", help='live limits as JSON, say {"maxNumSeqs": 8}; the rest by default')
    group.add_argument("--num-blocks", type=int, default=4096, help="KV blocks of 16 tokens (default: %(default)s)")
    group.add_argument("--itl-target-ms", type=float, help="cut prefill beside decodes to it, as the ITL line does")


def limits_of_options(options: argparse.Namespace) -> SchedulerLimits:
    """Raises SpecError for what is no limit, and for limits that contradict each other."""
    try:
        given = PartialLimits.model_validate_json(options.limits)
    except ValueError as error:
        raise SpecError(f"--limits {options.limits!r}: {error}") from error
    if options.num_blocks < 1:
        raise SpecError(f"--num-blocks is {options.num_blocks}; a pod has at least 1")
    limits = SchedulerLimits.resolve(given, UNBOUNDED)
    if found := limit_violations(limits, UNBOUNDED):
        raise SpecError(f"--limits: {'; '.join(found.values())}")
    return limits


def add_guard(parser: argparse.ArgumentParser) -> None:
    """The names of the runtime's own options."""
    group = parser.add_argument_group("guard, as the runtime's own options")
    group.add_argument("--guard", choices=("off", "dry-run", "on"), help="default: on with a line, else off")
    for line in Line:
        unit = "ms" if is_latency(line) else "percent"
        group.add_argument(slo_option(line), dest=line.name, type=float, help=f"protection line, {unit}")


def is_latency(line: Line) -> bool:
    return line.endswith("_ms")


def slo_option(line: Line) -> str:
    """--slo-itl-p95-ms, --slo-kv-cache-utilization-max-percent and so on."""
    return f"--slo-{line.replace('_', '-')}" + ("" if is_latency(line) else "-percent")


def lines_of_options(options: argparse.Namespace) -> dict[Line, float]:
    """The lines that were given."""
    given = {line: getattr(options, line.name) for line in Line}
    return {line: bound for line, bound in given.items() if bound is not None}


def guard_of_options(options: argparse.Namespace) -> GuardConfig | None:
    """None: it is off. Raises SpecError where the runtime would not start."""
    lines = lines_of_options(options)
    if options.guard in ("on", "dry-run") and not lines:
        raise SpecError(f"--guard {options.guard} has no line to protect; give one, for example --slo-itl-p95-ms 120")
    if options.guard == "off" or not lines:
        return None
    try:
        return GuardConfig(lines, dry_run=options.guard == "dry-run")
    except ValueError as error:
        raise SpecError(f"--slo-*: {error}") from error


def itl_target_of_options(options: argparse.Namespace) -> float | None:
    """Seconds."""
    if options.itl_target_ms is None:
        return None
    if options.itl_target_ms <= 0:
        raise SpecError(f"--itl-target-ms is {options.itl_target_ms}; a target is above 0, leave it out for none")
    return float(options.itl_target_ms) / 1000


def add_report(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument("--ttft-slo-ms", type=float, default=Slo().ttft_ms, help="(default: %(default)s)")
    group.add_argument("--tpot-slo-ms", type=float, default=Slo().tpot_ms, help="(default: %(default)s)")
    group.add_argument("--title", default="Run")
    group.add_argument("--json", type=Path, help="write the report here")
    group.add_argument("--markdown", type=Path, help="write it for people here; without both it goes to the terminal")
    group.add_argument("--plots", type=Path, help="folder for SVG files (needs matplotlib)")


def slo_of_options(options: argparse.Namespace) -> Slo:
    return Slo(options.ttft_slo_ms, options.tpot_slo_ms)


def deliver(report: Report, options: argparse.Namespace) -> str:
    """Write what was asked for; returns what is left for the terminal."""
    if options.plots:
        draw(report, options.plots)
    if options.json:
        options.json.write_bytes(to_bytes(report))
    text = to_markdown(report)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    return "" if options.json or options.markdown else text
