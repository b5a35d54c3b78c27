"""The Llama decoder in plain torch: one function per part, weights as data, attention from guidevane_kernels.

It computes tokens laid end to end; which of them belong to one sequence, only the attention batch knows. It knows no
request and no scheduler. "Llama 2: Open Foundation and Fine-Tuned Chat Models", arXiv:2307.09288, section 2.2.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from guidevane_kernels import AttentionBatch, KVCache, paged_attention, write_kv
from guidevane_runtime.engine.model_config import ModelConfig
from guidevane_runtime.engine.model_rope import RopeTable
from guidevane_runtime.engine.weights_load import LayerWeights, LlamaWeights


class LlamaModel:
    """Weights and rotary table of one model on one device."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights, *, max_model_len: int) -> None:
        self.config = config
        self._weights = weights
        self._rope = RopeTable(
            config, max_positions=max_model_len, factors=weights.rope_factors, device=weights.embed.device
        )

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.embed.dtype

    @property
    def device(self) -> torch.device:
        return self._weights.embed.device

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        logit_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return logits, [len(logit_rows), vocab_size] float32, and leave this step's keys and values in `cache`.

        token_ids, positions: [num_tokens] int64. logit_rows: [n] int64, the tokens whose logits are wanted; None: all.
        """
        config, weights = self.config, self._weights
        hidden = F.embedding(token_ids, weights.embed)
        cos, sin = self._rope.rows(positions, hidden.dtype)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            q = self._project_and_store(layer, hidden, cos, sin, batch, cache, index)
            attended = paged_attention(q, cache, index, batch, scale=config.attention_scale).flatten(1)
            if index == last and logit_rows is not None:
                # From here on every token stands alone, and only some are asked for.
                hidden, attended = hidden.index_select(0, logit_rows), attended.index_select(0, logit_rows)
            hidden = hidden + layer.output(attended)
            hidden = hidden + self._mlp(layer, hidden)
        return weights.lm_head(rms_norm(hidden, weights.final_norm, config.rms_norm_eps)).float()

    def _project_and_store(
        self,
        layer: LayerWeights,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        index: int,
    ) -> torch.Tensor:
        """Write rotated keys and values to the cache; return rotated queries, [num_tokens, num_heads, head_dim]."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = layer.qkv(rms_norm(hidden, layer.input_norm, config.rms_norm_eps))
        heads = qkv.view(-1, num_rotated + config.num_kv_heads, config.head_dim)
        rotated = rotate(heads[:, :num_rotated], cos, sin)
        write_kv(cache, index, rotated[:, config.num_heads :], heads[:, num_rotated:], batch)
        return rotated[:, : config.num_heads]

    def _mlp(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        gate_up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps))
        gate, up = gate_up.chunk(2, dim=-1)
        return layer.down(F.silu(gate).mul_(up))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight over the last dim, statistics in float32 (arXiv:1910.07467)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + head_dim / 2) of every head by its token's angle (arXiv:2104.09864).

    heads: [num_tokens, num_heads, head_dim]; cos, sin: [num_tokens, 1, head_dim], sin negated in its first half.
    """
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * cos, swapped, sin)
