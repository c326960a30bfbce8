"""ForwardBatch: the tensors of one forward. Prefill, draft and verify differ only in how many
tokens a row appends.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.sequence import Span, blocks_for


@dataclass(slots=True)
class ForwardBatch:
    """Append q_i tokens to row i and attend, causally, to everything before them.

    `num_tokens` = sum of q_i, rows concatenated. Slot -1 is the padding slot (see KVCache): what is
    written there is never read as a real key. Lengths that bound loops or shapes are host integers;
    nothing here forces a device synchronisation.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64, 0-based
    slot_mapping: Tensor  # [num_tokens] int64
    cu_seqlens_q: Tensor  # [num_seqs + 1] int32
    cache_seqlens: Tensor  # [num_seqs] int32, KV length before the append
    block_table: Tensor  # [num_seqs, max_blocks] int32, padded with the padding block
    logits_indices: Tensor  # [num_logits] int64, rows of the flat batch whose logits are wanted
    q_len: int | None  # the common q_i, or None when ragged
    max_seqlen_q: int
    max_seqlen_k: int  # no row has more keys, the appended ones included
    spans: tuple[tuple[int, int], ...] = ()  # host copy of (cache_seqlen, q_i) for ragged batches
    plan: Any = field(
        default=None, repr=False
    )  # what the attention backend prepared for this batch

    @property
    def num_seqs(self) -> int:
        return self.cache_seqlens.shape[0]

    @classmethod
    def ragged(
        cls,
        spans: Seq[Span],
        block_size: int,
        padding_block: int,
        device: torch.device,
        logits_indices: Seq[int] = (),
    ) -> ForwardBatch:
        """Prefill: each span's tokens behind its sequence's KV. Raises ValueError if a block table
        is too short.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for row, span in enumerate(spans):
            table = span.seq.block_table
            check_table(row, len(table), span.end, block_size)
            token_ids += span.seq.token_ids[span.start : span.end]
            positions += range(span.start, span.end)
            slots += [
                table[p // block_size] * block_size + p % block_size
                for p in range(span.start, span.end)
            ]
            starts.append(starts[-1] + span.length)

        def ints(values: Seq[int], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        lengths = {span.length for span in spans}
        return cls(
            token_ids=ints(token_ids),
            positions=ints(positions),
            slot_mapping=ints(slots),
            cu_seqlens_q=ints(starts, torch.int32),
            cache_seqlens=ints([span.start for span in spans], torch.int32),
            block_table=pad_tables([s.seq.block_table for s in spans], padding_block).to(device),
            logits_indices=ints(logits_indices),
            q_len=lengths.pop() if len(spans) == 1 else None,
            max_seqlen_q=max(span.length for span in spans),
            max_seqlen_k=max(span.end for span in spans),
            spans=tuple((span.start, span.length) for span in spans),
        )

    @classmethod
    def uniform(
        cls,
        token_ids: Tensor,
        starts: Tensor,
        num_valid: Tensor,
        block_table: Tensor,
        block_size: int,
        max_seqlen_k: int,
        logits_indices: Tensor,
    ) -> ForwardBatch:
        """Decode: row i appends token_ids[i] [Q] at starts[i]; only its first num_valid[i] tokens
        are real.

        Pure tensor arithmetic, so that a whole step can be captured. Kernels that append by
        `block_table` and not by slot write all Q tokens of a row: DecodeState makes every row's
        table, filled up with the padding block, cover the longest row and window.
        """
        num_rows, q_len = token_ids.shape
        offsets = torch.arange(q_len, device=token_ids.device)
        positions = starts[:, None] + offsets  # [rows, Q]
        covered = block_table.shape[1] * block_size
        block = block_table.gather(1, (positions.clamp(max=covered - 1) // block_size)).to(
            torch.int64
        )
        slots = block * block_size + positions % block_size
        real = offsets < num_valid[:, None]
        slots = torch.where(real, slots, -1)
        positions = torch.where(real, positions, 0)  # padding never indexes past a position table
        return cls(
            token_ids=token_ids.reshape(-1),
            positions=positions.reshape(-1),
            slot_mapping=slots.reshape(-1),
            cu_seqlens_q=torch.arange(
                0, num_rows * q_len + 1, q_len, dtype=torch.int32, device=token_ids.device
            ),
            cache_seqlens=starts.to(torch.int32),
            block_table=block_table,
            logits_indices=logits_indices,
            q_len=q_len,
            max_seqlen_q=q_len,
            max_seqlen_k=max_seqlen_k,
        )


def check_table(row: int, num_blocks: int, num_tokens: int, block_size: int) -> None:
    """Refuse a block table that is shorter than the keys it must hold: kernels do not check."""
    if num_blocks < blocks_for(num_tokens, block_size):
        raise ValueError(
            f"block_table covers {num_blocks * block_size} tokens, row {row} needs {num_tokens}; "
            f"raise num_blocks or lower num_draft_tokens"
        )


def pad_tables(tables: Seq[Seq[int]], padding_block: int, min_width: int = 0) -> Tensor:
    """[rows, max_blocks] int32, short tables filled up with the padding block."""
    lengths = np.fromiter(map(len, tables), np.int64)
    out = np.full((len(tables), max(min_width, int(lengths.max()))), padding_block, np.int32)
    flat = np.fromiter(chain.from_iterable(tables), np.int32, int(lengths.sum()))
    out[np.arange(out.shape[1]) < lengths[:, None]] = flat
    return torch.from_numpy(out)
