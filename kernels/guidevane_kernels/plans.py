"""How attention is cut into program instances: pure Python, the same for launch, offline compile and bench.

Nothing here imports triton or asks a device. A plan says which kernel, which constants, how many warps; a work list
says which program does what. There is no autotuning: a plan follows from model and architecture alone, so the first
request of a shape costs what the hundredth does, and results do not depend on what ran before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

KV_CHUNK = 1024
"""Keys that one decode program attends to. Fixed: the order of summation follows from a sequence's own keys alone."""

MIN_BLOCK_M = 16
"""Rows of the smallest matrix product that tensor cores take (triton #3788)."""

MAX_GROUP = 64
"""Query heads per KV head at most: larger groups overrun shared memory (sglang #1819)."""

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class AttentionShape:
    """What a model and its cache fix about attention."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    """Triton's name of the element type: fp32, bf16 or fp16."""
    sliding_window: int = 0
    softcap: float = 0.0

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def padded_head_dim(self) -> int:
        return max(16, _next_power_of_2(self.head_dim))


@dataclass(frozen=True)
class LaunchSpec:
    """One kernel with its compile-time choices; the grid comes with the work list."""

    kernel: str
    constants: dict[str, int | bool | str] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class AttentionPlan:
    """Decode and prefill differ in tile height and in nothing else."""

    decode: LaunchSpec
    prefill: LaunchSpec
    reduce: LaunchSpec

    @property
    def decode_tokens(self) -> int:
        """Query tokens of one decode tile; sequences with no more are attended by the decode launch."""
        return int(self.decode.constants["BLOCK_Q"])

    @property
    def prefill_tokens(self) -> int:
        return int(self.prefill.constants["BLOCK_Q"])


def plan_attention(shape: AttentionShape, capability: int) -> AttentionPlan:
    """Return the launches for `shape` on compute capability `capability` (80, 90, ...)."""
    _check_shape(shape)
    return AttentionPlan(
        decode=_plan_decode(shape, capability),
        prefill=_plan_prefill(shape, capability),
        reduce=LaunchSpec(
            "reduce_partials", {"HEAD_DIM": shape.head_dim, "HEAD_DIM_PADDED": shape.padded_head_dim}, num_warps=1
        ),
    )


def _check_shape(shape: AttentionShape) -> None:
    if shape.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {shape.head_dim}, limit {MAX_HEAD_DIM}; set GUIDEVANE_KERNELS_PROVIDER=torch")
    if shape.group > MAX_GROUP:
        raise ValueError(
            f"{shape.group} query heads share a KV head, limit {MAX_GROUP}; set GUIDEVANE_KERNELS_PROVIDER=torch"
        )


def _plan_decode(shape: AttentionShape, capability: int) -> LaunchSpec:
    block_m = max(MIN_BLOCK_M, _next_power_of_2(shape.group))
    # A tile of 64 x 128 spills on sm_80; 64 x 256 was not tried on sm_90.
    block_n = 64 if shape.padded_head_dim <= (128 if capability >= 90 else 64) else 32
    num_stages = 3
    if shape.dtype == "fp32":
        # Twice the bytes, and products without tensor cores hold their operands in registers.
        block_n = 32 if shape.padded_head_dim <= 64 else 16
        num_stages = 2
    return _attention_spec(shape, block_m, block_n, num_warps=4, num_stages=num_stages)


def _plan_prefill(shape: AttentionShape, capability: int) -> LaunchSpec:
    head_dim = shape.padded_head_dim
    if shape.dtype == "fp32":
        block_m, block_n, num_warps, num_stages = (32, 32 if head_dim <= 64 else 16, 8, 2)
    elif head_dim <= 64:
        block_m, block_n, num_warps, num_stages = (128, 64, 4, 3) if capability >= 90 else (64, 64, 4, 2)
    elif head_dim <= 128:
        block_m, block_n, num_warps, num_stages = (128, 64, 8, 2) if capability >= 90 else (64, 32, 4, 2)
    else:
        block_m, block_n, num_warps, num_stages = (64, 32, 8, 2)
    block_m = max(block_m, _next_power_of_2(shape.group))
    return _attention_spec(shape, block_m, block_n, num_warps, num_stages)


def _attention_spec(shape: AttentionShape, block_m: int, block_n: int, num_warps: int, num_stages: int) -> LaunchSpec:
    constants: dict[str, int | bool | str] = {
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "HEAD_DIM_PADDED": shape.padded_head_dim,
        "BLOCK_SIZE": shape.block_size,
        "BLOCK_M": block_m,
        "BLOCK_Q": block_m // shape.group,
        "BLOCK_N": block_n,
        "SLIDING_WINDOW": shape.sliding_window,
        "HAS_SOFTCAP": shape.softcap > 0,
        "ONE_BLOCK_PER_TILE": shape.block_size % block_n == 0,
    }
    return LaunchSpec("attend_tiles", constants, num_warps, num_stages)


def plan_write(num_kv_heads: int, head_dim: int, block_size: int) -> LaunchSpec:
    """Return the launch that writes K and V; one program per token."""
    heads, dims = _next_power_of_2(num_kv_heads), _next_power_of_2(head_dim)
    constants: dict[str, int | bool | str] = {
        "NUM_KV_HEADS": num_kv_heads,
        "NUM_KV_HEADS_PADDED": heads,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": dims,
        "BLOCK_SIZE": block_size,
    }
    return LaunchSpec("write_blocks", constants, num_warps=min(8, max(1, heads * dims // 512)), num_stages=1)


@dataclass(frozen=True)
class TileList:
    """One launch: entry i of every list describes program i. seq -1 marks padding, which exits at once."""

    seq: list[int]
    first_token: list[int]
    """First query token of the tile, counted from the start of its sequence."""
    first_key: list[int]
    last_key: list[int]
    """Keys [first_key, last_key); first_key is a multiple of BLOCK_N."""
    partial: list[int]
    """Row of the partial results where the tile's first token goes; -1: straight to the output."""

    def __len__(self) -> int:
        return len(self.seq)


@dataclass(frozen=True)
class ReduceList:
    """Tokens that several tiles attended to: rows first_partial + i * stride, i < num_partials, make row `token`."""

    token: list[int]
    first_partial: list[int]
    num_partials: list[int]
    stride: list[int]

    def __len__(self) -> int:
        return len(self.token)


@dataclass(frozen=True)
class WorkList:
    decode: TileList
    prefill: TileList
    reduce: ReduceList
    num_partials: int
    """Rows of partial results that the decode launch writes."""


def plan_work(plan: AttentionPlan, q_lens: Sequence[int], kv_lens: Sequence[int], kv_chunk: int = KV_CHUNK) -> WorkList:
    """Cut one step into tiles. Lists are padded to a few lengths, so that grids repeat from step to step."""
    if kv_chunk < 1 or kv_chunk % int(plan.decode.constants["BLOCK_N"]):
        raise ValueError(f"kv_chunk is {kv_chunk}, must be a multiple of BLOCK_N {plan.decode.constants['BLOCK_N']}")
    work = WorkList(TileList([], [], [], [], []), TileList([], [], [], [], []), ReduceList([], [], [], []), 0)
    num_partials = token = 0
    for seq, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if 0 < q_len <= plan.decode_tokens:
            num_partials += _add_decode(work, plan, seq, token, q_len, kv_len, num_partials, kv_chunk)
        else:
            _add_prefill(work.prefill, plan, seq, q_len, kv_len)
        token += q_len
    _pad(work)
    return WorkList(work.decode, work.prefill, work.reduce, num_partials)


def _add_decode(
    work: WorkList, plan: AttentionPlan, seq: int, token: int, q_len: int, kv_len: int, partial: int, kv_chunk: int
) -> int:
    """Add one tile per chunk of keys; return the partial rows that they take, none for a single tile."""
    first_key = _first_key(plan.decode, kv_len - q_len)
    # Chunks are cut at multiples of kv_chunk from key 0, wherever the window starts.
    cuts = [first_key, *range((first_key // kv_chunk + 1) * kv_chunk, kv_len, kv_chunk), kv_len]
    num_splits = len(cuts) - 1
    for split in range(num_splits):
        row = partial + split * q_len if num_splits > 1 else -1
        _add_tile(work.decode, seq, 0, cuts[split], cuts[split + 1], row)
    if num_splits == 1:
        return 0
    for i in range(q_len):
        _add_reduce(work.reduce, token + i, partial + i, num_splits, q_len)
    return num_splits * q_len


def _add_prefill(tiles: TileList, plan: AttentionPlan, seq: int, q_len: int, kv_len: int) -> None:
    context = kv_len - q_len
    # Last tiles first: they have the most keys, so the short ones fill the gaps at the end of the launch.
    for first_token in reversed(range(0, q_len, plan.prefill_tokens)):
        last_key = context + min(first_token + plan.prefill_tokens, q_len)
        _add_tile(tiles, seq, first_token, _first_key(plan.prefill, context + first_token), last_key, -1)


def _first_key(spec: LaunchSpec, position: int) -> int:
    window, block_n = int(spec.constants["SLIDING_WINDOW"]), int(spec.constants["BLOCK_N"])
    return max(0, position - window + 1) // block_n * block_n if window else 0


def _add_tile(tiles: TileList, seq: int, first_token: int, first_key: int, last_key: int, partial: int) -> None:
    tiles.seq.append(seq)
    tiles.first_token.append(first_token)
    tiles.first_key.append(first_key)
    tiles.last_key.append(last_key)
    tiles.partial.append(partial)


def _add_reduce(reduce: ReduceList, token: int, first_partial: int, num_partials: int, stride: int) -> None:
    reduce.token.append(token)
    reduce.first_partial.append(first_partial)
    reduce.num_partials.append(num_partials)
    reduce.stride.append(stride)


def _pad(work: WorkList) -> None:
    for tiles in (work.decode, work.prefill):
        while len(tiles) < padded_grid(len(tiles)):
            _add_tile(tiles, -1, 0, 0, 0, -1)
    while len(work.reduce) < padded_grid(len(work.reduce)):
        _add_reduce(work.reduce, -1, 0, 0, 0)


def padded_grid(num_programs: int) -> int:
    """Return the grid for `num_programs`: 0, a power of two from 4 to 64, then multiples of 64.

    Multiples of 4 keep each of the int32 lists, which lie end to end, aligned to 16 bytes.
    """
    if num_programs == 0:
        return 0
    if num_programs <= 64:
        return max(4, _next_power_of_2(num_programs))
    return -(-num_programs // 64) * 64


def _next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
