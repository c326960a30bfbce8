"""Which attention backend serves a model: by name, or `auto` by device and what is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdec.attention.base import AttentionBackend
from specdec.attention.flash_attn import FlashAttnBackend
from specdec.attention.reference import ReferenceBackend
from specdec.attention.triton_attn import TritonBackend
from specdec.registry import Registry

BACKENDS: Registry[Callable[[], AttentionBackend]] = Registry(
    "attention backend",
    "specdec.attention",
    {"reference": ReferenceBackend, "flash_attn": FlashAttnBackend, "triton": TritonBackend},
)

FASTEST_FIRST = ("flash_attn", "triton")  # what `auto` tries on a CUDA device


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend and why it was taken."""

    backend: AttentionBackend
    reason: str


def select_backend(
    name: str, device: torch.device, models: Sequence[tuple[torch.dtype, int]]
) -> Choice:
    """Pick the backend for models of these (dtype, head_dim).

    A named backend is never replaced: ImportError names the package to install, ValueError says why
    it cannot serve.
    """
    if name != "auto":
        backend = BACKENDS.get(name)()
        reason = _unsupported(backend, device, models)
        if reason:
            raise ValueError(
                f"attention={name!r} cannot serve this model: {reason}; use attention='auto'"
            )
        return Choice(backend, "asked for")
    if device.type != "cuda":
        return Choice(ReferenceBackend(), f"the device is {device.type}")
    reasons: list[str] = []
    for name in FASTEST_FIRST:
        try:
            backend = BACKENDS.get(name)()
            reason = _unsupported(backend, device, models)
        except ImportError as error:
            reason = str(error)
        if reason is None:
            return Choice(backend, "; ".join([f"{name} serves this model", *reasons]))
        reasons.append(reason)
    return Choice(ReferenceBackend(), "; ".join(reasons))


def _unsupported(
    backend: AttentionBackend, device: torch.device, models: Sequence[tuple[torch.dtype, int]]
) -> str | None:
    reasons = (backend.supports(device, dtype, head_dim) for dtype, head_dim in models)
    return next((reason for reason in reasons if reason), None)
