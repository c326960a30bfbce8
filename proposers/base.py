"""Proposer: drafts tokens for the rows of a decode step. Draft: what it hands to the verifier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.decode_state import DecodeState
from specdec.sequence import Sequence, Span


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafted tokens of one step. A token, once drawn, must be handed in: dropping it by its own q
    biases the output.
    """

    token_ids: Tensor  # [rows, K] int64; entries at or behind num_draft_tokens[i] are padding (-1)
    num_draft_tokens: Tensor  # [rows] int64; 0 = plain decoding of that row
    probs: Tensor | None = None  # [rows, K, vocab] float32, the q drawn from; None = one-hot

    @property
    def max_num_draft_tokens(self) -> int:
        return self.token_ids.shape[1]

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> Draft:
        """No drafts: the step is plain decoding."""
        return cls(
            token_ids=torch.empty(num_rows, 0, dtype=torch.int64, device=device),
            num_draft_tokens=torch.zeros(num_rows, dtype=torch.int64, device=device),
        )

    @classmethod
    def from_lists(cls, drafts: Seq[Seq[int]], device: torch.device) -> Draft:
        """One-hot drafts of a host-side proposer, one list per row, as wide as the longest."""
        width = max((len(d) for d in drafts), default=0)
        rows = [[*d, *([-1] * (width - len(d)))] for d in drafts]
        return cls(
            token_ids=torch.tensor(rows, dtype=torch.int64).view(len(rows), width).to(device),
            num_draft_tokens=torch.tensor([len(d) for d in drafts], dtype=torch.int64).to(device),
        )

    def check(self, state: DecodeState) -> None:
        """Refuse tensors of a wrong shape or dtype; the verifier checks values on the device."""
        rows, width = state.num_rows, self.max_num_draft_tokens
        needed = {
            "token_ids": (self.token_ids, torch.int64, (rows, width)),
            "num_draft_tokens": (self.num_draft_tokens, torch.int64, (rows,)),
            "probs": (self.probs, torch.float32, (rows, width, state.vocab_size)),
        }
        for field, (tensor, dtype, shape) in needed.items():
            if tensor is not None and (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
                raise ValueError(
                    f"{field} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                    f"needed is {dtype} of shape {shape}"
                )
        if width > state.max_num_draft_tokens:
            raise ValueError(
                f"{width} tokens were drafted, the limit of this step is "
                f"{state.max_num_draft_tokens}"
            )


class Proposer(ABC):
    """Drafts at most state.num_draft_tokens[i] tokens for row i.

    A proposer that keeps KV of its own says so by `uses_kv`, keeps
    `Sequence.num_draft_computed_tokens` true, and fills its KV in `extend`. `max_model_len` bounds
    the tokens of a sequence for which it drafts (None = no bound).

    `placement` says where propose() works, which decides what a CUDA graph may hold: "device", a
    function of the state's tensors alone; "host", one of state.seqs alone, with probs None;
    "mixed", anything else: its steps run eagerly.
    """

    name: str
    uses_kv: bool = False
    max_model_len: int | None = None
    placement: str = "mixed"

    def prepare(self, seqs: Seq[Sequence], num_draft_tokens: Seq[int]) -> None:  # noqa: B027
        """Before propose(): what needs the host, such as KV that must be caught up (optional)."""

    @abstractmethod
    def propose(self, state: DecodeState) -> Draft:
        """Draft for all rows; may write its KV behind the committed tokens."""

    def extend(self, spans: Seq[Span]) -> None:  # noqa: B027  (optional)
        """The target computes these committed tokens now: compute their draft KV too."""

    def forget(self, seq: Sequence) -> None:  # noqa: B027  (optional)
        """The sequence left the engine."""

    def clear(self, blocks: Seq[int]) -> None:  # noqa: B027  (optional)
        """These blocks are handed out now: zero their KV, it may be anything."""
