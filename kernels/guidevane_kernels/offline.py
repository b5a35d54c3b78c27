"""Compile the Triton kernels for a GPU that is not there, and read what the machine code uses.

`python -m guidevane_kernels.offline` prints the table of docs/kernels.md. Spills can't be asked from a driver here, so
they are read off the code itself: a stack, or loads and stores to local memory (LDL, STL).
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from guidevane_kernels import triton_kernels
from guidevane_kernels.plans import AttentionShape, LaunchSpec, plan_attention, plan_write

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

MAX_SHARED_BYTES = {80: 166912, 90: 232448}
"""Shared memory that one block may use, by compute capability (CUDA programming guide, technical specifications)."""


@dataclass(frozen=True)
class Target:
    """One compilation: a launch of a shape on a compute capability."""

    name: str
    spec: LaunchSpec
    dtype: str
    capability: int


@dataclass(frozen=True)
class Resources:
    """What the machine code of one kernel uses, per thread or per block."""

    registers: int
    stack_bytes: int
    local_accesses: int
    """LDL and STL instructions: spilled registers."""
    shared_bytes: int
    num_hgmma: int
    """Warp-group matrix products (Hopper)."""
    num_hmma: int
    """Warp matrix products."""
    narrow_copies: int
    """Asynchronous copies to shared memory of fewer than 16 bytes."""
    ttir: str
    """The kernel in Triton's own representation."""


MODELS = {
    "llama-8b": {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 64},
    "llama-8b block 16": {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16},
    "smollm2-135m": {"num_q_heads": 9, "num_kv_heads": 3, "head_dim": 64, "block_size": 16},
    "phi-2": {"num_q_heads": 32, "num_kv_heads": 32, "head_dim": 80, "block_size": 16},
    "gemma-2-9b": {"num_q_heads": 16, "num_kv_heads": 8, "head_dim": 256, "block_size": 64, "softcap": 50.0},
    "mistral-7b window": {
        "num_q_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "block_size": 64,
        "sliding_window": 4096,
    },
}
"""Shapes whose plans are compiled: every branch of plan_attention is taken by one of them."""

FP32_MODELS = ("llama-8b", "smollm2-135m", "gemma-2-9b")
"""fp32 plans differ by head_dim only: one model of each."""


def targets(capability: int) -> Iterator[Target]:
    """Yield the launches of every model in MODELS on `capability`."""
    for model, sizes in MODELS.items():
        for dtype in ("bf16", "fp32") if model in FP32_MODELS else ("bf16",):
            plan = plan_attention(AttentionShape(dtype=dtype, **sizes), capability)  # type: ignore[arg-type]
            yield Target(f"{model} decode", plan.decode, dtype, capability)
            yield Target(f"{model} prefill", plan.prefill, dtype, capability)
    yield Target(
        "llama-8b reduce", plan_attention(AttentionShape(32, 8, 128, 64, "bf16"), capability).reduce, "bf16", capability
    )
    yield Target("llama-8b write", plan_write(8, 128, 64), "bf16", capability)


def compile_target(target: Target) -> Resources:
    """Compile one launch with the specialisations that the JIT would infer at run time."""
    kernel = getattr(triton_kernels, target.spec.kernel)
    names = kernel.arg_names
    constants = target.spec.constants
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else _argument_type(name, target.dtype) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if _is_divisible(name, constants)},
    )
    compiled = compile_source(
        source,
        target=GPUTarget("cuda", target.capability, 32),
        options={
            "num_warps": target.spec.num_warps,
            "num_stages": target.spec.num_stages,
            "enable_fp_fusion": True,
        },
    )
    return _resources(compiled.asm["cubin"], compiled.asm["ttir"], compiled.metadata.shared)


def _argument_type(name: str, dtype: str) -> str:
    if name == "slot_mapping_ptr":
        return "*i64"
    if name in ("partial_ptr", "partial_lse_ptr"):
        return "*fp32"
    if name in ("q_ptr", "k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr", "out_ptr"):
        return f"*{dtype}"
    if name.endswith("_ptr"):
        return "*i32"
    return "fp32" if name in ("scale_log2", "softcap") else "i32"


def _is_divisible(name: str, constants: dict[str, int | bool | str]) -> bool:
    """Whether the JIT finds the argument divisible by 16: pointers, and strides, which are multiples of HEAD_DIM."""
    if name in constants or name in ("scale_log2", "softcap", "stride_bt"):
        return False
    return name.endswith("_ptr") or int(constants["HEAD_DIM"]) % 16 == 0


def _resources(cubin: bytes, ttir: str, shared_bytes: int) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _cuobjdump("-res-usage", file.name)
        sass = _cuobjdump("-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump reported no register use: {usage[:200]!r}")
    return Resources(
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        local_accesses=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        shared_bytes=shared_bytes,
        num_hgmma=len(re.findall(r"\bHGMMA\b", sass)),
        num_hmma=len(re.findall(r"\bHMMA\b", sass)),
        narrow_copies=len(re.findall(r"\bLDGSTS\.(?!\S*128)", sass)),
        ttir=ttir,
    )


def _cuobjdump(option: str, path: str) -> str:
    done = subprocess.run([str(CUOBJDUMP), option, path], capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout + done.stderr


def _table_row(target: Target, used: Resources) -> str:
    spec = target.spec
    tile = f"{spec.constants['BLOCK_M']}x{spec.constants['BLOCK_N']}" if "BLOCK_M" in spec.constants else ""
    cells = (
        target.name, target.dtype, f"sm_{target.capability}", tile, spec.num_warps, spec.num_stages, used.registers,
        used.stack_bytes, used.local_accesses, used.shared_bytes, used.num_hgmma, used.num_hmma, used.narrow_copies,
    )  # fmt: skip
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


HEADER = (
    "| launch | dtype | target | tile | warps | stages | registers | stack | spills | shared | HGMMA | HMMA "
    "| narrow copies |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the resource table of every plan on sm_80 and sm_90, in Markdown."""
    argparse.ArgumentParser(prog="python -m guidevane_kernels.offline", description=main.__doc__).parse_args(arguments)
    sys.stdout.write(HEADER + "\n")
    for capability in MAX_SHARED_BYTES:
        for target in targets(capability):
            sys.stdout.write(_table_row(target, compile_target(target)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
