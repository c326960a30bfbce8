"""Layer by layer through a model: calibration inputs in, rounded weights in their place out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.quantize.gptq import Codes, Grid, gptq, round_to_nearest

MULTIPLE = 32  # other engines read modules whose sides are multiples of this


class _Reached(Exception):
    """The first layer was reached: the rest of the forward is not needed."""


def layer_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers inside the decoder layers, by their full names.

    Raises ValueError for one that the format cannot hold for other engines.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no linear layers in decoder layers; this family cannot "
            f"be quantised"
        )
    for name, module in found.items():
        if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
            raise ValueError(
                f"{name} is {module.in_features} x {module.out_features}; GPTQ's format packs "
                f"multiples of {MULTIPLE}, this model cannot be quantised"
            )
    return found


@torch.inference_mode()
def round_layers(model: PreTrainedModel, grid: Grid) -> Iterator[tuple[str, Codes]]:
    """Round every linear layer to nearest, in place; gives each as it is done."""
    for name, module in layer_linears(model).items():
        yield name, _replace(module, round_to_nearest(module.weight, grid))


@torch.inference_mode()
def calibrate_layers(
    model: PreTrainedModel, rows: Sequence[Tensor], grid: Grid, damping: float
) -> Iterator[tuple[str, Codes]]:
    """GPTQ on every linear layer, in place: the inputs of each are those that the rounded layers
    before it give. Yields each as it is done.

    Args:
        model: attention through plain masks (eager), in eval mode.
        rows: token ids [T] of one length.

    Raises ValueError, with the module's name, where the calibration is of no use.
    """
    names = {module: name for name, module in layer_linears(model).items()}
    hidden, keywords = _first_inputs(model, rows)
    for layer, options in zip(model.base_model.layers, keywords, strict=True):
        for group in _shared_inputs(layer, hidden[0], options, names):
            hessian = _hessian(layer, group[0], hidden, options)
            for module in group:
                try:
                    codes = gptq(module.weight, hessian, grid, damping)
                except ValueError as error:
                    raise ValueError(f"{names[module]} cannot be quantised: {error}") from error
                yield names[module], _replace(module, codes)
        hidden = [_run(layer, x, options) for x in hidden]


@torch.inference_mode()
def perplexity(model: PreTrainedModel, rows: Sequence[Tensor]) -> float:
    """exp of the mean loss per predicted token over rows of token ids [T]."""
    total, count = 0.0, 0
    for row in rows:
        logits = model(row[None].to(model.device), use_cache=False).logits[0, :-1].float()
        total += float(F.cross_entropy(logits, row[1:].to(model.device), reduction="sum"))
        count += len(row) - 1
    return float(torch.tensor(total / count, dtype=torch.float64).exp())


def _replace(module: nn.Linear, codes: Codes) -> Codes:
    module.weight.copy_(codes.weight())
    return codes


def _first_inputs(
    model: PreTrainedModel, rows: Sequence[Tensor]
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Inputs [1, T, hidden] of the first layer; each layer's keywords, the same for all rows."""
    layers = list(model.base_model.layers)
    hidden: list[Tensor] = []
    keywords: list[dict[str, Any]] = []

    def note_first(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        hidden.append(args[0] if args else kwargs["hidden_states"])
        raise _Reached

    def note_keywords(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        keywords.append({k: v for k, v in kwargs.items() if k != "hidden_states"})

    with _hooks(layers, note_keywords):
        model(rows[0][None].to(model.device), use_cache=False)
    with _hooks(layers[:1], note_first):
        for row in rows:
            try:
                model(row[None].to(model.device), use_cache=False)
            except _Reached:
                continue
    return hidden, keywords


def _shared_inputs(
    layer: nn.Module, x: Tensor, options: dict[str, Any], names: dict[nn.Linear, str]
) -> list[list[nn.Linear]]:
    """The layer's linears in the order of use, those of one input together."""
    seen: list[tuple[Tensor, list[nn.Linear]]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        for tensor, users in seen:
            if tensor is args[0]:
                users.append(module)
                return
        seen.append((args[0], [module]))

    with _hooks([m for m in layer.modules() if m in names], note):
        _run(layer, x, options)
    return [users for _, users in seen]


def _hessian(
    layer: nn.Module, module: nn.Linear, hidden: Sequence[Tensor], options: dict[str, Any]
) -> Tensor:
    """The mean of x x^T over the module's inputs, float32 [K, K]."""
    size = module.in_features
    total = torch.zeros(size, size, device=module.weight.device)
    count = 0

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal count
        x = args[0].reshape(-1, size).float()
        total.addmm_(x.t(), x)
        count += x.shape[0]

    with _hooks([module], note):
        for x in hidden:
            _run(layer, x, options)
    return total / count


def _run(layer: nn.Module, x: Tensor, options: dict[str, Any]) -> Tensor:
    out = layer(x, **options)
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first


@contextmanager
def _hooks(modules: Sequence[nn.Module], note: Callable[..., None]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            handle = module.register_forward_pre_hook(note, with_kwargs=True)
            stack.callback(handle.remove)
        yield
