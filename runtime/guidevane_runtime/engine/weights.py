"""Where weights come from: one interface over a HuggingFace directory and a GGUF file.

A source speaks HuggingFace's names and layouts (`model.layers.0.self_attn.q_proj.weight`, [out, in]); each format
translates on its side. It knows no device and no fusing: that is weights_load.
"""

from pathlib import Path
from typing import Protocol

import torch

from guidevane_runtime.engine.model_config import ModelConfig
from guidevane_runtime.model_source import local_model_path

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
ROPE_FACTORS = "rope_freqs.weight"
"""[head_dim / 2], float32: what a GGUF divides each rotary frequency by. HuggingFace files have none."""


class WeightSource(Protocol):
    """An opened model: its config at once, its tensors on demand."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, by HuggingFace name, without reading data."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype; float32 where the file stores it quantised."""
        ...


def open_source(model_path: str) -> WeightSource:
    """Open what `model_path` names: see model_source."""
    # Imported here: gguf is a slow import, and only one of the two formats is needed.
    from guidevane_runtime.engine.weights_gguf import GgufSource
    from guidevane_runtime.engine.weights_hf import HuggingFaceSource

    path = local_model_path(model_path)
    return GgufSource(path) if path.is_file() else HuggingFaceSource(path)
