"""attend_tiles, reduce_partials and write_blocks through the public functions, against the reference in fp64."""

import pytest
import torch
import triton

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Decode of one, two (exact), three splits; empty; chunks; one token; a prompt of a tile and more.
MIXED = {"q_lens": (1, 1, 1, 0, 5, 1, 17), "kv_lens": (17, 128, 131, 9, 40, 1, 67)}


def test_kernels_run_on_the_interpreter():
    assert triton.knobs.runtime.interpret


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((3, 3), DTYPES[0]), *(((9, 3), dtype) for dtype in DTYPES), ((4, 1), DTYPES[1]), ((8, 1), DTYPES[1])],
    ids=str,
)
def test_mixed_batch_matches_fp64_for_every_group_size(assert_matches_fp64, new_case, heads, dtype):
    assert_matches_fp64(new_case(**MIXED, num_q_heads=heads[0], num_kv_heads=heads[1], dtype=dtype))


@pytest.mark.parametrize(
    ("head_dim", "block_size"),
    [(32, 1), (32, 64), (64, 4), (64, 64), (80, 16), (80, 64), (128, 1), (128, 16), (128, 64), (256, 32)],
)
def test_every_head_dim_and_block_size_matches_fp64(assert_matches_fp64, new_case, head_dim, block_size):
    case = new_case(
        q_lens=(1, 1, 5), kv_lens=(17, 131, 40), num_q_heads=2, num_kv_heads=1, head_dim=head_dim, block_size=block_size
    )
    assert_matches_fp64(case)


@pytest.mark.parametrize(
    ("sliding_window", "block_size"),
    # 66 and 107: the last key out of sight of a decode, and of a prompt's last token, is the first one of a whole tile.
    [(1, 16), (15, 64), (16, 16), (17, 64), (63, 16), (64, 64), (66, 16), (107, 64), (1000, 64)],
)
def test_windows_match_fp64_at_tile_and_block_edges(assert_matches_fp64, new_case, sliding_window, block_size):
    case = new_case(
        q_lens=(1, 1, 20), kv_lens=(30, 131, 300), num_q_heads=2, num_kv_heads=1,
        sliding_window=sliding_window, block_size=block_size, dtype=torch.bfloat16,
    )  # fmt: skip
    assert_matches_fp64(case)


@pytest.mark.parametrize("sliding_window", [0, 20])
def test_softcap_matches_fp64_where_its_exponential_overflows(assert_matches_fp64, new_case, sliding_window):
    case = new_case(
        **MIXED, num_q_heads=3, num_kv_heads=1, softcap=2.0, scores_std=300.0, sliding_window=sliding_window
    )
    assert_matches_fp64(case)


def test_spread_scores_match_fp64_without_softcap(assert_matches_fp64, new_case):
    assert_matches_fp64(new_case(**MIXED, scores_std=10.0))


def test_speculative_decode_of_several_tokens_is_split_and_matches_fp64(assert_matches_fp64, new_case):
    assert_matches_fp64(new_case(q_lens=(4, 3), kv_lens=(200, 129), num_q_heads=4, num_kv_heads=1))


@pytest.mark.parametrize("num_tokens", [63, 129])
def test_prompt_of_odd_size_matches_fp64(assert_matches_fp64, new_case, num_tokens):
    case = new_case(q_lens=(num_tokens,), kv_lens=(num_tokens,), num_q_heads=3, num_kv_heads=1, dtype=torch.bfloat16)
    assert_matches_fp64(case)


def test_group_larger_than_the_smallest_tile_matches_fp64(assert_matches_fp64, new_case):
    assert_matches_fp64(new_case(q_lens=(1, 7), kv_lens=(70, 20), num_q_heads=24, num_kv_heads=1))


def test_default_chunk_splits_long_decodes(lab, new_case, new_triton_cache):
    case = new_case(q_lens=(1,), kv_lens=(1100,), num_q_heads=1, num_kv_heads=1)

    lab.assert_matches_fp64(case, "triton", new_triton_cache(case, kv_chunk=1024))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequence_alone_gives_the_same_bits_as_in_a_batch(lab, new_case, new_triton_cache, dtype):
    case = new_case(**MIXED, num_q_heads=3, num_kv_heads=1, dtype=dtype)

    lab.assert_alone_equals_batched(case, "triton", new_triton_cache)


def test_triton_and_torch_providers_agree(lab, new_case, new_triton_cache):
    case = new_case(**MIXED)
    inputs = lab.inputs(case)

    triton_result = lab.run(case, "triton", new_triton_cache(case), inputs)

    lab.assert_close(triton_result, lab.run(case, "torch", inputs=inputs).double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_moves_bits_and_touches_no_other_slot(lab, new_case, new_triton_cache, dtype):
    case = new_case(q_lens=(5, 0, 1), kv_lens=(5, 3, 18), num_q_heads=3, num_kv_heads=3, head_dim=80, dtype=dtype)
    cache, inputs = new_triton_cache(case), lab.inputs(case)

    lab.run(case, "triton", cache, inputs)

    for pool, rows in ((cache._k, inputs.keys), (cache._v, inputs.values)):
        for seq, ids in enumerate(inputs.block_ids):
            # [blocks, heads, block_size, head_dim] -> [slots, heads, head_dim]
            slots = pool[1][ids].transpose(1, 2).flatten(0, 1)
            assert torch.equal(slots[: case.kv_lens[seq]], rows[seq])
            assert slots[case.kv_lens[seq] :].isnan().all()
        assert pool[1][0].isnan().all() and pool[0].isnan().all()
