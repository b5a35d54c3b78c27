"""A weight matrix, stored the way its device multiplies fastest."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)


class Linear(ABC):
    """x @ weight.T, without bias."""

    @staticmethod
    def of(weight: torch.Tensor) -> "Linear":
        """Keep `weight`, [out, in], as it is, or a copy packed for this CPU."""
        return PackedLinear(weight) if can_pack(weight) else PlainLinear(weight)

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, in] -> [num_tokens, out], in x's dtype."""


class PlainLinear(Linear):
    """The matrix as torch has it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight)


class PackedLinear(Linear):
    """The matrix in oneDNN's blocked layout, packed once instead of in every call.

    On one core of a Zen 5 (AVX-512) against F.linear, [3072, 576]: float32 2.1 to 2.9 times as fast for 1 to 256 rows
    (F.linear takes MKL there), bfloat16 1.0 times for 1 row, 1.6 for 8, 1.3 for 32. These are the operators that
    torch.compile emits; torch has no public name for them.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies this dtype on this CPU, and this build of torch has the operators."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())
    return bool(weight.dtype == torch.float32)
