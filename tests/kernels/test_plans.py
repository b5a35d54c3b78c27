"""Work lists: every query token meets every key it sees exactly once, in tiles the kernels can walk."""

import random
from itertools import pairwise

import pytest

from guidevane_kernels.plans import AttentionShape, padded_grid, plan_attention, plan_work

SHAPES = {
    "group3": AttentionShape(9, 3, 64, 16, "bf16"),
    "group4 window": AttentionShape(32, 8, 128, 64, "bf16", sliding_window=100),
    "group8": AttentionShape(8, 1, 80, 16, "fp32"),
    "group48": AttentionShape(48, 1, 128, 16, "bf16"),
}


def ranges_by_token(plan, work, q_lens):
    """Return {(seq, token): sorted key ranges} over all tiles, after the checks that hold for each tile."""
    found = {}
    for tiles, spec in ((work.decode, plan.decode), (work.prefill, plan.prefill)):
        block_q, block_n = spec.constants["BLOCK_Q"], spec.constants["BLOCK_N"]
        for seq, first_token, first_key, last_key in zip(
            tiles.seq, tiles.first_token, tiles.first_key, tiles.last_key, strict=True
        ):
            if seq < 0:
                continue
            assert first_key % block_n == 0 and first_key < last_key
            for token in range(first_token, min(first_token + block_q, q_lens[seq])):
                found.setdefault((seq, token), []).append((first_key, last_key))
    return {token: sorted(ranges) for token, ranges in found.items()}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("seed", range(5))
def test_every_token_meets_the_keys_it_sees_exactly_once(shape, seed):
    rng = random.Random(seed)
    q_lens = [rng.choice([0, 1, 1, 2, 5, 6, 33, 500]) for _ in range(20)]
    kv_lens = [q_len + rng.choice([0, 1, 63, 64, 700, 3000]) for q_len in q_lens]
    plan = plan_attention(shape, 90)

    found = ranges_by_token(plan, plan_work(plan, q_lens, kv_lens), q_lens)

    assert set(found) == {(seq, token) for seq, q_len in enumerate(q_lens) for token in range(q_len)}
    for (seq, token), ranges in found.items():
        position = kv_lens[seq] - q_lens[seq] + token
        first_seen = max(0, position - shape.sliding_window + 1) if shape.sliding_window else 0
        assert ranges[0][0] <= first_seen and position < ranges[-1][1] <= kv_lens[seq]
        assert all(left[1] == right[0] for left, right in pairwise(ranges))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_each_partial_row_is_written_by_one_tile_and_reduced_once(shape):
    q_lens, kv_lens = [1, 2, 1, 1, 300], [5000, 1025, 1024, 1026, 2500]
    plan = plan_attention(shape, 90)
    work = plan_work(plan, q_lens, kv_lens, kv_chunk=256)

    written = [
        row + i
        for seq, row in zip(work.decode.seq, work.decode.partial, strict=True)
        if row >= 0
        for i in range(q_lens[seq])
    ]
    reduced = [
        first + i * stride
        for first, count, stride in zip(
            work.reduce.first_partial, work.reduce.num_partials, work.reduce.stride, strict=True
        )
        for i in range(count)
    ]
    assert sorted(written) == sorted(reduced) == list(range(work.num_partials))


def test_splits_of_a_sequence_do_not_depend_on_its_batch_mates():
    plan = plan_attention(SHAPES["group4 window"], 90)
    alone = plan_work(plan, [1], [5000])
    batched = plan_work(plan, [1] * 40, [17] * 39 + [5000])

    def cuts(work, seq):
        tiles = zip(work.decode.seq, work.decode.first_key, work.decode.last_key, strict=True)
        return [(first, last) for owner, first, last in tiles if owner == seq]

    assert cuts(alone, 0) == cuts(batched, 39)


def test_grids_take_few_sizes_and_keep_lists_aligned():
    grids = {padded_grid(n) for n in range(1, 257)}

    assert grids == {4, 8, 16, 32, 64, 128, 192, 256}
    assert padded_grid(0) == 0
    assert all(padded_grid(n) >= n for n in range(1, 1000))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (AttentionShape(8, 8, 512, 16, "bf16"), "head_dim is 512, limit 256; set GUIDEVANE_KERNELS_PROVIDER=torch"),
        (AttentionShape(128, 1, 64, 16, "bf16"), "128 query heads share a KV head, limit 64"),
    ],
)
def test_shapes_without_a_plan_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        plan_attention(shape, 90)


def test_chunk_that_cuts_a_tile_is_refused():
    plan = plan_attention(SHAPES["group3"], 90)
    with pytest.raises(ValueError, match="kv_chunk is 100, must be a multiple of BLOCK_N 64"):
        plan_work(plan, [1], [5], kv_chunk=100)
