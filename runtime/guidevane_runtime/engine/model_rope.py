"""Rotary embeddings: frequencies, their stretching for long context, and the table of angles."""

import math

import torch

from guidevane_runtime.engine.model_config import LinearRopeScaling, Llama3RopeScaling, ModelConfig
from guidevane_runtime.errors import BrokenModel


class RopeTable:
    """Cosine and sine of every position, float32, computed once."""

    def __init__(
        self, config: ModelConfig, *, max_positions: int, factors: torch.Tensor | None, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(config, factors))
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(device)
        # Signed, so that a rotation is one roll and one multiply-add.
        self._sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(device)

    def rows(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and signed sin of these positions, each [num_tokens, 1, head_dim] in `dtype`."""
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def inverse_frequencies(config: ModelConfig, factors: torch.Tensor | None = None) -> torch.Tensor:
    """[head_dim / 2] float32: radians per position of each pair. `factors` (from a GGUF) divide them."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if factors is not None:
        if factors.shape != frequencies.shape:
            raise BrokenModel(
                f"rope_freqs.weight has shape {list(factors.shape)}, a head of {config.head_dim} dimensions "
                f"needs [{config.head_dim // 2}]"
            )
        frequencies = frequencies / factors.float()
    match config.rope_scaling:
        case LinearRopeScaling(factor=factor):
            return frequencies / factor
        case Llama3RopeScaling() as scaling:
            return _llama3(frequencies, scaling)
        case _:
            return frequencies


def _llama3(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Keep short wavelengths, stretch long ones by `factor`, blend between (Llama 3.1's published inference code)."""
    wavelengths = 2 * math.pi / frequencies
    # turns that a frequency makes over the original context, placed in [low, high] and clipped
    blend = (scaling.original_max_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    kept = blend.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
