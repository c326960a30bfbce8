"""DecodeState: one row per decoding sequence, as the tensors that draft, verify and accept work
on.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specdec.batch import ForwardBatch, check_table, pad_tables
from specdec.sampling.noise import WindowUniforms, window_uniforms
from specdec.sampling.rows import RowSource, SamplingRows
from specdec.sequence import Sequence, blocks_for


@dataclass(slots=True)
class DecodeState:
    """The rows of one decode step. Row i has n_i committed tokens; its window is the K_i drafts
    behind them.

    Built from host data before the step; inside the step only tensors are used. `num_draft_tokens`
    is an upper limit that a proposer may undercut, as long as it decides before it draws a draft.
    """

    seqs: list[Sequence]  # host side, for proposers that read tokens
    num_draft_tokens: list[int]  # K_i on the host
    draft_limits: Tensor  # [rows] int64, K_i on the device
    last_token_ids: (
        Tensor  # [rows, 2] int64: the last two committed tokens ([t, t] for a one-token sequence)
    )
    seq_lens: Tensor  # [rows] int64, n_i
    block_table: Tensor  # [rows, max_blocks] int32
    block_size: int
    vocab_size: int  # the target's
    max_len: int  # no row has more committed tokens
    sampling: SamplingRows
    uniforms: WindowUniforms | None = None  # [rows, max K + 1] each; None: all greedy, or not drawn

    @property
    def max_num_draft_tokens(self) -> int:
        return max(self.num_draft_tokens, default=0)

    @property
    def num_rows(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    @classmethod
    def build(
        cls,
        seqs: Seq[Sequence],
        num_draft_tokens: Seq[int],
        *,
        block_size: int,
        padding_block: int,
        vocab_size: int,
        device: torch.device,
    ) -> DecodeState:
        """Gather the rows' tensors. Raises ValueError if a block table does not cover n + K
        tokens.

        A row of few drafts is computed as wide as the widest: `block_table` sends what lies behind
        its own blocks to the padding block.
        """
        lengths = [len(seq.token_ids) for seq in seqs]
        for row, (seq, length, k) in enumerate(zip(seqs, lengths, num_draft_tokens, strict=True)):
            if len(seq.block_table) * block_size < length + k:
                check_table(row, len(seq.block_table), length + k, block_size)
        seq_lens = torch.tensor(lengths, dtype=torch.int64).to(device)
        sampling = SamplingRows.build([row_source(seq) for seq in seqs], vocab_size, device)
        longest = max(lengths) + max(num_draft_tokens)
        tables = pad_tables(
            [seq.block_table for seq in seqs], padding_block, blocks_for(longest, block_size)
        )
        last = [
            seq.token_ids[-2:] if n > 1 else seq.token_ids * 2
            for seq, n in zip(seqs, lengths, strict=True)
        ]
        return cls(
            seqs=list(seqs),
            num_draft_tokens=list(num_draft_tokens),
            draft_limits=torch.tensor(num_draft_tokens, dtype=torch.int64).to(device),
            last_token_ids=torch.tensor(last, dtype=torch.int64).to(device),
            seq_lens=seq_lens,
            block_table=tables.to(device),
            block_size=block_size,
            vocab_size=vocab_size,
            max_len=max(lengths),
            sampling=sampling,
        )

    def draw_noise(self) -> None:
        """Draw the step's uniforms, unless every row is greedy."""
        if not self.sampling.all_greedy:
            self.uniforms = window_uniforms(
                self.sampling.seeds, self.seq_lens, self.max_num_draft_tokens + 1
            )

    def append_batch(
        self, token_ids: Tensor, starts: Tensor, num_valid: Tensor, max_end: int, logits: Tensor
    ) -> ForwardBatch:
        """The forward that appends token_ids [rows, Q] at starts [rows]; `logits` picks rows of the
        flat batch.
        """
        return ForwardBatch.uniform(
            token_ids, starts, num_valid, self.block_table, self.block_size, max_end, logits
        )


_ROWS: WeakKeyDictionary[Sequence, RowSource] = WeakKeyDictionary()


def row_source(seq: Sequence) -> RowSource:
    """What the sampling pipeline needs to know of a sequence, made at its first step."""
    found = _ROWS.get(seq)
    if found is None:
        found = _ROWS[seq] = RowSource(
            params=seq.params,
            token_ids=seq.token_ids,
            num_prompt_tokens=seq.num_prompt_tokens,
            seed=seq.seed,
            stop_ids=tuple(sorted(seq.end_ids)),
            bad_words=seq.bad_words,
        )
    return found
