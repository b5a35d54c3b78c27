"""Which provider serves a device. It asks for capabilities; it never imports triton."""

import importlib.util
import logging
import os

import torch

logger = logging.getLogger(__name__)

PROVIDERS = ("torch", "triton")
PROVIDER_ENV = "GUIDEVANE_KERNELS_PROVIDER"
"""Overrides the requested provider, to compare providers without touching a configuration."""

MIN_TRITON_CAPABILITY = (8, 0)
"""bf16 tensor cores and asynchronous copies start here."""


def select_provider(device: torch.device | str, requested: str = "auto") -> str:
    """Return "triton" or "torch" for `device`; `requested` is one of them or "auto"."""
    device = torch.device(device)
    name = os.environ.get(PROVIDER_ENV) or requested
    if name == "auto":
        return _best_provider(device)
    if name not in PROVIDERS:
        raise ValueError(f"unknown kernels provider {name!r}; use auto, {' or '.join(PROVIDERS)}")
    if name == "triton":
        _ensure_triton_can_run(device)
    return name


def _best_provider(device: torch.device) -> str:
    if device.type != "cuda":
        return "torch"
    if not has_triton():
        logger.warning("triton is not installed, attention on %s uses torch; install guidevane[gpu]", device)
        return "torch"
    return "triton" if torch.cuda.get_device_capability(device) >= MIN_TRITON_CAPABILITY else "torch"


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _ensure_triton_can_run(device: torch.device) -> None:
    if not has_triton():
        raise ValueError("kernels provider triton was requested and triton is not installed; install guidevane[gpu]")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"kernels provider triton was requested for {device}; it runs on CUDA, "
            "and elsewhere only under TRITON_INTERPRET=1, which is for tests"
        )
