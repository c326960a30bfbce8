"""flash_attn: FlashAttention-2 (arXiv 2307.08691) over paged KV, fp16 / bf16 on CUDA.

Decode batches (one q for all rows) go through `flash_attn_with_kvcache`, which appends in the
kernel; ragged ones through a scatter write and `flash_attn_varlen_func` with a block table.

FlashAttention-2 packs the query heads of a K/V head only for q = 1; a verification forward would
read the keys once per query head. There the cached prefix, which every new token sees whole, is
attended with the group folded into the query axis, and a small kernel adds the causal part over the
new tokens (merge_window).
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from specdec.attention.base import AttentionBackend, AttentionOptions
from specdec.attention.triton_attn import load_kernels, merge_window
from specdec.batch import ForwardBatch
from specdec.kv_cache import store

PAGE = 256  # FlashAttention-2 reads pages of a multiple of this
MIN_VERSION = (2, 5)
MAX_PACKED_Q = 32  # a longer q keeps the plain kernel busy enough


@cache
def flash_module() -> ModuleType:
    """The flash_attn package. Raises ImportError, with what to install, if it is missing or too
    old.
    """
    remedy = "install it with: pip install 'flash-attn>=2.5' (CUDA, built against your torch)"
    try:
        module = importlib.import_module("flash_attn")
        version = _version(module)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"attention='flash_attn' needs the package flash-attn ({error}); {remedy}"
        ) from error
    if version < MIN_VERSION:
        raise ImportError(
            f"flash-attn is {module.__version__}, paged KV needs 2.5 or newer; {remedy}"
        )
    return module


def _version(module: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in module.__version__.split(".")[:2])


def _returns_lse(flash: Any) -> bool:
    return "return_softmax_lse" in inspect.signature(flash.flash_attn_with_kvcache).parameters


def _has_triton() -> bool:
    try:
        load_kernels()
    except ImportError:
        return False
    return True


class FlashAttnBackend(AttentionBackend):
    """MHA, GQA and MQA, window and softcap. Blocks have 256 tokens."""

    name = "flash_attn"

    def __init__(self) -> None:
        self._flash: Any = flash_module()
        self._has_softcap = _version(self._flash) >= (2, 6)
        self._packs = _returns_lse(self._flash) and _has_triton()

    def supports(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cuda":
            return f"flash_attn runs on CUDA devices, not on {device.type}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"flash_attn takes float16 or bfloat16, not {dtype}"
        if head_dim > 256 or head_dim % 8:
            return f"flash_attn takes head_dim up to 256 in steps of 8, not {head_dim}"
        return None

    def block_sizes(self) -> tuple[int, ...]:
        return (PAGE,)

    def plan(self, batch: ForwardBatch, block_size: int, padding_block: int) -> Tensor | None:
        """cu_seqlens_k [num_seqs + 1] int32 of a ragged batch."""
        if batch.q_len is not None and batch.num_seqs * batch.q_len == batch.token_ids.shape[0]:
            return None
        q_lens = batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1]
        ends = torch.cumsum(batch.cache_seqlens + q_lens, 0, dtype=torch.int32)
        return torch.cat((ends.new_zeros(1), ends))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: ForwardBatch,
        options: AttentionOptions,
    ) -> Tensor:
        left = -1 if options.window is None else options.window - 1
        common: dict[str, Any] = {
            "softmax_scale": options.softmax_scale,
            "causal": True,
            "window_size": (left, -1 if options.window is None else 0),
            "block_table": batch.block_table,
        }
        if options.softcap is not None:
            if not self._has_softcap:
                raise ValueError(
                    f"this model's softcap needs flash-attn 2.6, got {self._flash.__version__}; "
                    f"upgrade it, or set attention='reference'"
                )
            common["softcap"] = options.softcap
        if batch.plan is None:
            if self._packs and worth_packing(q, k, batch, options):
                return self._attend_packed(q, k, v, k_cache, v_cache, batch, options)
            rows = (batch.num_seqs, batch.max_seqlen_q)
            out = self._flash.flash_attn_with_kvcache(
                q.view(*rows, *q.shape[1:]),
                k_cache,
                v_cache,
                k=k.view(*rows, *k.shape[1:]),
                v=v.view(*rows, *v.shape[1:]),
                cache_seqlens=batch.cache_seqlens,
                **common,
            )
            return out.view(q.shape)  # type: ignore[no-any-return]
        store(k_cache, k, batch.slot_mapping)
        store(v_cache, v, batch.slot_mapping)
        return self._flash.flash_attn_varlen_func(  # type: ignore[no-any-return]
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=batch.cu_seqlens_q,
            cu_seqlens_k=batch.plan,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            **common,
        )

    def _attend_packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: ForwardBatch,
        options: AttentionOptions,
    ) -> Tensor:
        """Attention over the prefix with q [rows, q_len * group, num_kv_heads, head_dim], then the
        append and the rest.
        """
        head_dim, num_kv_heads = q.shape[2], k.shape[1]
        heads = (batch.num_seqs, batch.max_seqlen_q, num_kv_heads, -1, head_dim)
        folded = q.view(heads).transpose(2, 3)  # [rows, q_len, group, num_kv_heads, head_dim]
        prefix, prefix_lse, *_ = self._flash.flash_attn_with_kvcache(
            folded.reshape(batch.num_seqs, -1, num_kv_heads, head_dim),
            k_cache,
            v_cache,
            cache_seqlens=batch.cache_seqlens,
            block_table=batch.block_table,
            softmax_scale=options.softmax_scale,
            causal=False,
            return_softmax_lse=True,
        )
        return merge_window(
            q, k, v, k_cache, v_cache, prefix, prefix_lse, batch, options.softmax_scale
        )


def worth_packing(q: Tensor, k: Tensor, batch: ForwardBatch, options: AttentionOptions) -> bool:
    """Several queries of several heads over the same keys, all of which each query sees."""
    grouped = q.shape[1] > k.shape[1]
    plain = options.window is None and options.softcap is None
    return grouped and plain and 1 < batch.max_seqlen_q <= MAX_PACKED_Q
