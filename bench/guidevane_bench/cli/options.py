"""Options that several subcommands share."""

import argparse
from pathlib import Path

from guidevane_api.limits import PartialLimits, SchedulerLimits, limit_violations
from guidevane_bench.cli.outputs import ensure_file, ensure_folder, ensure_matplotlib, write
from guidevane_bench.cli.parser import count, num_blocks, positive, share
from guidevane_bench.errors import InputError, SpecError, sentence_of
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
    add = group.add_argument
    add("--trace", type=Path, metavar="FILE", help="CSV or Mooncake JSON lines: arrivals and lengths, or lengths only")
    add("--limit", type=count, metavar="N", help="first so many requests of the trace")
    add("--time-scale", type=positive, metavar="FACTOR", default=1.0, help="on gaps of the trace")
    add("--length-scale", type=positive, metavar="FACTOR", default=1.0, help="on token counts of the trace")
    add("--max-prompt", type=count, metavar="TOKENS", help="cut prompts of the trace at so many")
    add("--max-output", type=count, metavar="TOKENS", help="cut outputs of the trace at so many")
    add(
        "--arrivals",
        metavar="KIND",
        default="",
        help="poisson:rate=5 | gamma:rate=5,cv=3 | ramp:start=1,end=9 | onoff:"
        "rate=5,on=30,off=30 | diurnal:rate=5,amplitude=0.8,period=86400 | curve:FILE=PEAK_RATE",
    )
    add(
        "--lengths",
        metavar="KIND",
        default="",
        help="of --arrivals, if not those of --trace: fixed:prompt=200,output=50 | lognormal:prompt=200,output=50,cv=1"
        " | longtail:prompt=100,output=40,long=800,share=0.05",
    )
    add("--duration", type=positive, metavar="SECONDS", default=60.0, help="of --arrivals (default: %(default)s)")
    add("--seed", type=int, metavar="N", default=0, help="of all that is drawn, faults too (default: %(default)s)")
    _add_classes(group.add_mutually_exclusive_group())


def _add_classes(group: argparse._MutuallyExclusiveGroup) -> None:
    group.add_argument(
        "--offline-share",
        type=share,
        metavar="SHARE",
        default=0.0,
        help="of the requests, drawn: they are offline work, the others interactive (default: %(default)s, "
        "or what the column class of the trace says)",
    )
    group.add_argument(
        "--offline-tenants", metavar="A,B", default="", help="tenants of the trace whose requests are offline work"
    )


def load_of_options(options: argparse.Namespace) -> LoadSpec:
    return LoadSpec(
        trace=options.trace,
        cut=TraceCut(options.limit, options.time_scale, options.length_scale, options.max_prompt, options.max_output),
        arrivals=options.arrivals,
        lengths=options.lengths,
        duration_s=options.duration,
        seed=options.seed,
        offline_share=options.offline_share,
        offline_tenants=tuple(filter(None, options.offline_tenants.split(","))),
    )


def add_pod(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("pod").add_argument
    add("--limits", metavar="JSON", default="{}", help='live limits, say {"maxNumSeqs": 8}; the rest by default')
    add(
        "--num-blocks", type=num_blocks, metavar="N", default=4096, help="KV blocks of 16 tokens (default: %(default)s)"
    )
    add("--itl-target-ms", type=positive, metavar="MS", help="cut prefill beside decodes to it, as the ITL line does")


def limits_of_options(options: argparse.Namespace) -> SchedulerLimits:
    """Raises SpecError for what is no limit, and for limits that contradict each other."""
    try:
        given = PartialLimits.model_validate_json(options.limits)
    except ValueError as error:
        raise SpecError(f"--limits {options.limits!r}: {sentence_of(error)}; write JSON of spec.limits") from error
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
        what = f"protection line, {unit}"
        group.add_argument(slo_option(line), dest=line.name, type=positive, metavar=unit.upper(), help=what)


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
    return GuardConfig(lines, dry_run=options.guard == "dry-run")


def itl_target_of_options(options: argparse.Namespace) -> float | None:
    """Seconds."""
    return None if options.itl_target_ms is None else options.itl_target_ms / 1000


def add_report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("report").add_argument
    for name, default in (("ttft", Slo().ttft_ms), ("tpot", Slo().tpot_ms)):
        what = f"a good request has a {name.upper()} of so much at most (default: %(default)s)"
        add(f"--{name}-slo-ms", type=positive, metavar="MS", default=default, help=what)
    add("--title", metavar="TEXT", default="Run", help="(default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the report here")
    add("--markdown", type=Path, metavar="FILE", help="write it for people here; without both it goes to the terminal")
    add("--plots", type=Path, metavar="FOLDER", help="for SVG files (needs matplotlib)")


def ensure_can_deliver(options: argparse.Namespace) -> None:
    """Raises BenchError if deliver() would; called before the run."""
    ensure_file("--json", options.json)
    ensure_file("--markdown", options.markdown)
    if options.json and options.json == options.markdown:
        raise SpecError(f"--json and --markdown are both {options.json}; give two files")
    if options.plots:
        ensure_matplotlib("--plots")
        ensure_folder("--plots", options.plots)


def slo_of_options(options: argparse.Namespace) -> Slo:
    return Slo(options.ttft_slo_ms, options.tpot_slo_ms)


def deliver(report: Report, options: argparse.Namespace) -> str:
    """Write what was asked for; returns what is left for the terminal."""
    if options.json:
        write("--json", options.json, to_bytes(report))
    text = to_markdown(report)
    if options.markdown:
        write("--markdown", options.markdown, text.encode())
    if options.plots:
        try:
            draw(report, options.plots)
        except OSError as error:
            raise InputError(f"--plots {options.plots} can't be written: {error.strerror}; give another") from error
    return "" if options.json or options.markdown else text
