"""GGUF files: metadata, dequantisation, and the way back from llama.cpp's row order to HuggingFace's."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from guidevane_runtime.engine.model_config import ModelConfig
from guidevane_runtime.engine.weights import EMBED, FINAL_NORM, LM_HEAD, ROPE_FACTORS
from guidevane_runtime.errors import BrokenModel, UnsupportedModel

MAGIC = b"GGUF"

HF_NAMES = {
    "token_embd.weight": EMBED,
    "output_norm.weight": FINAL_NORM,
    "output.weight": LM_HEAD,
    "rope_freqs.weight": ROPE_FACTORS,
}
HF_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class GgufSource:
    """One GGUF file, memory-mapped; a tensor is dequantised when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = _open_reader(path)
        self._tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
        self.shapes = {
            # ggml writes the fastest dimension first
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        self.config = ModelConfig.from_gguf(_metadata(reader), tied=LM_HEAD not in self._tensors, source=str(path))

    def read(self, name: str) -> torch.Tensor:
        """float32, in HuggingFace's row order."""
        tensor = self._tensors[name]
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, KeyError) as error:
            raise UnsupportedModel(
                f"{self.path}: tensor {tensor.name} is stored as {tensor.tensor_type.name}, "
                "which can't be dequantised; use a file quantised as Q4_K, Q8_0 or the like, or F16"
            ) from error
        # A copy: what came out unchanged (F32) is a read-only view of the file.
        weight = torch.from_numpy(np.array(values, dtype=np.float32)).reshape(self.shapes[name])
        if name.endswith("q_proj.weight"):
            return unpermute(weight, self.config.num_heads)
        if name.endswith("k_proj.weight"):
            return unpermute(weight, self.config.num_kv_heads)
        return weight


def unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's reordering of the rows of q and k, [num_heads * head_dim, in].

    It rotates neighbours (0, 1), (2, 3), ...; HuggingFace rotates halves (0, d/2), (1, d/2 + 1), ...
    """
    rows, columns = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, half, 2, columns).transpose(1, 2).reshape(rows, columns)


def _open_reader(path: Path) -> gguf.GGUFReader:
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
    if magic != MAGIC:
        raise UnsupportedModel(
            f"{path} is not a GGUF file (it starts with {magic!r}); give a GGUF file or a HuggingFace directory"
        )
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise BrokenModel(f"{path} is cut short or damaged ({error}); download or copy it again") from error


def _metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    """Scalars as they are; of the long arrays only the length counts here."""
    found: dict[str, Any] = {}
    for key, field in reader.fields.items():
        is_array = bool(field.types) and field.types[0] == gguf.GGUFValueType.ARRAY
        found[key] = range(len(field.data)) if is_array else field.contents()
    return found


def _hf_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if layer is None:
        return HF_NAMES.get(name, name)
    number, rest = layer.groups()
    return f"model.layers.{number}.{HF_LAYER_NAMES.get(rest, rest)}"
