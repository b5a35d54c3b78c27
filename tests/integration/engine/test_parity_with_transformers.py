"""Same weights in float32, same greedy tokens as HuggingFace transformers, token for token.

transformers scores prompt and answer in one pass: if at every position its likeliest next token is ours, its own
greedy decoding would have given the same answer. One prompt is decoded by transformers itself to show that.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from guidevane_kernels import AttentionBatch, KVCache
from guidevane_runtime.core.messages import SamplingParams
from guidevane_runtime.engine.model import LlamaModel
from guidevane_runtime.engine.runner import LoadedModel
from guidevane_runtime.engine.weights import open_source
from guidevane_runtime.engine.weights_load import load_weights

NUM_TOKENS = 64
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0)
LOGIT_TOLERANCE = 1e-4
"""float32, relative to the largest logit: what two orders of summation may differ by."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    "one head per kv head": {"num_key_value_heads": 6},
    "wide heads": {"head_dim": 16},
}


def random_prompts(vocab_size: int, num_prompts: int, max_len: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, max_len, (num_prompts,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def scores_of(reference: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' logits, [len(tokens), vocab_size]."""
    return reference(torch.tensor([tokens])).logits[0]


def likeliest_after(reference: Any, prompt: list[int], output: list[int]) -> list[int]:
    """transformers' greedy choice at each position of our output."""
    scores = scores_of(reference, prompt + output)
    return scores[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


@torch.inference_mode()
def our_scores(path: Path, tokens: list[int]) -> torch.Tensor:
    """Our logits of every position, through a cache of our own."""
    source = open_source(str(path))
    config = source.config
    weights = load_weights(source, dtype=torch.float32, device=torch.device("cpu"))
    model = LlamaModel(config, weights, max_model_len=len(tokens))
    cache = KVCache.alloc(
        num_layers=config.num_layers,
        num_blocks=len(tokens) + 1,
        block_size=4,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device="cpu",
    )
    blocks = list(range(1, len(tokens) + 1))
    batch = AttentionBatch.build(
        q_lens=[len(tokens)], kv_lens=[len(tokens)], block_ids=[blocks], block_size=4, device="cpu"
    )
    return model.forward(torch.tensor(tokens), torch.arange(len(tokens)), batch, cache, None)


@pytest.fixture(scope="module")
def demo_reference(demo_gguf: Path) -> Any:
    """The demo model as transformers itself reads the GGUF: its own dequantisation, row order and config."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = LlamaConfig(**load_gguf_checkpoint(str(demo_gguf), return_tensors=False)["config"])
    model = LlamaForCausalLM(config).eval()
    tensors = load_gguf_checkpoint(str(demo_gguf), return_tensors=True, model_to_load=model)["tensors"]
    left = model.load_state_dict(tensors, strict=False)
    assert not left.unexpected_keys
    assert left.missing_keys == ["lm_head.weight"], "tied to the embedding"
    return model


@pytest.fixture(scope="module")
def demo_model(load: Callable[..., LoadedModel], demo_gguf: Path) -> LoadedModel:
    return load(demo_gguf, kv_cache_bytes=256 << 20)


@pytest.mark.model
def test_the_demo_model_answers_twelve_prompts_as_transformers_does(
    demo_model: LoadedModel, demo_reference: Any, demo_prompts: list[list[int]], drive: Any
) -> None:
    outputs = drive(demo_model).generate(demo_prompts, [GREEDY] * len(demo_prompts), num_tokens=NUM_TOKENS)

    expected = [
        likeliest_after(demo_reference, prompt, output) for prompt, output in zip(demo_prompts, outputs, strict=True)
    ]
    assert len(demo_prompts) == 12
    assert outputs == expected


@pytest.mark.model
def test_the_demo_model_equals_greedy_decoding_by_transformers_itself(
    demo_model: LoadedModel, demo_reference: Any, demo_prompts: list[list[int]], drive: Any
) -> None:
    prompt = torch.tensor([demo_prompts[0]])
    generated = demo_reference.generate(
        prompt,
        # The model pads with its end token, which a chat prompt holds too: nothing here is padding.
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )

    (output,) = drive(demo_model).generate([demo_prompts[0]], [GREEDY], num_tokens=NUM_TOKENS)

    assert output == generated[0, prompt.shape[1] :].tolist()


@pytest.mark.model
def test_the_demo_models_logits_are_those_of_transformers(
    demo_gguf: Path, demo_reference: Any, demo_prompts: list[list[int]]
) -> None:
    ours, theirs = our_scores(demo_gguf, demo_prompts[1]), scores_of(demo_reference, demo_prompts[1])

    assert (ours - theirs).abs().max() <= LOGIT_TOLERANCE * theirs.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_safetensors_model_decodes_as_transformers_does(
    variant: str, tiny_model_dir: Callable[..., Path], load: Callable[..., LoadedModel], drive: Any
) -> None:
    from transformers import LlamaForCausalLM

    path = tiny_model_dir(**VARIANTS[variant])
    prompts = random_prompts(199, num_prompts=10, max_len=100)

    outputs = drive(load(path)).generate(prompts, [GREEDY] * len(prompts), num_tokens=NUM_TOKENS)

    reference = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    expected = [likeliest_after(reference, prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
    assert outputs == expected


def test_shards_with_an_index_are_one_model(tiny_model_dir: Callable[..., Path]) -> None:
    whole, sharded = tiny_model_dir(), tiny_model_dir(max_shard_size="30KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1

    torch.testing.assert_close(our_scores(sharded, [5, 6, 7]), our_scores(whole, [5, 6, 7]), rtol=0, atol=0)
