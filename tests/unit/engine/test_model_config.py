"""What config.json and GGUF metadata say, and what is refused: every refusal names file, field and value."""

from typing import Any

import pytest
import torch

from guidevane_runtime.engine.model_config import LinearRopeScaling, Llama3RopeScaling, ModelConfig
from guidevane_runtime.engine.model_rope import inverse_frequencies
from guidevane_runtime.errors import BrokenModel, ModelLoadError, UnsupportedModel

HF = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
GGUF = {
    "general.architecture": "llama",
    "llama.vocab_size": 32000,
    "llama.embedding_length": 2048,
    "llama.feed_forward_length": 5632,
    "llama.block_count": 22,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 2048,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def from_hf(generation: dict[str, Any] | None = None, **changes: object) -> ModelConfig:
    return ModelConfig.from_hf({**HF, **changes}, generation or {}, "m/config.json")


def from_gguf(**changes: object) -> ModelConfig:
    renamed = {name.replace("__", "."): value for name, value in changes.items()}
    return ModelConfig.from_gguf({**GGUF, **renamed}, tied=False, source="m.gguf")


def test_both_formats_tell_the_same_story() -> None:
    assert from_gguf() == from_hf()


def test_old_and_new_spelling_of_rope_mean_the_same() -> None:
    old = from_hf(rope_theta=500000.0, rope_scaling=LLAMA3)
    new = from_hf(rope_parameters={**LLAMA3, "rope_theta": 500000.0})

    assert old == new
    assert old.rope_theta == 500000.0
    assert old.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 8192)


def test_the_oldest_spelling_of_linear_rope_is_read() -> None:
    assert from_hf(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == LinearRopeScaling(2.0)
    assert from_gguf(llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.0).rope_scaling == (
        LinearRopeScaling(2.0)
    )


def test_generation_config_decides_what_ends_a_text() -> None:
    assert from_hf({"eos_token_id": [5, 6]}).eos_token_ids == {5, 6}
    assert from_hf().eos_token_ids == {2}
    assert from_gguf(tokenizer__ggml__eot_token_id=9).eos_token_ids == {2, 9}


def test_gguf_divisors_are_llama3_scaling_in_other_words() -> None:
    plain, scaled = from_hf(rope_theta=500000.0), from_hf(rope_theta=500000.0, rope_scaling=LLAMA3)
    divisors = inverse_frequencies(plain) / inverse_frequencies(scaled)

    assert divisors.min() == 1.0
    assert divisors.max() == 8.0
    torch.testing.assert_close(inverse_frequencies(plain, divisors), inverse_frequencies(scaled))


REFUSED_HF = {
    "architecture": ({"architectures": ["MambaForCausalLM"]}, UnsupportedModel, "'MambaForCausalLM'"),
    "attention bias": ({"attention_bias": True}, UnsupportedModel, "attention_bias"),
    "mlp bias": ({"mlp_bias": True}, UnsupportedModel, "mlp_bias"),
    "activation": ({"hidden_act": "gelu"}, UnsupportedModel, "'gelu'"),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, UnsupportedModel, "'awq'"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, UnsupportedModel, "partial_rotary_factor is 0.5"),
    "rope": ({"rope_scaling": {"rope_type": "yarn"}}, UnsupportedModel, "'yarn'"),
    "rope factor": ({"rope_scaling": {"rope_type": "llama3"}}, BrokenModel, "factor is missing"),
    "missing field": ({"vocab_size": None}, BrokenModel, "vocab_size is missing"),
    "wrong type": ({"hidden_size": "2048"}, BrokenModel, "hidden_size is '2048', an integer"),
    "zero": ({"num_hidden_layers": 0}, BrokenModel, "num_layers is 0"),
    "heads": ({"num_key_value_heads": 5}, BrokenModel, "32 attention heads can't share 5"),
    "end": ({"eos_token_id": [2, 32000]}, BrokenModel, "token 32000 ends a text, the model has 0 to 31999"),
    "odd head": ({"head_dim": 63}, BrokenModel, "head_dim is 63"),
}


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED_HF.values(), ids=REFUSED_HF)
def test_a_config_that_cannot_be_computed_is_refused_by_name(
    changes: dict[str, object], error: type[ModelLoadError], words: str
) -> None:
    with pytest.raises(error) as caught:
        from_hf(**changes)

    assert words in str(caught.value)
    assert "m/config.json" in str(caught.value)


REFUSED_GGUF = {
    "architecture": ({"general__architecture": "mamba"}, UnsupportedModel, "'mamba'"),
    "experts": ({"llama__expert_count": 8}, UnsupportedModel, "llama.expert_count is 8"),
    "window": ({"llama__attention__sliding_window": 4096}, UnsupportedModel, "sliding_window is 4096"),
    "rope": ({"llama__rope__scaling__type": "yarn"}, UnsupportedModel, "'yarn'"),
    "partial rotary": ({"llama__rope__dimension_count": 32}, UnsupportedModel, "rope.dimension_count is 32"),
    "end": ({"tokenizer__ggml__eot_token_id": 32000}, BrokenModel, "token 32000 ends a text"),
    "missing": ({"llama__block_count": None}, BrokenModel, "llama.block_count is missing"),
}


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED_GGUF.values(), ids=REFUSED_GGUF)
def test_a_gguf_that_cannot_be_computed_is_refused_by_name(
    changes: dict[str, object], error: type[ModelLoadError], words: str
) -> None:
    with pytest.raises(error) as caught:
        from_gguf(**changes)

    assert words in str(caught.value)
    assert "m.gguf" in str(caught.value)
