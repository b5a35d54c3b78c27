"""The reference against attention written out key by key, in fp64."""

import math

import pytest
import torch

from guidevane_kernels.reference import reference_attention


def attention_by_hand(q, k, v, position, scale, sliding_window, softcap):
    """One query head of one token: a loop over keys in Python floats."""
    weights = []
    for key in range(k.shape[0]):
        is_seen = key <= position and not (sliding_window and key <= position - sliding_window)
        score = float(q @ k[key]) * scale
        score = softcap * math.tanh(score / softcap) if softcap else score
        weights.append(math.exp(score) if is_seen else 0.0)
    return sum(weight * row for weight, row in zip(weights, v, strict=True)) / sum(weights)


@pytest.mark.parametrize("sliding_window", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_reference_equals_attention_written_out_key_by_key(sliding_window, softcap):
    torch.manual_seed(1)
    q_lens, kv_lens = [2, 0, 1, 4], [5, 3, 1, 4]
    q = torch.randn(sum(q_lens), 6, 8, dtype=torch.float64)
    keys, values = ([torch.randn(kv_len, 2, 8, dtype=torch.float64) for kv_len in kv_lens] for _ in range(2))

    options = {"scale": 0.3, "sliding_window": sliding_window, "softcap": softcap}
    result = reference_attention(q, keys, values, q_lens=q_lens, dtype=torch.float64, **options)

    token = 0
    for seq, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for position in range(kv_len - q_len, kv_len):
            for head in range(6):
                k, v = keys[seq][:, head // 3], values[seq][:, head // 3]
                expected = attention_by_hand(q[token, head], k, v, position, 0.3, sliding_window, softcap)
                torch.testing.assert_close(result[token, head], expected, rtol=1e-12, atol=1e-12)
            token += 1


def test_fp32_reference_is_as_near_to_fp64_as_fp32_allows(lab, new_case):
    case = new_case(q_lens=(1, 63, 129), kv_lens=(1000, 63, 300), num_q_heads=8, head_dim=64)
    inputs = lab.inputs(case)

    lab.assert_close(lab.reference(case, inputs, torch.float32), lab.reference(case, inputs))
