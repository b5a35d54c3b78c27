"""GGUF files: metadata, dequantisation, and the way back from llama.cpp's row order to HuggingFace's."""

import math
import re
from pathlib import Path

import gguf
import numpy as np
import torch

from guidevane_runtime.engine.model_config import ModelConfig
from guidevane_runtime.engine.weights import EMBED, FINAL_NORM, LM_HEAD, ROPE_FACTORS
from guidevane_runtime.errors import UnsupportedModel
from guidevane_runtime.gguf_file import GgufFile, TensorInfo

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
        self._file = GgufFile(path)
        self._tensors = {_hf_name(name): tensor for name, tensor in self._file.tensors.items()}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.config = ModelConfig.from_gguf(self._file.metadata, tied=LM_HEAD not in self._tensors, source=str(path))

    def read(self, name: str) -> torch.Tensor:
        """float32, in HuggingFace's row order."""
        tensor = self._tensors[name]
        # A copy: what comes out unchanged (F32) is a read-only view of the file.
        weight = torch.from_numpy(np.array(self._dequantised(tensor), dtype=np.float32)).reshape(tensor.shape)
        if name.endswith("q_proj.weight"):
            return unpermute(weight, self.config.num_heads)
        if name.endswith("k_proj.weight"):
            return unpermute(weight, self.config.num_kv_heads)
        return weight

    def _dequantised(self, tensor: TensorInfo) -> np.ndarray:
        try:
            kind = gguf.GGMLQuantizationType(tensor.ggml_type)
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            *rows, columns = tensor.shape
            row_bytes = columns // block_size * block_bytes
            raw = self._file.raw(tensor, math.prod(rows) * row_bytes)
            return gguf.quants.dequantize(np.frombuffer(raw, dtype=np.uint8).reshape(*rows, row_bytes), kind)
        except (NotImplementedError, KeyError, ValueError) as error:
            raise UnsupportedModel(
                f"{self.path}: tensor {tensor.name} is stored in ggml type {tensor.ggml_type} ({error}), which can't "
                "be dequantised here; use a file in F16, BF16, Q8_0, Q4_K or another common type"
            ) from error


def unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's reordering of the rows of q and k, [num_heads * head_dim, in].

    It rotates neighbours (0, 1), (2, 3), ...; HuggingFace rotates halves (0, d/2), (1, d/2 + 1), ...
    """
    rows, columns = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, half, 2, columns).transpose(1, 2).reshape(rows, columns)


def _hf_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if layer is None:
        return HF_NAMES.get(name, name)
    number, rest = layer.groups()
    return f"model.layers.{number}.{HF_LAYER_NAMES.get(rest, rest)}"
