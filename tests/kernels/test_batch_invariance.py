"""The result of a sequence does not depend on its batch mates.

MKL, which multiplies fp32 matrices, rounds by the alignment of its buffers, and those differ from thread to thread.
So the same bits on several threads need MKL_CBWR=AUTO,STRICT, under which test_own_processes.py runs this file again.
"""

import os

import pytest
import torch

IS_MKL_STRICT = "STRICT" in os.environ.get("MKL_CBWR", "")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def case(request, new_case):
    return new_case(
        # 16 decodes of near and equal lengths, so that they share gathers; then prefills, and a decode among them.
        q_lens=(*(1,) * 16, 7, 1, 130),
        kv_lens=(*range(505, 519), 512, 512, 90, 512, 200),
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        dtype=request.param,
    )


@pytest.mark.parametrize("threads", [1, 2] if IS_MKL_STRICT else [1])
def test_sequence_alone_gives_the_same_bits_as_in_a_batch(lab, case, threads):
    torch.set_num_threads(threads)

    lab.assert_alone_equals_batched(case, "torch")


def test_sequence_alone_gives_the_same_bits_as_in_a_batch_under_a_window(lab, new_case):
    case = new_case(q_lens=(1, 1, 1, 7, 130), kv_lens=(99, 512, 513, 90, 200), sliding_window=100)

    lab.assert_alone_equals_batched(case, "torch")


def test_sequence_alone_differs_by_rounding_only_on_two_threads(lab, new_case):
    torch.set_num_threads(2)
    case = new_case(q_lens=(1, 1, 1, 30), kv_lens=(510, 511, 512, 90), num_q_heads=9, num_kv_heads=3, head_dim=64)

    assert lab.largest_distance_alone_to_batched(case, "torch") <= 1e-6
