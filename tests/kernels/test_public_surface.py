"""What the public functions refuse, and what a batch computes from host integers."""

import os
import subprocess
import sys

import pytest
import torch

from guidevane_kernels import AttentionBatch, KVCache, paged_attention, provider_name, select_provider, write_kv


def new_cache(**changes):
    sizes = {"num_layers": 2, "num_blocks": 8, "block_size": 4, "num_kv_heads": 2, "head_dim": 8}
    return KVCache.alloc(**(sizes | {"dtype": torch.float32, "device": "cpu"} | changes))


def new_batch(**changes):
    lens = {"q_lens": [1, 3], "kv_lens": [6, 3], "block_ids": [[5, 2], [7]], "block_size": 4}
    return AttentionBatch.build(**(lens | {"device": "cpu"} | changes))


def test_batch_lays_out_tokens_blocks_and_slots():
    batch = AttentionBatch.build(
        q_lens=[1, 1, 0, 3], kv_lens=[6, 1, 2, 5], block_ids=[[5, 2], [7, 9], [3], [4, 1]], block_size=4, device="cpu"
    )

    assert batch.cu_q_lens.tolist() == [0, 1, 2, 2, 5]
    assert batch.kv_lens.tolist() == [6, 1, 2, 5]
    assert batch.block_tables.tolist() == [[5, 2], [7, 0], [3, 0], [4, 1]]
    assert batch.slot_mapping.tolist() == [2 * 4 + 1, 7 * 4, 4 * 4 + 2, 4 * 4 + 3, 1 * 4]
    assert (batch.num_decodes, batch.num_seqs, batch.num_tokens) == (2, 4, 5)
    assert [batch.cu_q_lens.dtype, batch.kv_lens.dtype, batch.block_tables.dtype] == [torch.int32] * 3
    assert batch.slot_mapping.dtype == torch.int64


def test_empty_batch_has_no_tokens():
    batch = AttentionBatch.build(q_lens=[], kv_lens=[], block_ids=[], block_size=4, device="cpu")

    assert (batch.num_seqs, batch.num_tokens, batch.cu_q_lens.tolist()) == (0, 0, [0])


def test_plan_is_made_once_for_all_layers():
    batch = new_batch()
    made = [batch.plan("key", lambda: object()) for _layer in range(3)]

    assert made[0] is made[1] is made[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_lens": [1]}, "1, 2 and 2 sequences"),
        ({"kv_lens": [6, 2]}, "sequence 1 has 3 query tokens and 2 keys"),
        ({"block_ids": [[5], [7]]}, "sequence 0 has 1 blocks of 4 tokens for 6 keys; lease 2 blocks"),
        ({"block_ids": [[5, 0], [7]]}, "sequence 0 has block id 0; ids start at 1"),
        ({"block_size": 0}, "block_size is 0"),
    ],
)
def test_batch_refuses_what_can_not_be_laid_out(changes, message):
    with pytest.raises(ValueError, match=message):
        new_batch(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 1}, "num_blocks is 1, must be at least 2"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"dtype": torch.float64}, "cache dtype torch.float64 is not supported"),
        ({"provider": "cutlass"}, "unknown kernels provider 'cutlass'"),
    ],
)
def test_cache_refuses_what_it_can_not_hold(changes, message):
    with pytest.raises(ValueError, match=message):
        new_cache(**changes)


@pytest.mark.parametrize(
    ("q", "options", "message"),
    [
        (torch.zeros(4, 3, 8), {}, "q has 3 heads, must be a multiple of the cache's 2 KV heads"),
        (torch.zeros(5, 4, 8), {}, r"q has shape \(5, 4, 8\), batch and cache ask for \(4, 4, 8\)"),
        (torch.zeros(4, 32), {}, "q has 2 dims, must have 3"),
        (torch.zeros(4, 4, 8, dtype=torch.bfloat16), {}, "q has dtype torch.bfloat16, the cache torch.float32"),
        (torch.zeros(4, 8, 4).transpose(1, 2), {}, "q has last stride 4, must be 1"),
        (torch.zeros(4, 4, 8), {"layer": 2}, "layer is 2, the cache has layers 0 to 1"),
        (torch.zeros(4, 4, 8), {"sliding_window": -1}, "sliding_window is -1"),
        (torch.zeros(4, 4, 8), {"softcap": -1.0}, "softcap is -1.0"),
        (torch.zeros(4, 4, 8), {"out": torch.zeros(4, 4, 4)}, "out has shape"),
        (torch.zeros(4, 4, 8), {"batch": new_batch(block_ids=[[5, 8], [7]])}, "batch uses block 8, the cache has"),
        (torch.zeros(4, 4, 8), {"batch": new_batch(block_size=8)}, "batch has block_size 8, the cache 4"),
    ],
)
def test_paged_attention_refuses_what_does_not_fit_the_cache(q, options, message):
    arguments = {"layer": 0, "batch": new_batch(), "scale": 1.0} | options
    layer, batch = arguments.pop("layer"), arguments.pop("batch")

    with pytest.raises(ValueError, match=message):
        paged_attention(q, new_cache(), layer, batch, **arguments)


def test_write_kv_refuses_keys_of_another_shape():
    with pytest.raises(ValueError, match=r"v has shape \(4, 2, 4\)"):
        write_kv(new_cache(), 0, torch.zeros(4, 2, 8), torch.zeros(4, 2, 4), new_batch())


def test_result_goes_to_the_given_buffer():
    out = torch.full((4, 2, 8), float("nan"))
    cache, batch = new_cache(), new_batch()
    write_kv(cache, 0, torch.ones(4, 2, 8), torch.ones(4, 2, 8), batch)

    result = paged_attention(torch.ones(4, 2, 8), cache, 0, batch, scale=1.0, out=out)

    assert result is out
    assert not out.isnan().any()


def test_cache_says_its_bytes_and_its_provider():
    cache = new_cache()
    per_block = KVCache.bytes_per_block(num_layers=2, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)

    assert per_block == 2 * 2 * 4 * 2 * 8 * 4
    assert cache.num_bytes == 8 * per_block
    assert provider_name(cache) == select_provider("cpu") == "torch"


def test_triton_is_refused_on_cpu_outside_of_the_interpreter():
    with pytest.raises(ValueError, match=r"it runs on CUDA, and elsewhere only under TRITON_INTERPRET=1|not installed"):
        select_provider("cpu", "triton")


def test_unknown_provider_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("GUIDEVANE_KERNELS_PROVIDER", "cutlass")
    with pytest.raises(ValueError, match="unknown kernels provider 'cutlass'; use auto, torch or triton"):
        select_provider("cpu")


def test_environment_overrides_the_requested_provider(monkeypatch):
    monkeypatch.setenv("GUIDEVANE_KERNELS_PROVIDER", "torch")
    assert select_provider("cpu", "triton") == "torch"


def test_package_serves_on_cpu_where_triton_is_not_installed():
    code = (
        "import sys, torch; assert 'triton' not in sys.modules; sys.modules['triton'] = None\n"
        "from guidevane_kernels import KVCache, provider_name\n"
        "cache = KVCache.alloc(num_layers=1, num_blocks=2, block_size=1, num_kv_heads=1, head_dim=8,\n"
        "                      dtype=torch.float32, device='cpu')\n"
        "print(provider_name(cache))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (0, "torch\n"), done.stderr
