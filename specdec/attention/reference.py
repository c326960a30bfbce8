"""reference: torch on any device. Gathers each row's keys through the block table, then attends
densely.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.attention.base import AttentionBackend, AttentionOptions
from specdec.batch import ForwardBatch
from specdec.kv_cache import store
from specdec.sequence import blocks_for

MAX_FOLDED_Q = 64  # for longer q the folded mask costs more than it saves


@dataclass(slots=True)
class RowGroup:
    """Rows of equal q, attended together. Keys are gathered whole blocks at a time, the surplus is
    masked.
    """

    tokens: slice  # their rows in the flat batch
    num_rows: int
    q_len: int
    blocks: Tensor  # [num_rows * num_blocks] int64
    query_positions: Tensor  # [num_rows, q_len] int64
    num_keys: int  # num_blocks * block_size
    masks: dict[tuple[int | None, int], Tensor] = field(
        default_factory=dict
    )  # (window, fold) -> [num_rows, 1, fold * q_len, num_keys]
    scratch: list[Tensor] = field(default_factory=list)  # gathered K and V, reused by every layer

    def mask(self, window: int | None, fold: int) -> Tensor:
        """True where a query may see a key, `fold` times over; computed once per forward and
        window.
        """
        if (window, fold) not in self.masks:
            keys = torch.arange(self.num_keys, device=self.query_positions.device)
            distance = self.query_positions[..., None] - keys  # [rows, q, keys]
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
            self.masks[window, fold] = seen[:, None].repeat(1, 1, fold, 1)
        return self.masks[window, fold]

    def gather(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of the rows, [num_rows, num_kv_heads, num_keys, head_dim] each (strided
        views).
        """
        if not self.scratch:
            shape = (self.blocks.shape[0], *k_cache.shape[1:])
            self.scratch = [k_cache.new_empty(shape), v_cache.new_empty(shape)]
        for cache, out in zip((k_cache, v_cache), self.scratch, strict=True):
            torch.index_select(cache, 0, self.blocks, out=out)
        view = (self.num_rows, self.num_keys, *k_cache.shape[2:])
        return self.scratch[0].view(view).transpose(1, 2), self.scratch[1].view(view).transpose(
            1, 2
        )


class ReferenceBackend(AttentionBackend):
    """Any device, dtype, head layout and block size; softmax in fp32."""

    name = "reference"

    def supports(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None

    def block_sizes(self) -> tuple[int, ...]:
        return (16, 32, 64, 128, 256)

    def plan(self, batch: ForwardBatch, block_size: int, padding_block: int) -> list[RowGroup]:
        # Beyond its own blocks a row reads its first block again: finite, and masked like any other
        # surplus key.
        table = torch.where(
            batch.block_table == padding_block, batch.block_table[:, :1], batch.block_table
        )
        if batch.q_len is not None:
            return [_group(batch, table, block_size, 0, batch.num_seqs, 0, batch.max_seqlen_k)]
        groups = []
        first_token = 0
        for row, (start, length) in enumerate(batch.spans):
            groups.append(
                _group(batch, table, block_size, row, row + 1, first_token, start + length)
            )
            first_token += length
        return groups

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
        store(k_cache, k, batch.slot_mapping)
        store(v_cache, v, batch.slot_mapping)
        outputs = []
        for group in batch.plan:
            # The query heads that share a K/V head become more queries of one head: its keys are
            # read once.
            fold = q.shape[1] // k.shape[1] if group.q_len <= MAX_FOLDED_Q else 1
            heads = (group.num_rows, group.q_len, q.shape[1] // fold, fold, q.shape[2])
            rows = q[group.tokens].view(heads).permute(0, 2, 3, 1, 4)  # [R, heads, fold, q, dim]
            keys, values = group.gather(k_cache, v_cache)
            mask = group.mask(options.window, fold)
            out = attend_finite(rows.flatten(2, 3), keys, values, mask, options)
            out = out.view(rows.shape).permute(0, 3, 1, 2, 4)
            outputs.append(out.reshape(-1, *q.shape[1:]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attend_finite(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: AttentionOptions
) -> Tensor:
    """attend_dense, where a key that a query does not see cannot harm it: 0 * NaN is NaN.

    A stale or refused token's K/V may hold NaN or infinity. Queries that do see it give NaN.
    """
    out = attend_dense(q, k, v, mask, options)
    if out.device.type == "cpu" and bool(out.sum(dtype=torch.float32).isfinite()):
        return out
    bad = ~(k.isfinite().all(dim=-1) & v.isfinite().all(dim=-1)).all(dim=1)  # [B, L]
    hidden = bad[:, None, :, None]
    out = attend_dense(q, k.masked_fill(hidden, 0), v.masked_fill(hidden, 0), mask, options)
    poisoned = (mask & bad[:, None, None]).any(dim=-1)[..., None]  # [B, 1, Q, 1]
    return out.masked_fill(poisoned, float("nan"))


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: AttentionOptions
) -> Tensor:
    """Masked attention of q [B, H, Q, D] over k, v [B, Hkv, L, D]; mask [B, 1, Q, L], True =
    visible.
    """
    if options.softcap is None:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            scale=options.softmax_scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )
    batch, heads, q_len, dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, q_len, dim)  # [B, Hkv, G, Q, D]
    scores = torch.einsum("bhgqd,bhld->bhgql", grouped, k).float() * options.softmax_scale
    scores = options.softcap * torch.tanh(scores / options.softcap)
    weights = torch.softmax(scores.masked_fill(~mask[:, :, None], float("-inf")), dim=-1)
    return torch.einsum("bhgql,bhld->bhgqd", weights.to(v.dtype), v).reshape(
        batch, heads, q_len, dim
    )


def _group(
    batch: ForwardBatch,
    table: Tensor,
    block_size: int,
    first_row: int,
    last_row: int,
    first_token: int,
    num_keys: int,
) -> RowGroup:
    num_rows = last_row - first_row
    q_len = batch.q_len if batch.q_len is not None else batch.spans[first_row][1]
    num_blocks = min(blocks_for(num_keys, block_size), table.shape[1])
    starts = batch.cache_seqlens[first_row:last_row].to(torch.int64)
    return RowGroup(
        tokens=slice(first_token, first_token + num_rows * q_len),
        num_rows=num_rows,
        q_len=q_len,
        blocks=table[first_row:last_row, :num_blocks].reshape(-1).to(torch.int64),
        query_positions=starts[:, None] + torch.arange(q_len, device=table.device),
        num_keys=num_blocks * block_size,
    )
