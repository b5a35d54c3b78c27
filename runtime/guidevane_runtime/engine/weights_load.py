"""Fill a model's tensors from a source: check names and shapes, then read, fuse and cast one by one."""

import logging
import math
import time
from dataclasses import dataclass

import torch

from guidevane_runtime.engine.model_config import ModelConfig
from guidevane_runtime.engine.model_linear import Linear
from guidevane_runtime.engine.weights import EMBED, FINAL_NORM, LM_HEAD, ROPE_FACTORS, WeightSource
from guidevane_runtime.errors import BrokenModel, UnsupportedModel

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 5.0

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Old checkpoints store what follows from the config."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer, in the model's dtype; matrices are given as [out, in]."""

    input_norm: torch.Tensor
    """[hidden_size]"""
    qkv: Linear
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]: q, k, v stacked."""
    output: Linear
    """[hidden_size, num_heads * head_dim]"""
    mlp_norm: torch.Tensor
    """[hidden_size]"""
    gate_up: Linear
    """[2 * intermediate_size, hidden_size]: gate, up stacked."""
    down: Linear
    """[hidden_size, intermediate_size]"""


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All weights of one model, on one device, in one dtype."""

    embed: torch.Tensor
    """[vocab_size, hidden_size]"""
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    """[hidden_size]"""
    lm_head: Linear
    """[vocab_size, hidden_size]; the embedding itself where they are tied (a packed copy of it on CPU)."""
    rope_factors: torch.Tensor | None
    """[head_dim / 2], float32, on CPU: divisors of the rotary frequencies, from GGUF files only."""


def load_weights(source: WeightSource, *, dtype: torch.dtype, device: torch.device) -> LlamaWeights:
    """Read every tensor once. Memory peaks at the model plus one layer."""
    expected = expected_shapes(source.config)
    _check_tensors(source, expected)
    reader = _ProgressReader(source, num_tensors=len(expected), dtype=dtype, device=device)
    embed = reader.read(EMBED)
    return LlamaWeights(
        embed=embed,
        layers=tuple(_load_layer(reader, f"model.layers.{index}.") for index in range(source.config.num_layers)),
        final_norm=reader.read(FINAL_NORM),
        lm_head=Linear.of(embed if source.config.tie_word_embeddings else reader.read(LM_HEAD)),
        rope_factors=source.read(ROPE_FACTORS) if ROPE_FACTORS in source.shapes else None,
    )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a model of this config must have."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Memory that the loaded weights take on CPU, where a tied lm_head is a packed copy."""
    num_values = sum(math.prod(shape) for shape in expected_shapes(config).values())
    num_copied = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    return (num_values + num_copied) * dtype.itemsize


def _load_layer(reader: "_ProgressReader", prefix: str) -> LayerWeights:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    return LayerWeights(
        input_norm=reader.read(f"{prefix}input_layernorm.weight"),
        qkv=reader.linear(*(f"{attention}{name}_proj.weight" for name in "qkv")),
        output=reader.linear(f"{attention}o_proj.weight"),
        mlp_norm=reader.read(f"{prefix}post_attention_layernorm.weight"),
        gate_up=reader.linear(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
        down=reader.linear(f"{mlp}down_proj.weight"),
    )


def _check_tensors(source: WeightSource, expected: dict[str, tuple[int, ...]]) -> None:
    missing = [name for name in expected if name not in source.shapes]
    if missing:
        raise BrokenModel(
            f"{source.path}: tensor {missing[0]} is missing ({len(missing)} of {len(expected)} are); "
            "the files are incomplete or the config belongs to another model"
        )
    for name, shape in expected.items():
        if source.shapes[name] != shape:
            raise BrokenModel(
                f"{source.path}: tensor {name} has shape {list(source.shapes[name])}, the config asks for {list(shape)}"
            )
    unknown = [name for name in source.shapes if name not in expected and not _may_be_extra(name)]
    if unknown:
        raise UnsupportedModel(
            f"{source.path}: tensor {unknown[0]} has no place in {source.config.architecture} "
            f"({len(unknown)} such tensors); the model has a part that this runtime does not compute"
        )


def _may_be_extra(name: str) -> bool:
    # lm_head: some files store the tied embedding twice.
    return name in (ROPE_FACTORS, LM_HEAD) or name.endswith(IGNORED_SUFFIXES)


class _ProgressReader:
    """Reads tensors into dtype and device, and says how far it is every few seconds."""

    def __init__(self, source: WeightSource, *, num_tensors: int, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._num_tensors, self._dtype, self._device = source, num_tensors, dtype, device
        self._num_read = 0
        self._start_s = self._reported_s = time.monotonic()

    def linear(self, *names: str) -> Linear:
        """The matrices stacked along their output."""
        parts = [self.read(name) for name in names]
        return Linear.of(torch.cat(parts) if len(parts) > 1 else parts[0])

    def read(self, name: str) -> torch.Tensor:
        # copy: a memory-mapped tensor would fault when its file is replaced under a running server.
        tensor = self._source.read(name).to(device=self._device, dtype=self._dtype, copy=True).contiguous()
        self._num_read += 1
        now_s = time.monotonic()
        if now_s - self._reported_s >= PROGRESS_INTERVAL_S:
            self._reported_s = now_s
            percent, elapsed_s = 100 * self._num_read // self._num_tensors, now_s - self._start_s
            logger.info("loading weights", extra={"percent": percent, "elapsed_s": round(elapsed_s, 1)})
        return tensor
