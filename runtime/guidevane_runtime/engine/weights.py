"""Where weights come from: one interface over a HuggingFace directory and a GGUF file.

A source speaks HuggingFace's names and layouts (`model.layers.0.self_attn.q_proj.weight`, [out, in]); each format
translates on its side. It knows no device and no fusing: that is weights_load.
"""

from pathlib import Path
from typing import Protocol

import torch

from guidevane_runtime.engine.model_config import ModelConfig
from guidevane_runtime.errors import ModelNotFound, UnsupportedModel

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
ROPE_FACTORS = "rope_freqs.weight"
"""[head_dim / 2], float32: what a GGUF divides each rotary frequency by. HuggingFace files have none."""

FILE_SCHEME = "file://"


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
    """Open what `model_path` names: a GGUF file, a folder with exactly one, or a HuggingFace directory."""
    # Imported here: gguf is a slow import, and only one of the two formats is needed.
    from guidevane_runtime.engine.weights_gguf import GgufSource
    from guidevane_runtime.engine.weights_hf import HuggingFaceSource

    path = Path(model_path.removeprefix(FILE_SCHEME))
    if not path.exists():
        raise ModelNotFound(f"model path {path} does not exist; give a HuggingFace directory or a GGUF file")
    if path.is_file():
        return GgufSource(path)
    if (path / "config.json").exists():
        return HuggingFaceSource(path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return GgufSource(ggufs[0])
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        raise UnsupportedModel(f"{path} holds {len(ggufs)} GGUF files ({names}); name one of them as the model path")
    raise ModelNotFound(f"{path} holds no model: neither config.json nor a *.gguf file is in it")
