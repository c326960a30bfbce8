"""DistillConfig: what to train and on how much text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from specdec.config import check_number, check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig:
    """Settings of one distillation. Wrong values raise ValueError with the field and the limit.

    A step sees rows_per_step * row_tokens tokens; train_tokens counts answer tokens, each pass
    over the text anew.
    """

    num_layers: int = 2  # transformer layers of the draft
    head_size: int | None = None  # M: keep the M ids most frequent in the answers; None = all
    num_own_turns: int = 50_000  # user turns that the target writes itself (chat models)
    num_answer_tokens: int = 12_000_000  # answer tokens written by the target
    max_turn_tokens: int = 160
    max_answer_tokens: int = 384
    max_conversation_tokens: int = 1024  # longer prompts are left out
    num_held_out: int = 96  # prompts kept out of training, for the reports
    train_tokens: int = 60_000_000
    row_tokens: int = 1024  # conversations are packed into rows of this length
    rows_per_step: int = 16
    muon_lr: float = 1e-2  # matrices (Muon)
    adamw_lr: float = 4e-3  # norms (AdamW)
    num_warmup_steps: int = 60
    tv_start: float = 0.6  # from this share of the run on the loss is 0.3 KL + total variation
    num_reports: int = 4  # held-out reports between the first step and the last
    num_draft_tokens: int = 5  # K of the report's runs through the engine
    max_num_seqs: int = 1024  # answers written at once
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (
            *(("num_layers", 1), ("num_own_turns", 0), ("num_answer_tokens", 1)),
            *(("max_turn_tokens", 8), ("max_answer_tokens", 1), ("max_conversation_tokens", 2)),
            *(("num_held_out", 1), ("train_tokens", 1), ("row_tokens", 2), ("rows_per_step", 1)),
            *(("num_warmup_steps", 1), ("num_reports", 0), ("num_draft_tokens", 1)),
            *(("max_num_seqs", 1), ("seed", 0)),
        ):
            check_whole(name, getattr(self, name), low)
        if self.head_size is not None:
            check_whole("head_size", self.head_size, 1)
        check_number("muon_lr", self.muon_lr, 0.0, 1.0, open_low=True)
        check_number("adamw_lr", self.adamw_lr, 0.0, 1.0, open_low=True)
        check_number("tv_start", self.tv_start, 0.0, 1.0)
        if self.row_tokens < self.max_conversation_tokens:
            raise ValueError(
                f"row_tokens is {self.row_tokens}, a conversation may have "
                f"{self.max_conversation_tokens}; raise row_tokens or lower "
                f"max_conversation_tokens"
            )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
