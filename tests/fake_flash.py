"""flash_attn_with_kvcache as its docstring has it, in torch, for machines without flash-attn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class FakeFlash:
    """Stands in for the package; keeps the keywords of each call."""

    __version__ = "2.8.3"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.empty_lse = float("inf")  # of a row without keys; its output is NaN here

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        return_softmax_lse: bool = False,
    ) -> Any:
        """q [rows, Q, H, D] over pages [blocks, page, Hkv, D]; k, v [rows, Q, Hkv, D] are appended
        behind cache_seqlens first. Returns out like q and, if asked for, lse [rows, H, Q] fp32.
        """
        self.calls.append({"causal": causal, "window_size": window_size})
        group = q.shape[2] // k_cache.shape[2]
        out, lse = [], []
        for row, table in enumerate(block_table.long()):
            num_keys = int(cache_seqlens[row])
            places = torch.arange(num_keys + q.shape[1], device=q.device)
            page = k_cache.shape[1]
            blocks = table[(places // page).clamp(max=table.shape[0] - 1)]
            if k is not None and v is not None:
                new = places[num_keys:]
                k_cache[blocks[num_keys:], new % page] = k[row]
                v_cache[blocks[num_keys:], new % page] = v[row]
                num_keys += k.shape[1]
            at = (blocks[:num_keys], places[:num_keys] % page)
            keys, values = (
                cache[at].double().repeat_interleave(group, 1) for cache in (k_cache, v_cache)
            )
            scores = torch.einsum("qhd,lhd->hql", q[row].double(), keys) * softmax_scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            last = torch.arange(q.shape[1], device=q.device) + num_keys - q.shape[1]
            distance = last[:, None] - places[:num_keys]
            if causal:
                scores = scores.masked_fill(distance < 0, float("-inf"))
            if window_size[0] >= 0:
                scores = scores.masked_fill(distance > window_size[0], float("-inf"))
            lse.append(scores.logsumexp(-1))
            out.append(torch.einsum("hql,lhd->qhd", scores.softmax(-1), values))
            if num_keys == 0:
                lse[-1].fill_(self.empty_lse)
                out[-1].fill_(float("nan"))
        outputs = torch.stack(out).to(q.dtype), torch.stack(lse).float()
        return outputs if return_softmax_lse else outputs[0]
