"""PagedModel: one language model's forward over the paged pool. TransformersModel runs
transformers' own modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from specdec.attention.base import AttentionBackend, AttentionOptions
from specdec.batch import ForwardBatch
from specdec.kv_cache import KVCache, KVLayout
from specdec.models.families import kv_shape, max_context

ATTENTION_NAME = "specdec"  # transformers' attention implementation that leads here


class PagedModel(ABC):
    """A causal language model whose K/V live in blocks of the shared pool."""

    vocab_size: int  # token ids it reads
    token_map: Tensor | None = None  # [M] int64, the id of each logit; None: logit i is id i
    max_model_len: int  # positions it can serve
    kv_layout: KVLayout
    device: torch.device
    kv_cache: KVCache  # set by attach()

    def attach(self, num_blocks: int, block_size: int) -> None:
        """Allocate the K/V of this model over the pool's blocks."""
        self.kv_cache = KVCache(self.kv_layout, num_blocks, block_size, self.device)

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Append the batch's tokens to the cache; float32 logits [num_logits, vocab_size, or M] of
        batch.logits_indices.
        """


@dataclass(frozen=True, slots=True)
class PagedCall:
    """What the attention modules of one forward need; travels through the model as a keyword."""

    backend: AttentionBackend
    cache: KVCache
    batch: ForwardBatch


class TransformersModel(PagedModel):
    """Any transformers family whose attention goes through AttentionInterface; weights are used in
    place.
    """

    def __init__(self, model: PreTrainedModel, backend: AttentionBackend) -> None:
        config = model.config
        shape = kv_shape(config)
        self._model = model
        self._backend = backend
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.token_map = getattr(model, "token_map", None)
        self.max_model_len = max_context(config)
        self.device = model.device
        self.kv_layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, model.dtype)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        cache = self.kv_cache
        batch.plan = self._backend.plan(batch, cache.block_size, cache.padding_block)
        inputs: dict[str, Any] = {
            "input_ids": batch.token_ids[None],
            "position_ids": batch.positions[None],
            "use_cache": False,
            "specdec_call": PagedCall(self._backend, cache, batch),
        }
        if batch.logits_indices.shape[0] == 0:  # KV only: skip the output head
            self._model.base_model(**inputs)
            return torch.empty(0, self.vocab_size, device=self.device)
        logits: Tensor = self._model(**inputs, logits_to_keep=batch.logits_indices).logits
        return logits[0].float()


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    specdec_call: PagedCall | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The function transformers' attention modules call: query [1, H, T, D], key, value [1, Hkv, T,
    D] -> [1, T, H, D].
    """
    family = type(module).__name__
    if specdec_call is None:
        raise ValueError(
            f"{family} was called outside specdec, or its layers do not pass keywords on; "
            f"this family cannot run on paged KV"
        )
    for name in ("s_aux", "sinks", "position_bias", "indices"):
        if extra.get(name) is not None:
            raise ValueError(
                f"{family} passes {name!r} to its attention, which paged KV does not support"
            )
    cache, batch = specdec_call.cache, specdec_call.batch
    layer = module.layer_idx
    options = AttentionOptions(
        softmax_scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
    )
    out = specdec_call.backend.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cache.k[layer],
        cache.v[layer],
        batch,
        options,
    )
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
