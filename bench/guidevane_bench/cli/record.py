"""guidevane-bench record: play a load on the real engine in this process, and note its steps."""

import argparse
from pathlib import Path

from guidevane_bench.cli.options import (
    add_run,
    deliver,
    ensure_can_deliver,
    itl_target_of_options,
    limits_of_options,
    load_of_options,
    slo_of_options,
)
from guidevane_bench.cli.outputs import ensure_file, write
from guidevane_bench.cli.parser import count
from guidevane_bench.errors import InputError, SpecError
from guidevane_bench.fit import steps_to_bytes
from guidevane_bench.report.build import build_report, series_json
from guidevane_runtime.errors import StartError


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    group = parser.add_argument_group("engine")
    group.add_argument("--model", metavar="PATH", required=True, help="required: HuggingFace directory or GGUF file")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    group.add_argument("--dtype", choices=dtypes, default="auto", help="(default: %(default)s)")
    group.add_argument("--num-threads", type=count, metavar="N", help="of torch on CPU (default: all there are)")
    group.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: CPU time, with waits jumped over; for one thread on a machine that others use too",
    )
    group.add_argument("--steps", type=Path, metavar="FILE", help="write measured steps here, for fit")


def run(options: argparse.Namespace) -> str:
    """Takes as long as the load does."""
    ensure_can_deliver(options)
    ensure_file("--steps", options.steps)
    if not Path(options.model).exists():
        raise InputError(f"--model {options.model} is not there; give a HuggingFace directory or a GGUF file")
    limits, itl_target_s = limits_of_options(options), itl_target_of_options(options)
    requests = load_of_options(options).requests()
    # Here, not above: the other subcommands start without torch.
    from guidevane_bench.engine_source import clock_of, load, replay

    try:
        loaded = load(options.model, limits, options.dtype, options.num_threads)
    except StartError as error:
        raise InputError(f"--model {options.model} can't be run: {error}") from error
    if loaded.num_blocks < options.num_blocks:
        raise SpecError(f"--num-blocks is {options.num_blocks}, this machine holds {loaded.num_blocks}; give fewer")
    mailbox = replay(loaded, limits, options.num_blocks, requests, clock_of(options.clock), itl_target_s)
    duration_s = mailbox.duration_s
    if options.steps:
        write("--steps", options.steps, steps_to_bytes(mailbox.steps))
    report = build_report(
        mailbox.ledger,
        slo_of_options(options),
        duration_s,
        title=options.title,
        kind="measured",
        fleet={
            "pods": 1,
            "clock": options.clock,
            "itl_target_ms": options.itl_target_ms,
            "num_blocks": options.num_blocks,
            "block_size": loaded.block_size,
            "limits": limits.model_dump(by_alias=True),
            "seed": options.seed,
        },
        engine={
            "steps": len(mailbox.steps),
            "busy_percent": round(100 * sum(step.step_s for step in mailbox.steps) / duration_s, 3),
            "kv_use_percent": mailbox.series.kv_use_percent(),
            "kv_waste_percent": mailbox.series.kv_waste_percent(),
        },
        series=series_json(mailbox.series),
    )
    return deliver(report, options)
