"""The torch provider on CPU, through the public functions, against the reference in fp64."""

import pytest
import torch

from guidevane_kernels import AttentionBatch, KVCache, paged_attention
from guidevane_kernels.torch_provider import padded_decode_keys

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXED = {"q_lens": (1, 1, 1, 0, 5, 1, 63, 129), "kv_lens": (17, 512, 513, 9, 40, 1, 63, 333)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (8, 2), (8, 1)], ids=["group1", "group3", "group4", "group8"])
def test_mixed_batch_matches_fp64_for_every_group_size(lab, new_case, dtype, heads):
    case = new_case(**MIXED, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=64, dtype=dtype)
    lab.assert_matches_fp64(case, "torch")


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_every_head_dim_and_block_size_matches_fp64(lab, new_case, head_dim, block_size):
    lab.assert_matches_fp64(new_case(**MIXED, head_dim=head_dim, block_size=block_size), "torch")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("sliding_window", [0, 1, 15, 16, 17, 128, 200, 1000])
def test_windows_and_softcap_match_fp64(lab, new_case, dtype, softcap, sliding_window):
    case = new_case(**MIXED, sliding_window=sliding_window, softcap=softcap, dtype=dtype)
    lab.assert_matches_fp64(case, "torch")


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 127, 128, 129, 256, 1000])
def test_prompt_of_odd_size_without_context_matches_fp64(lab, new_case, num_tokens):
    lab.assert_matches_fp64(new_case(q_lens=(num_tokens,), kv_lens=(num_tokens,)), "torch")


def test_chunk_deep_inside_a_prompt_matches_fp64(lab, new_case):
    lab.assert_matches_fp64(new_case(q_lens=(200, 2), kv_lens=(1201, 1003), sliding_window=150), "torch")


def test_more_decodes_than_one_gather_takes_match_fp64(lab, new_case):
    lengths = tuple(400 + 7 * i for i in range(20))
    lab.assert_matches_fp64(new_case(q_lens=(1,) * 20, kv_lens=lengths), "torch")


def test_large_scores_do_not_overflow(lab, new_case):
    lab.assert_matches_fp64(new_case(**MIXED, scores_std=300.0, softcap=30.0), "torch")


def test_batch_without_tokens_gives_an_empty_result(lab, new_case):
    result = lab.run(new_case(q_lens=(0, 0), kv_lens=(3, 0)), "torch")

    assert result.shape == (0, 4, 32)


def test_nan_of_one_sequence_stays_with_it(lab, new_case):
    case = new_case(q_lens=(1, 1, 4), kv_lens=(33, 34, 20))
    inputs = lab.inputs(case)
    inputs.values[1][7] = float("nan")

    result = lab.run(case, "torch", inputs=inputs)

    assert result[1].isnan().all()
    assert not result[[0, 2, 3, 4, 5]].isnan().any()


def test_layers_do_not_share_keys(lab, new_case):
    case = new_case(q_lens=(3,), kv_lens=(3,))
    cache = lab.alloc(case, "torch")
    inputs = lab.inputs(case)
    lab.run(case, "torch", cache, inputs)  # writes layer 1 only
    batch = AttentionBatch.build(q_lens=[3], kv_lens=[3], block_ids=inputs.block_ids, block_size=16, device="cpu")

    assert paged_attention(inputs.q, cache, 0, batch, scale=1.0).isnan().all()


def test_decode_lengths_are_padded_by_an_eighth_at_most_beyond_the_smallest_step():
    for num_keys in range(1, 5000):
        padded = padded_decode_keys(num_keys)
        assert num_keys <= padded < num_keys + max(16, num_keys / 8 + 1)


def test_fresh_cache_has_a_finite_null_block():
    cache = KVCache.alloc(
        num_layers=1, num_blocks=2, block_size=4, num_kv_heads=1, head_dim=8, dtype=torch.float32, device="cpu"
    )
    assert not cache._k.isnan().any()  # type: ignore[attr-defined]
