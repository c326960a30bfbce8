"""LeanModel: a forward of our own for the families of RMSNorm, rotary positions, grouped heads and
a gated MLP. Few calls a layer, weights shared with the transformers module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.attention.base import AttentionBackend, AttentionOptions
from specdec.batch import ForwardBatch
from specdec.kv_cache import KVLayout
from specdec.models.families import kv_shape, max_context
from specdec.models.fused_layer_ops import layer_ops
from specdec.models.layer_ops import LayerShape
from specdec.models.linear import KINDS, Linear, PlainLinear, choose_kind, obstacle
from specdec.models.paged_model import PagedModel, TransformersModel

logger = logging.getLogger("specdec")

FAMILIES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
CONFIG_WINDOW = ("mistral", "phi3")  # their window stands in the config, not on the layer
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # frequencies that no length changes
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "swish": F.silu}
CHECK_TOKENS = 6
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest logit
PRODUCTS = ("qkv", "out", "gate_up", "down")  # the Linears of a LeanLayer
SAMPLE_LAYERS = 3  # whose weights a calibration reads in turn: more than a cache holds


@dataclass(slots=True)
class LeanLayer:
    """Weights of one decoder layer, q|k|v and gate|up side by side."""

    input_norm: Tensor  # [hidden]
    qkv: Linear
    q_norm: Tensor | None  # [head_dim], Qwen3
    k_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    options: AttentionOptions


class LeanModel(PagedModel):
    """Logits equal to the transformers module's up to rounding; `lean_or_transformers` checks that.

    Its products are Linears, its attention a backend's, the rest a LayerOps.
    """

    def __init__(self, model: PreTrainedModel, backend: AttentionBackend) -> None:
        config, base = model.config, model.base_model
        shape = kv_shape(config)
        self._backend = backend
        self._ops = layer_ops(
            LayerShape(
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                float(config.rms_norm_eps),
                base.rotary_emb.inv_freq.float(),
                float(base.rotary_emb.attention_scaling),
                ACTIVATIONS[config.hidden_act],
            )
        )
        self._embedding = base.embed_tokens.weight.detach()
        self._final_norm = base.norm.weight.detach()
        self._layers = [
            _lean_layer(layer, _window(config, layer.self_attn)) for layer in base.layers
        ]
        head = model.get_output_embeddings()
        self._head: Linear = _plain(head)
        self.vocab_size = int(self._embedding.shape[0])
        self.token_map = getattr(model, "token_map", None)
        self.max_model_len = max_context(config)
        self.device = model.device
        self.kv_layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, model.dtype)

    def pack(self, kind: str, give_up: Any = None) -> None:
        """Keep the products' weights, plain until now, as `kind`, one of linear.KINDS.

        `give_up` is the transformers base model if its weights may go once they are packed, layer
        by layer, so that no second copy is held.
        """

        def packed(linear: Linear) -> Linear:
            assert isinstance(linear, PlainLinear)
            return KINDS[kind](linear.weight, linear.bias)

        for index, layer in enumerate(self._layers):
            for name in PRODUCTS:
                setattr(layer, name, packed(getattr(layer, name)))
            if give_up is not None:
                for parameter in give_up.layers[index].parameters():
                    if parameter.ndim > 1:
                        parameter.data = parameter.data.new_empty(0)
        self._head = packed(self._head)

    def sample_weights(self) -> list[Tensor]:
        """Plain weights [out, in] of a few layers, to time products on."""
        layers = self._layers[:SAMPLE_LAYERS]
        return [getattr(layer, name).weight for layer in layers for name in PRODUCTS]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        cache, ops = self.kv_cache, self._ops
        batch.plan = self._backend.plan(batch, cache.block_size, cache.padding_block)
        rotation = ops.rotation(batch.positions)
        hidden = F.embedding(batch.token_ids, self._embedding)  # [T, hidden]
        normed = ops.norm(hidden, self._layers[0].input_norm)
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), None]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            q, k, v = ops.rotate(layer.qkv(normed), layer.q_norm, layer.k_norm, rotation)
            kv = cache.k[index], cache.v[index]
            attended = self._backend.attend(q, k, v, *kv, batch, layer.options)
            attended = attended.reshape(hidden.shape[0], -1)
            normed = ops.add_norm(hidden, layer.out(attended), layer.mlp_norm)
            delta = layer.down(ops.gate(layer.gate_up(normed)))
            if next_norm is not None:
                normed = ops.add_norm(hidden, delta, next_norm)
        if batch.logits_indices.shape[0] == 0:  # KV only: skip the output head
            return torch.empty(0, self.vocab_size, device=self.device)
        if batch.logits_indices.shape[0] < hidden.shape[0]:
            hidden, delta = hidden[batch.logits_indices], delta[batch.logits_indices]
        return self._head(ops.add_norm(hidden, delta, self._final_norm)).float()


def lean_or_transformers(
    model: PreTrainedModel,
    backend: AttentionBackend,
    *,
    owned: bool,
    cpu_linear: str,
    lookahead: int,
) -> tuple[PagedModel, str]:
    """The lean forward if the family fits and one random forward agrees, else transformers'
    modules; and what the products are kept as.

    Args:
        model: in eval mode, its attention set to specdec's.
        owned: no one else uses `model`: its weights may be repacked and given up.
        cpu_linear: "auto" or one of linear.KINDS.
        lookahead: K, for the calibration of "auto".

    Raises ValueError if cpu_linear names a kind that cannot serve here.
    """
    asked = cpu_linear if cpu_linear != "auto" else None
    reason = _not_lean(model)
    lean = None if reason else LeanModel(model, backend)
    if lean is not None:
        reason = _disagreement(lean, TransformersModel(model, backend), backend.block_sizes()[0])
    if lean is None or reason:
        logger.info("%s runs through transformers' modules: %s", model.config.model_type, reason)
        if asked not in (None, "fp32"):
            raise ValueError(
                f"cpu_linear={asked!r} needs the lean forward, and {model.config.model_type} runs "
                f"through transformers' modules ({reason}); leave cpu_linear out"
            )
        return TransformersModel(model, backend), "transformers"
    if model.dtype != torch.float32 or model.device.type != "cpu":
        if asked not in (None, "fp32"):
            raise ValueError(
                f"cpu_linear={asked!r} serves float32 models on the CPU, this one is "
                f"{model.dtype} on {model.device}; leave cpu_linear out"
            )
        return lean, str(model.dtype).removeprefix("torch.")
    if asked is not None:
        kind = _usable(asked, lean)
    else:  # "auto" leaves a model of the user's as it is
        kind = _fastest(lean, lookahead) if owned else "fp32"
    if kind != "fp32":
        lean.pack(kind, give_up=model.base_model if owned else None)
    return lean, kind


def _usable(asked: str, lean: LeanModel) -> str:
    """The kind asked for, or fp32 with a warning."""
    reason = obstacle(asked, lean.sample_weights()[0])
    if reason is None:
        return asked
    logger.warning("cpu_linear=%r cannot be used: %s; fp32 is used", asked, reason)
    return "fp32"


def _fastest(lean: LeanModel, lookahead: int) -> str:
    kind, seconds = choose_kind(lean.sample_weights(), (1, lookahead + 1))
    logger.info("linears: %s of %s", kind, {k: round(1e3 * s, 3) for k, s in seconds.items()})
    return kind


def _not_lean(model: PreTrainedModel) -> str | None:
    """Why the lean forward does not fit this model, or None."""
    config, base = model.config, model.base_model
    if config.model_type not in FAMILIES:
        return "its family has no lean forward"
    if getattr(config, "hidden_act", None) not in ACTIVATIONS:
        return f"its activation is {getattr(config, 'hidden_act', None)!r}"
    rotary = base.rotary_emb
    if rotary.rope_type not in STATIC_ROPE:
        return f"its rotary positions are {rotary.rope_type!r}"
    if rotary.inv_freq.numel() * 2 != kv_shape(config).head_dim:
        return "it rotates a part of each head only"
    products = (nn.Linear, nn.Embedding)
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or 'the model'} has hooks"
        if not any(True for _ in module.children()):
            known = type(module) in products or "RMSNorm" in type(module).__name__
            if not known and next(module.parameters(recurse=False), None) is not None:
                return f"{name} is a {type(module).__name__}"
    if len({(p.dtype, p.device) for p in model.parameters()}) > 1:
        return "its weights differ in dtype or device"
    return None


@torch.inference_mode()
def _disagreement(lean: LeanModel, oracle: TransformersModel, block_size: int) -> str | None:
    """Run both on random tokens; None if the logits agree, else by how much they differ."""
    found = []
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(lean.vocab_size, (1, CHECK_TOKENS), generator=generator)
    for paged in (lean, oracle):
        paged.attach(num_blocks=1, block_size=block_size)
        batch = ForwardBatch.uniform(
            tokens.to(lean.device),
            torch.zeros(1, dtype=torch.int64, device=lean.device),
            torch.tensor([CHECK_TOKENS], device=lean.device),
            torch.zeros(1, 1, dtype=torch.int32, device=lean.device),
            block_size,
            CHECK_TOKENS,
            torch.arange(CHECK_TOKENS, device=lean.device),
        )
        found.append(paged.forward(batch))
    mine, theirs = found
    limit = TOLERANCE[oracle.kv_layout.dtype] * float(theirs.abs().max())
    error = float((mine - theirs).abs().max())
    broken = not bool(theirs.isfinite().all())  # such weights are the verifier's to report
    return None if error <= limit or broken else f"its logits differ by {error:.3g}"


def _join(*linears: nn.Linear) -> PlainLinear:
    """One product for several of the same input; the modules' weights become views of its own."""
    weight = _stack([linear.weight.detach() for linear in linears])
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else _stack([b.detach() for b in biases])
    first = 0
    for linear in linears:
        rows = slice(first, first + linear.weight.shape[0])
        linear.weight.data = weight[rows]
        if bias is not None:
            linear.bias.data = bias[rows]
        first = rows.stop
    return PlainLinear(weight, bias)


def _stack(parts: list[Tensor]) -> Tensor:
    """torch.cat along rows, or the tensor that these are already consecutive views of."""
    first, rows = parts[0], sum(part.shape[0] for part in parts)
    step = first.element_size()
    ends = [part.data_ptr() + part.numel() * step for part in parts]
    shared = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    if shared and ends[:-1] == [part.data_ptr() for part in parts[1:]]:
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    return torch.cat(parts)


def _plain(linear: Any) -> PlainLinear:
    return PlainLinear(
        linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    )


def _window(config: Any, attention: Any) -> int | None:
    if config.model_type in CONFIG_WINDOW:
        window = getattr(config, "sliding_window", None)
    else:
        window = getattr(attention, "sliding_window", None)
    return None if window is None else int(window)


def _lean_layer(layer: Any, window: int | None) -> LeanLayer:
    attention, mlp = layer.self_attn, layer.mlp
    if hasattr(attention, "qkv_proj"):  # Phi3 has them joined
        qkv, gate_up = _plain(attention.qkv_proj), _plain(mlp.gate_up_proj)
    else:
        qkv = _join(attention.q_proj, attention.k_proj, attention.v_proj)
        gate_up = _join(mlp.gate_proj, mlp.up_proj)
    q_norm = getattr(attention, "q_norm", None)
    k_norm = getattr(attention, "k_norm", None)
    return LeanLayer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=qkv,
        q_norm=None if q_norm is None else q_norm.weight.detach(),
        k_norm=None if k_norm is None else k_norm.weight.detach(),
        out=_plain(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=gate_up,
        down=_plain(mlp.down_proj),
        options=AttentionOptions(float(attention.scaling), window, None),
    )
