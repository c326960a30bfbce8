"""Trainer: the draft's layers learn the target's distribution; resumable, the order of the rows
follows from the seed alone.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.distill.config import DistillConfig
from specdec.distill.corpus import PackedRows
from specdec.distill.losses import distribution_loss, head_loss, loss_weights
from specdec.models.lean_model import FAMILIES
from specdec.models.shared_draft import new_draft

CHECKPOINT = "checkpoint.pt"
FINAL_LR = 0.02  # share of the learning rate at the end of the cosine
TEACHER_ROWS = 64  # rows of one forward of the target


def source_layers(num_layers: int, num_target_layers: int) -> list[int]:
    """The target's layers that a draft starts from: the first, evenly spaced ones, the last."""
    if num_layers == 1:
        return [num_target_layers - 1]
    return [round(i * (num_target_layers - 1) / (num_layers - 1)) for i in range(num_layers)]


def start_draft(
    target: PreTrainedModel, num_layers: int, token_map: Tensor | None
) -> PreTrainedModel:
    """A float32 draft with layers copied from the target. Raises ValueError where the layers of
    the family cannot stand alone.
    """
    if target.config.model_type not in FAMILIES:
        raise ValueError(
            f"distillation serves {', '.join(FAMILIES)}, this target is "
            f"{target.config.model_type!r}"
        )
    config = copy.deepcopy(target.config)
    total = config.num_hidden_layers
    if num_layers > total:
        raise ValueError(f"num_layers is {num_layers}, the target has {total}; lower it")
    chosen = source_layers(num_layers, total)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in chosen]
    draft = new_draft(config, target, token_map, dtype=torch.float32, attention="sdpa")
    for layer, i in zip(draft.base_model.layers, chosen, strict=True):
        layer.load_state_dict(
            {k: v.float() for k, v in target.base_model.layers[i].state_dict().items()}
        )
    draft.base_model.norm.load_state_dict(target.base_model.norm.state_dict())
    draft.base_model.layers.float().requires_grad_(True)
    draft.base_model.norm.float().requires_grad_(True)
    return draft


class _Trunk(nn.Module):
    """The draft without its borrowed parts, as one forward (what accelerate wraps)."""

    def __init__(self, draft: PreTrainedModel) -> None:
        super().__init__()
        self.layers, self.norm = draft.base_model.layers, draft.base_model.norm
        self._base = [draft.base_model]  # in a list: its parameters are not this module's

    def forward(self, embedded: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = (
            self._base[0](
                inputs_embeds=embedded,
                position_ids=positions,
                attention_mask=mask,
                use_cache=False,
            )
        ).last_hidden_state
        return out


class Trainer:
    """One training run over packed rows.

    Args:
        target: frozen, on the accelerator's device, attention "sdpa".
        draft: from start_draft.
        folder: where checkpoints go.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        rows: PackedRows,
        config: DistillConfig,
        folder: Path,
        accelerator: Accelerator,
    ) -> None:
        self.draft, self.config, self.step = draft, config, 0
        self._target, self._rows, self._folder = target, rows, folder
        self._accelerator = accelerator
        self._device = accelerator.device
        learned = max(1, int(rows.learned.sum()))
        per_step = learned / rows.num_rows * config.rows_per_step
        self.num_steps = max(1, math.ceil(config.train_tokens / per_step))
        matrices = [p for p in draft.base_model.layers.parameters() if p.ndim > 1]
        vectors = [
            *(p for p in draft.base_model.layers.parameters() if p.ndim == 1),
            *draft.base_model.norm.parameters(),
        ]
        # Muon (Jordan et al. 2024), its updates scaled to AdamW's size (arXiv 2502.16982).
        muon = torch.optim.Muon(
            matrices, lr=config.muon_lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        )
        adamw = torch.optim.AdamW(vectors, lr=config.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._optimizers: list[Any] = [muon, adamw]
        self._base_lrs = [config.muon_lr, config.adamw_lr]
        self._parameters = matrices + vectors
        self._trunk = accelerator.prepare_model(_Trunk(draft))
        self._chunk_loss: Callable[..., tuple[Tensor, Tensor]] = distribution_loss
        if self._device.type == "cuda":
            self._chunk_loss = torch.compile(distribution_loss, dynamic=True)
        self._teacher_steps = max(1, TEACHER_ROWS // config.rows_per_step)
        self._group = -1  # of steps whose rows the target has run on
        self._taught: dict[int, Tensor] = {}  # row -> the target's hidden state
        self._pass, self._order = -1, np.arange(rows.num_rows)

    def run(self, until: int, advance: Callable[[int, float], None] | None = None) -> None:
        """Train up to step `until`; `advance(step, loss)` after some of them."""
        while self.step < until:
            loss = self._train_step()
            self.step += 1
            if advance is not None and (self.step % 20 == 0 or self.step == until):
                advance(self.step, float(loss))

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        if not self._accelerator.is_main_process:
            return
        state = {
            "step": self.step,
            "num_steps": self.num_steps,
            "layers": self.draft.base_model.layers.state_dict(),
            "norm": self.draft.base_model.norm.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        temporary = self._folder / (CHECKPOINT + ".part")
        torch.save(state, temporary)
        os.replace(temporary, self._folder / CHECKPOINT)

    def resume(self) -> bool:
        """Go on from the checkpoint, if there is one of a run of this length."""
        file = self._folder / CHECKPOINT
        if not file.is_file():
            return False
        state = torch.load(file, map_location=self._device, weights_only=True)
        if state["num_steps"] != self.num_steps:
            raise ValueError(
                f"{file} is of a run of {state['num_steps']} steps, this one has "
                f"{self.num_steps}; give the same settings, or another --out"
            )
        self.draft.base_model.layers.load_state_dict(state["layers"])
        self.draft.base_model.norm.load_state_dict(state["norm"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        return True

    def _train_step(self) -> Tensor:
        rows = self._rows_of_step(self.step)
        taught = self._taught_rows(rows)
        learned = self._rows.learned[rows].to(self._device)
        weights = torch.tensor(
            loss_weights(self.step / self.num_steps, self.config.tv_start), device=self._device
        )
        with self._accelerator.autocast():
            hidden = self._trunk(*self._inputs(rows, torch.float32))[learned]
        head, own_head = self._target.get_output_embeddings(), self.draft.get_output_embeddings()
        loss = head_loss(
            hidden,
            taught,
            own_head.weight.detach(),
            head.weight.detach(),
            weights,
            self._token_map(),
            self._chunk_loss,
        )
        self._accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, lr in zip(self._optimizers, self._base_lrs, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * self._lr_factor()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def _lr_factor(self) -> float:
        """Linear warm-up, then a cosine."""
        warmup = min(self.config.num_warmup_steps, max(1, self.num_steps // 10))
        if self.step < warmup:
            return (self.step + 1) / warmup
        done = (self.step - warmup) / max(1, self.num_steps - warmup)
        return FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * done))

    def _rows_of_step(self, step: int) -> list[int]:
        """This process's rows of a step: consecutive entries of the passes' permutations."""
        size = self.config.rows_per_step
        entries = range(step * size, (step + 1) * size)
        share = list(entries)[self._accelerator.process_index :: self._accelerator.num_processes]
        return [self._row_at(entry) for entry in share or entries[:1]]

    def _row_at(self, entry: int) -> int:
        number, offset = divmod(entry, self._rows.num_rows)
        if number != self._pass:
            self._pass = number
            generator = np.random.default_rng((self.config.seed, number))
            self._order = generator.permutation(self._rows.num_rows)
        return int(self._order[offset])

    def _taught_rows(self, rows: list[int]) -> Tensor:
        """The target's hidden state [n, H] at the learned positions of this step's rows. The target
        runs on the rows of several steps at once, always the same ones, so that a resumed run
        computes the same.
        """
        group = self.step // self._teacher_steps
        if group != self._group:
            self._group = group
            first = group * self._teacher_steps
            steps = range(first, min(first + self._teacher_steps, self.num_steps))
            fresh = list(dict.fromkeys(row for s in steps for row in self._rows_of_step(s)))
            hidden = target_hidden(self._target, *self._inputs(fresh, self._target.dtype))
            self._taught = {
                row: own[self._rows.learned[row].to(self._device)]
                for row, own in zip(fresh, hidden, strict=True)
            }
        return torch.cat([self._taught[row] for row in rows])

    def _inputs(self, rows: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        return row_inputs(self._target, self._rows, rows, dtype)

    def _token_map(self) -> Tensor | None:
        token_map: Tensor | None = self.draft.token_map
        return None if token_map is None else token_map.to(self._device)


def row_inputs(
    target: PreTrainedModel, rows: PackedRows, chosen: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(embedded [R, L, H], positions [R, L], mask [R, 1, L, L] bool) of packed rows on the
    target's device: a token sees its own conversation up to itself.
    """
    device = target.device
    token_ids = rows.token_ids[chosen].long().to(device)
    segments = rows.segments[chosen].to(device)
    same = segments[:, :, None] == segments[:, None, :]
    mask = same.tril()[:, None]
    embedded = target.get_input_embeddings()(token_ids).to(dtype)
    return embedded, rows.positions[chosen].long().to(device), mask


@torch.no_grad()
def target_hidden(
    target: PreTrainedModel, embedded: Tensor, positions: Tensor, mask: Tensor
) -> Tensor:
    """[R, L, H] behind the final norm."""
    out: Tensor = target.base_model(
        inputs_embeds=embedded, position_ids=positions, attention_mask=mask, use_cache=False
    ).last_hidden_state
    return out
