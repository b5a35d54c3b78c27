# ruff: noqa: N803 - sizes the compiler must know are upper case, as in Triton itself
# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels: attention over tiles of a work list, the reduction of split keys, and the cache write.

Online softmax: Milakov & Gimelshein 2018, arXiv:1805.02867, in base 2. Query heads that share a KV head are rows of
one tile (GQA packing): row m is token m // GROUP, query head m % GROUP of the KV head.

Under TRITON_INTERPRET=1 bf16 has no arithmetic and casts to it truncate (triton #11584), so there `_widen` and
`_rounded` compute on the fp32 values that bf16 hardware would see. Compiled kernels don't contain that code.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _widen(x):
    """Return operands of a product: as they are, or as fp32 under the interpreter, which is exact."""
    if INTERPRETED:
        x = x.to(tl.float32)
    return x


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """Return fp32 `x` in `dtype`, rounded to nearest even; under the interpreter bf16 values stay in fp32."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            x = bits.to(tl.float32, bitcast=True)
        else:
            x = x.to(dtype).to(tl.float32)
    else:
        x = x.to(dtype)
    return x


@triton.jit
def _load_kv(
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    start_n,
    first_valid,
    last_key,
    stride_kb,
    stride_kn,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_BLOCK_PER_TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return K [HEAD_DIM_PADDED, BLOCK_N] and V [BLOCK_N, HEAD_DIM_PADDED] of keys from start_n on.

    MASKED: keys outside [first_valid, last_key) read as 0. A probability of 0 does not hide a NaN in V.
    """
    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    in_range = (offs_n >= first_valid) & (offs_n < last_key)
    if ONE_BLOCK_PER_TILE:
        block = tl.load(table_ptr + start_n // BLOCK_SIZE).to(tl.int64)
        rows = block * stride_kb + (start_n % BLOCK_SIZE + tl.arange(0, BLOCK_N)) * stride_kn
    elif MASKED:
        blocks = tl.load(table_ptr + offs_n // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
        rows = blocks * stride_kb + (offs_n % BLOCK_SIZE) * stride_kn
    else:
        blocks = tl.load(table_ptr + offs_n // BLOCK_SIZE).to(tl.int64)
        rows = blocks * stride_kb + (offs_n % BLOCK_SIZE) * stride_kn
    k_ptrs = k_cache_ptr + rows[None, :] + offs_d[:, None]
    v_ptrs = v_cache_ptr + rows[:, None] + offs_d[None, :]
    if MASKED or HEAD_DIM != HEAD_DIM_PADDED:
        in_head = offs_d < HEAD_DIM
        if not MASKED:
            in_range = offs_n >= 0
        k = tl.load(k_ptrs, mask=in_range[None, :] & in_head[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=in_range[:, None] & in_head[None, :], other=0.0)
    else:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
    return k, v


@triton.jit
def _attend_range(
    acc,
    row_sum,
    row_max,
    q,
    position,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    first_key,
    last_key,
    first_valid,
    stride_kb,
    stride_kn,
    scale_log2,
    softcap,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ONE_BLOCK_PER_TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold keys [first_key, last_key) into (acc, row_sum, row_max); row_max is in log2 units.

    Without MASKED, every row sees every key of the range, and the range is whole tiles.
    """
    for start_n in range(first_key, last_key, BLOCK_N):
        k, v = _load_kv(
            k_cache_ptr,
            v_cache_ptr,
            table_ptr,
            start_n,
            first_valid,
            last_key,
            stride_kb,
            stride_kn,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            BLOCK_SIZE,
            BLOCK_N,
            ONE_BLOCK_PER_TILE,
            MASKED,
        )
        scores = tl.dot(q, _widen(k), input_precision="ieee") * scale_log2
        if HAS_SOFTCAP:
            # tanh(|x|) = (1 - e^-2|x|) / (1 + e^-2|x|) does not overflow (vllm #56578). The scores carry log2(e).
            decay = tl.exp2(-tl.abs(scores) * (2.0 / softcap))
            capped = (1.0 - decay) / (1.0 + decay) * (softcap * LOG2_E)
            scores = tl.where(scores < 0.0, -capped, capped)
        if MASKED:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            seen = (offs_n[None, :] <= position[:, None]) & (offs_n < last_key)[None, :]
            if SLIDING_WINDOW > 0:
                seen = seen & (offs_n[None, :] > position[:, None] - SLIDING_WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        base = new_max
        if MASKED:
            # A row that has seen no key yet: -inf - -inf would be NaN.
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        probs = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(row_max - base)
        row_sum = row_sum * shrink + tl.sum(probs, 1)
        acc = tl.dot(_rounded(probs, v.dtype), _widen(v), acc * shrink[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_sum, row_max


# The width of block tables changes from step to step: specialising on it would compile again while serving.
@triton.jit(do_not_specialize=["stride_bt"])
def attend_tiles(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    cu_q_lens_ptr,
    kv_lens_ptr,
    tile_seq_ptr,
    tile_first_token_ptr,
    tile_first_key_ptr,
    tile_last_key_ptr,
    tile_partial_ptr,
    out_ptr,
    partial_ptr,
    partial_lse_ptr,
    scale_log2,
    softcap,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_bt,
    stride_ot,
    stride_oh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ONE_BLOCK_PER_TILE: tl.constexpr,
):
    """Attend BLOCK_Q query tokens of one sequence to one range of its keys, for one KV head.

    Grid: [tiles, num_kv_heads]. q, out: [num_tokens, num_q_heads, HEAD_DIM]. Caches:
    [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]. Last strides are 1. scale_log2 is scale * log2(e).
    """
    pid_tile = tl.program_id(0)
    pid_head = tl.program_id(1).to(tl.int64)
    num_q_heads = tl.num_programs(1) * GROUP
    seq = tl.load(tile_seq_ptr + pid_tile).to(tl.int64)
    if seq < 0:
        return
    first_token = tl.load(tile_first_token_ptr + pid_tile)
    first_key = tl.load(tile_first_key_ptr + pid_tile)
    last_key = tl.load(tile_last_key_ptr + pid_tile)
    partial = tl.load(tile_partial_ptr + pid_tile).to(tl.int64)
    q_start = tl.load(cu_q_lens_ptr + seq)
    q_len = tl.load(cu_q_lens_ptr + seq + 1) - q_start
    context = tl.load(kv_lens_ptr + seq) - q_len

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    token = first_token + offs_m // GROUP
    head = pid_head * GROUP + offs_m % GROUP
    is_row = (offs_m < BLOCK_Q * GROUP) & (token < q_len)
    in_tile = is_row[:, None] & (offs_d < HEAD_DIM)[None, :]
    q_row = (q_start + token).to(tl.int64)
    q_ptrs = q_ptr + (q_row * stride_qt + head * stride_qh)[:, None] + offs_d[None, :]
    q = _widen(tl.load(q_ptrs, mask=in_tile, other=0.0))

    position = context + token
    # [first_key, full_from)  masked: some row's window starts here
    # [full_from, full_to)    whole tiles that every row sees
    # [full_to, last_key)     masked: the diagonal and the tail
    last_position = context + tl.minimum(first_token + BLOCK_Q, q_len) - 1
    full_to = tl.minimum(last_key, context + first_token + 1) // BLOCK_N * BLOCK_N
    full_to = tl.maximum(full_to, first_key)
    full_from = first_key
    first_valid = first_key
    if SLIDING_WINDOW > 0:
        first_valid = tl.maximum(first_key, context + first_token - SLIDING_WINDOW + 1)
        window_from = tl.maximum(last_position - SLIDING_WINDOW + 1, 0)
        full_from = tl.maximum(first_key, (window_from + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
        full_from = tl.minimum(full_from, last_key)
        full_to = tl.maximum(full_to, full_from)

    table_ptr = block_tables_ptr + seq * stride_bt
    k_head_ptr = k_cache_ptr + pid_head * stride_kh
    v_head_ptr = v_cache_ptr + pid_head * stride_kh
    acc = tl.full([BLOCK_M, HEAD_DIM_PADDED], 0.0, tl.float32)
    row_sum = tl.full([BLOCK_M], 0.0, tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if SLIDING_WINDOW > 0:
        acc, row_sum, row_max = _attend_range(
            acc, row_sum, row_max, q, position, k_head_ptr, v_head_ptr, table_ptr, first_key, full_from, first_valid,
            stride_kb, stride_kn, scale_log2, softcap, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, BLOCK_N,
            SLIDING_WINDOW, HAS_SOFTCAP, ONE_BLOCK_PER_TILE, True,
        )  # fmt: skip
    acc, row_sum, row_max = _attend_range(
        acc, row_sum, row_max, q, position, k_head_ptr, v_head_ptr, table_ptr, full_from, full_to, first_valid,
        stride_kb, stride_kn, scale_log2, softcap, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, BLOCK_N,
        SLIDING_WINDOW, HAS_SOFTCAP, ONE_BLOCK_PER_TILE, False,
    )  # fmt: skip
    acc, row_sum, row_max = _attend_range(
        acc, row_sum, row_max, q, position, k_head_ptr, v_head_ptr, table_ptr, full_to, last_key, first_valid,
        stride_kb, stride_kn, scale_log2, softcap, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, BLOCK_N,
        SLIDING_WINDOW, HAS_SOFTCAP, ONE_BLOCK_PER_TILE, True,
    )  # fmt: skip

    saw_key = row_sum > 0.0
    result = acc / tl.where(saw_key, row_sum, 1.0)[:, None]
    if partial < 0:
        out_ptrs = out_ptr + (q_row * stride_ot + head * stride_oh)[:, None] + offs_d[None, :]
        tl.store(out_ptrs, _rounded(result, out_ptr.dtype.element_ty), mask=in_tile)
    else:
        row = (partial + offs_m // GROUP) * num_q_heads + head
        lse = tl.where(saw_key, row_max + tl.log2(tl.where(saw_key, row_sum, 1.0)), float("-inf"))
        tl.store(partial_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], result, mask=in_tile)
        tl.store(partial_lse_ptr + row, lse, mask=is_row)


@triton.jit
def reduce_partials(
    partial_ptr,
    partial_lse_ptr,
    token_ptr,
    first_partial_ptr,
    num_partials_ptr,
    partial_stride_ptr,
    out_ptr,
    stride_ot,
    stride_oh,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    """Merge the partial results of one token and query head, each weighted by 2 ** lse, in the order of their keys.

    Grid: [entries, num_q_heads]. partial: [rows, num_q_heads, HEAD_DIM] fp32; partial_lse: [rows, num_q_heads] fp32.
    """
    pid_entry = tl.program_id(0)
    pid_head = tl.program_id(1).to(tl.int64)
    num_q_heads = tl.num_programs(1)
    token = tl.load(token_ptr + pid_entry).to(tl.int64)
    if token < 0:
        return
    first = tl.load(first_partial_ptr + pid_entry).to(tl.int64)
    count = tl.load(num_partials_ptr + pid_entry)
    stride = tl.load(partial_stride_ptr + pid_entry).to(tl.int64)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    in_head = offs_d < HEAD_DIM
    acc = tl.full([HEAD_DIM_PADDED], 0.0, tl.float32)
    weight_sum = tl.full([1], 0.0, tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    for i in range(count):
        row = (first + i * stride) * num_q_heads + pid_head
        lse = tl.load(partial_lse_ptr + row)
        new_top = tl.maximum(top, lse)
        # A split in which the window leaves no key has lse -inf and weight 0.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink, weight = tl.exp2(top - base), tl.exp2(lse - base)
        part = tl.load(partial_ptr + row * HEAD_DIM + offs_d, mask=in_head, other=0.0)
        acc = acc * shrink + part * weight
        weight_sum = weight_sum * shrink + weight
        top = new_top
    result = acc / weight_sum
    out_ptrs = out_ptr + token * stride_ot + pid_head * stride_oh + offs_d
    tl.store(out_ptrs, _rounded(result, out_ptr.dtype.element_ty), mask=in_head)


@triton.jit
def write_blocks(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    stride_kt,
    stride_khead,
    stride_vt,
    stride_vhead,
    stride_kb,
    stride_kh,
    stride_kn,
    NUM_KV_HEADS: tl.constexpr,
    NUM_KV_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Write K and V of one token, all heads, to its slot. Grid: [num_tokens]. Moves bits, so any dtype is exact."""
    pid_token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + pid_token).to(tl.int64)
    offs_h = tl.arange(0, NUM_KV_HEADS_PADDED).to(tl.int64)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    mask = (offs_h < NUM_KV_HEADS)[:, None] & (offs_d < HEAD_DIM)[None, :]
    target = (slot // BLOCK_SIZE) * stride_kb + (slot % BLOCK_SIZE) * stride_kn
    target = target + offs_h[:, None] * stride_kh + offs_d[None, :]
    k = tl.load(k_ptr + pid_token * stride_kt + offs_h[:, None] * stride_khead + offs_d[None, :], mask=mask, other=0.0)
    v = tl.load(v_ptr + pid_token * stride_vt + offs_h[:, None] * stride_vhead + offs_d[None, :], mask=mask, other=0.0)
    tl.store(k_cache_ptr + target, k, mask=mask)
    tl.store(v_cache_ptr + target, v, mask=mask)
