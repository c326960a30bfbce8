"""transformers' module tree on packed weights: built empty, then filled module by module."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from rich.console import Console
from rich.progress import track
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from specdec.quant.backends import QuantBackend, assign_backends, packed_bytes
from specdec.quant.checkpoint import (
    PACKED,
    PARTS,
    LinearShape,
    ModuleReader,
    ModuleSpec,
    plan_modules,
)
from specdec.quant.config import QuantConfig
from specdec.quant.dummy import dummy_spec, random_weight
from specdec.quant.packing import QuantWeight, select_columns
from specdec.weight_files import TensorInfo, find_weights, read_headers

logger = logging.getLogger("specdec")

# In these families down_proj reads act(gate) * up, element by element.
GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
OLD_BUFFERS = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")  # of files of 2023
HEAD = "lm_head"


class QuantModel:
    """A model of packed weights on its way in: its empty tree, and what its files hold.

    Args:
        config: transformers' config, quantization_config taken out.
        quant: the checkpoint's settings.
        folder: the weights; None = random ones.
        name: of the checkpoint, for errors.
        backend, dtype: what its packed modules run on, and the compute dtype.
        options: of AutoModelForCausalLM.from_config (attn_implementation, trust_remote_code).

    Raises ValueError, with the module's name, where config and files do not fit.
    """

    def __init__(
        self,
        config: Any,
        quant: QuantConfig,
        folder: Path | None,
        name: str,
        *,
        backend: QuantBackend,
        dtype: torch.dtype,
        **options: Any,
    ) -> None:
        self._quant, self._folder, self._name = quant, folder, name
        self._backend, self._dtype = backend, dtype
        self._tensors: dict[str, TensorInfo] = {}
        if folder is not None:
            self._tensors = read_headers(find_weights(folder, any_name=True))
        if getattr(config, "tie_word_embeddings", False) and HEAD + PACKED in self._tensors:
            config = copy.deepcopy(config)  # a packed head is not the embedding
            config.tie_word_embeddings = False
        with init_empty_weights():
            self._model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, **options
            )
        linears = {
            name: LinearShape(module.in_features, module.out_features, module.bias is not None)
            for name, module in self._model.named_modules()
            if isinstance(module, nn.Linear)
        }
        if folder is not None:
            self.specs = plan_modules(linears, self._tensors, quant, name)
            self._check_names()
        else:
            layers = {n: s for n, s in linears.items() if n != HEAD}
            self.specs = {
                n: dummy_spec(n, s.in_features, s.out_features, s.has_bias, quant)
                for n, s in layers.items()
            }

    def num_bytes(self) -> int:
        """Bytes of all weights as they will be kept; tied ones once."""
        self._model.tie_weights()
        plain: int = sum(
            p.numel() for n, p in self._model.named_parameters() if not self._is_packed(n)
        )
        packed = packed_bytes(self.specs, self._backend, self._dtype, sym=self._quant.sym)
        biases = sum(s.out_features for s in self.specs.values() if s.has_bias)
        return packed + (plain + biases) * self._dtype.itemsize

    def load(
        self, device: torch.device, *, seed: int = 0, progress: bool = True
    ) -> PreTrainedModel:
        """Fill the tree on the device: at most one module's source is held beside the result.

        Can be called once. Raises ValueError, with the module's name, for contents that cannot be
        right; the model is given up then.
        """
        model = self._model
        chosen = assign_backends(self.specs, self._backend, self._dtype)
        model.tie_weights()  # a tied head is listed once, then taken along
        with self._source(device, seed) as (packed, plain):
            for name in track(
                list(self.specs),
                "loading",
                console=Console(stderr=True),
                transient=True,
                disable=not progress,
            ):
                weight = packed(self.specs[name], chosen[name].packed)
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, chosen[name].build(weight))
                del weight
            for name, parameter in list(model.named_parameters()):
                if parameter.device.type == "meta":
                    _place(model, name, nn.Parameter(plain(name, parameter), requires_grad=False))
            for name, buffer in list(model.named_buffers()):
                if buffer.device != device:
                    _place(model, name, buffer.to(device))
        model.tie_weights()
        model.requires_grad_(False)
        if self._folder is not None:
            _generation_config(model, self._folder)
        return model.eval()

    @contextmanager
    def _source(
        self, device: torch.device, seed: int
    ) -> Iterator[
        tuple[Callable[[ModuleSpec, bool], QuantWeight], Callable[[str, Tensor], Tensor]]
    ]:
        """Gives packed modules and plain tensors, from the files or at random."""
        dtype = self._dtype
        if self._folder is None:
            generator = torch.Generator(device).manual_seed(seed)

            def packed_noise(spec: ModuleSpec, fold: bool) -> QuantWeight:
                return random_weight(spec, dtype, device, generator)

            def noise(name: str, like: Tensor) -> Tensor:
                if like.ndim == 1:
                    fill = 1.0 if "norm" in name else 0.0
                    return torch.full(like.shape, fill, dtype=dtype, device=device)
                shape = tuple(like.shape)
                drawn = torch.randn(shape, dtype=dtype, device=device, generator=generator)
                return drawn.mul_(shape[-1] ** -0.5)

            yield packed_noise, noise
            return
        with ExitStack() as stack:
            files = {
                file: stack.enter_context(safe_open(file, framework="pt", device=str(device)))
                for file in {info.file for info in self._tensors.values()}
            }

            def read(name: str) -> Tensor:
                tensor: Tensor = files[self._tensors[name].file].get_tensor(name)
                return tensor

            reader = ModuleReader(read, self._quant, dtype, self._name)

            def packed(spec: ModuleSpec, fold: bool) -> QuantWeight:
                return self._folded(reader, spec) if fold else reader.weight(spec)

            yield packed, lambda name, _: read(name).to(dtype)

    def _folded(self, reader: ModuleReader, spec: ModuleSpec) -> QuantWeight:
        """The module; down_proj's permutation is moved into the outputs of gate and up, where it
        costs nothing.
        """
        weight = reader.weight(spec)
        mlp, _, leaf = spec.name.rpartition(".")
        trio = [f"{mlp}.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
        if self._model.config.model_type not in GATED or spec.name not in trio:
            return weight
        if any(name not in self.specs for name in trio):
            return weight
        if leaf == "down_proj":
            return replace(weight, perm=None)
        order = reader.permutation(self.specs[trio[2]])
        return weight if order is None else select_columns(weight, order)

    def _check_names(self) -> None:
        """Every plain tensor is in the files with its shape, and no layer's tensor is left over."""
        tied = set(getattr(self._model, "all_tied_weights_keys", None) or ())
        if getattr(self._model.config, "tie_word_embeddings", False):
            tied.add(f"{HEAD}.weight")
        expected = {f"{name}.{part}" for name in self.specs for part in (*PARTS, "bias")}
        for name, parameter in self._model.named_parameters():
            expected.add(name)
            if self._is_packed(name) or name in tied:
                continue
            info = self._tensors.get(name)
            if info is None:
                raise ValueError(f"the weights of {self._name} lack {name}; download them again")
            if info.shape != tuple(parameter.shape):
                raise ValueError(
                    f"the weights of {self._name} do not fit its config: tensor {name} is "
                    f"{list(info.shape)}, {list(parameter.shape)} is needed; check that config "
                    f"and weights belong together"
                )
        extra = [n for n in self._tensors if n not in expected and ".layers." in n]
        extra = [n for n in extra if not n.endswith(OLD_BUFFERS)]
        if extra:
            raise ValueError(
                f"the weights of {self._name} hold tensors that its config has no place for, first "
                f"{min(extra)}; check that config and weights belong together"
            )

    def _is_packed(self, parameter: str) -> bool:
        return parameter.rpartition(".")[0] in self.specs


def _place(model: nn.Module, name: str, value: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, value)


def _generation_config(model: PreTrainedModel, folder: Path) -> None:
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder)
    except OSError:  # there is none
        return
