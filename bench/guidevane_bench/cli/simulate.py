"""guidevane-bench simulate: the real scheduler in virtual time."""

import argparse
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from time import process_time

from guidevane_api.pod_files import TenantsFile
from guidevane_bench.cli.options import (
    add_guard,
    add_run,
    deliver,
    ensure_can_deliver,
    guard_of_options,
    itl_target_of_options,
    limits_of_options,
    lines_of_options,
    load_of_options,
    slo_of_options,
)
from guidevane_bench.cli.parser import interval_s, num_pods, share
from guidevane_bench.cli.progress import shown
from guidevane_bench.errors import InputError, SpecError, sentence_of
from guidevane_bench.report.build import Report, build_report, series_json
from guidevane_bench.simulator.batch_control import CONTROLLERS, DEFAULT_ITL_MS
from guidevane_bench.simulator.control import Controller, read_script
from guidevane_bench.simulator.costs import read_costs
from guidevane_bench.simulator.faults import draw_faults, parse_fault_counts
from guidevane_bench.simulator.fleet import Fleet, FleetSpec, Outcome
from guidevane_bench.simulator.pod import PodShape
from guidevane_runtime.core.budget import SHORT_RESERVE
from guidevane_runtime.core.guard_steps import Line
from guidevane_runtime.core.tenants import EQUAL_TERMS, TenantPolicy, policy_of

MAX_FLEET_BLOCKS = 1 << 27


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    group = parser.add_argument_group("fleet")
    group.add_argument("--costs", type=Path, metavar="FILE", required=True, help="cost model, required: a file of fit")
    group.add_argument("--pods", type=num_pods, metavar="N", default=1, help="(default: %(default)s)")
    group.add_argument(
        "--batching",
        choices=("continuous", "static"),
        default="continuous",
        help="static: a batch comes in when the last has ended; for comparison only",
    )
    group.add_argument(
        "--short-reserve",
        type=share,
        metavar="SHARE",
        default=SHORT_RESERVE,
        help="share of a step's prefill tokens kept for short prompts; the runtime's is %(default)s",
    )
    group.add_argument(
        "--faults",
        metavar="KIND=N,...",
        default="",
        help="how many over the run, drawn: pod_death=2,slow_pod=1,metrics_gap=1",
    )
    group.add_argument(
        "--limits-script", type=Path, metavar="FILE", help='JSON lines: {"at_s": 60, "limits": {"maxNumSeqs": 4}}'
    )
    group.add_argument(
        "--admission",
        choices=("peak-kv", "optimistic"),
        default="peak-kv",
        help="optimistic: whatever fits now comes in, and growth preempts; for comparison only",
    )
    group.add_argument(
        "--controller",
        metavar="NAME",
        default="",
        help=f"{' | '.join(CONTROLLERS)}, or module:factory of a Controller; asked at every scrape",
    )
    group.add_argument(
        "--tenants", type=Path, metavar="FILE", help="a pod's tenants file: weights and caps of tenants of the trace"
    )
    group.add_argument(
        "--scrape-interval",
        type=interval_s,
        metavar="SECONDS",
        default=5.0,
        help="between two looks of a controller, and two points of a plot (default: %(default)s)",
    )
    group.add_argument(
        "--prefix-caching", choices=("on", "off"), default="on", help="as the runtime's own (default: %(default)s)"
    )
    add_guard(parser)


def run(options: argparse.Namespace) -> str:
    """Returns the text for the terminal. How long it took goes to stderr: a report has no wall clock in it."""
    ensure_can_deliver(options)
    controller = _controller(options)
    requests = load_of_options(options).requests()
    spec = _fleet_spec(options, requests[-1].arrival_s)
    started_s = process_time()
    with _rare_collection(), shown(requests, sys.stderr) as arriving:
        outcome = Fleet(spec, controller).run(arriving)
    _say_speed(outcome, process_time() - started_s)
    return deliver(_report(options, spec, outcome), options)


def _fleet_spec(options: argparse.Namespace, last_arrival_s: float) -> FleetSpec:
    if options.pods * options.num_blocks > MAX_FLEET_BLOCKS:
        way_out = f"the fleet would have more than {MAX_FLEET_BLOCKS} blocks, 8 GB here; give fewer of one"
        raise SpecError(f"--pods {options.pods} with --num-blocks {options.num_blocks}: {way_out}")
    limits = limits_of_options(options)
    tenants = _tenants(options.tenants) if options.tenants else EQUAL_TERMS
    shape = PodShape(
        limits,
        options.num_blocks,
        tenants=tenants,
        itl_target_s=itl_target_of_options(options),
        short_reserve=options.short_reserve,
        is_static=options.batching == "static",
        is_optimistic=options.admission == "optimistic",
        enable_prefix_caching=options.prefix_caching == "on",
        guard=guard_of_options(options),
    )
    faults = draw_faults(parse_fault_counts(options.faults), options.pods, last_arrival_s, options.seed)
    script = read_script(options.limits_script, limits) if options.limits_script else None
    return FleetSpec(shape, read_costs(options.costs), options.pods, faults, script, options.scrape_interval)


def _tenants(path: Path) -> TenantPolicy:
    try:
        return policy_of(TenantsFile.model_validate_json(path.read_bytes()))
    except OSError as error:
        raise InputError(f"--tenants {path} can't be read: {error.strerror}; give a pod's tenants file") from error
    except ValueError as error:
        raise InputError(f"--tenants {path}: {sentence_of(error)}; docs/admission.md shows such a file") from error


def _controller(options: argparse.Namespace) -> Controller | None:
    """A built-in one, or one that is named, not imported: it may know the operator, this package does not."""
    name = options.controller
    if not name:
        return None
    if name in CONTROLLERS:
        return CONTROLLERS[name](lines_of_options(options).get(Line.ITL, DEFAULT_ITL_MS))
    module, _, factory = name.partition(":")
    try:
        made: Controller | None = getattr(import_module(module), factory)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        way_out = f"write module:factory, or one of {', '.join(CONTROLLERS)}"
        raise SpecError(f"--controller {name!r}: {sentence_of(error)}; {way_out}") from error
    if not callable(getattr(made, "decide", None)):
        raise SpecError(f"--controller {name!r} makes nothing that has decide(sample); see docs/simulator.md")
    return made


@contextmanager
def _rare_collection() -> Iterator[None]:
    """A run makes millions of objects and no cycles: looking for some takes a fifth of its time."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _say_speed(outcome: Outcome, cpu_s: float) -> None:
    num_tokens = sum(entry.num_tokens for entry in outcome.ledger.entries)
    sys.stderr.write(
        f"simulated {outcome.ended_s:.0f} s in {cpu_s:.1f} s of CPU time: {outcome.num_steps} steps, "
        f"{num_tokens} tokens, {1e6 * cpu_s / max(1, outcome.num_steps):.1f} us a step\n"
    )


def _report(options: argparse.Namespace, spec: FleetSpec, outcome: Outcome) -> Report:
    guard = {"guard": outcome.guard_log.to_json()} if outcome.guard_log else {}
    return build_report(
        outcome.ledger,
        slo_of_options(options),
        outcome.ended_s,
        title=options.title,
        kind="simulated",
        fleet={
            "pods": spec.num_pods,
            "batching": options.batching,
            "admission": options.admission,
            "prefix_caching": options.prefix_caching,
            "itl_target_ms": options.itl_target_ms,
            "short_reserve": options.short_reserve,
            "num_blocks": spec.shape.num_blocks,
            "block_size": spec.shape.block_size,
            "limits": spec.shape.limits.model_dump(by_alias=True),
            "costs_s": asdict(spec.costs),
            "seed": options.seed,
            "faults": [fault.to_json() for fault in spec.faults],
        },
        engine={
            "steps": outcome.num_steps,
            "recomputed_tokens": outcome.num_recomputed_tokens,
            "busy_percent": round(100 * outcome.busy_s / (spec.num_pods * outcome.ended_s), 3)
            if outcome.ended_s
            else 0,
            "kv_use_percent": outcome.series.kv_use_percent(),
            "kv_waste_percent": outcome.series.kv_waste_percent(),
            "prefix_hit_percent": outcome.prefix_hit_percent,
        },
        **guard,
        series=series_json(outcome.series),
    )
