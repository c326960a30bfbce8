"""Codes for one weight matrix: rounding to nearest, and GPTQ (Frantar et al., arXiv 2210.17323)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128  # columns updated together
DAMPING = 0.01  # of the mean diagonal of the Hessian
DAMPING_STEPS = 4  # each ten times the one before, where the Hessian is not positive definite
SMALLEST_SCALE = 2.0**-24  # of float16


@dataclass(frozen=True, slots=True)
class Grid:
    """How weights are rounded; group_size -1 = one group a row."""

    bits: int = 4
    group_size: int = 128
    sym: bool = True
    act_order: bool = False


@dataclass(frozen=True, slots=True)
class Codes:
    """A rounded weight [N, K]; its value is (codes - zeros[:, g_idx]) * scales[:, g_idx]."""

    codes: Tensor  # uint8 [N, K]
    scales: Tensor  # float16 [N, G]
    zeros: Tensor  # uint8 [N, G], 1 .. 2**bits - 1: the v1 format cannot hold 0
    g_idx: Tensor  # int32 [K]

    def weight(self) -> Tensor:
        """float32 [N, K]."""
        group = self.g_idx.long()
        return (self.codes.float() - self.zeros.float()[:, group]) * self.scales.float()[:, group]


def round_to_nearest(weight: Tensor, grid: Grid) -> Codes:
    """Each weight of [N, K] to the nearest value of its group's grid."""
    weight = weight.float()
    num_columns = weight.shape[1]
    size = num_columns if grid.group_size == -1 else min(grid.group_size, num_columns)
    codes, scales, zeros = [], [], []
    for start in range(0, num_columns, size):
        part = weight[:, start : start + size]
        scale, zero = group_grid(part, grid)
        codes.append(_nearest(part, scale[:, None], zero[:, None], grid.bits))
        scales.append(scale)
        zeros.append(zero)
    g_idx = torch.arange(num_columns, device=weight.device, dtype=torch.int32) // size
    return _codes(torch.cat(codes, dim=1), scales, zeros, g_idx)


def gptq(weight: Tensor, hessian: Tensor, grid: Grid, damping: float = DAMPING) -> Codes:
    """Round column by column; each column's error is spread over the later ones so that the output
    on the calibration inputs changes least.

    Args:
        weight: [N, K].
        hessian: [K, K] float32, the mean of x x^T over calibration inputs x [K], up to a factor.
        grid: with act_order, columns of the largest inputs come first; groups follow that order.
        damping: added to the diagonal, as a share of its mean.

    Raises ValueError if the Hessian holds no finite numbers or stays indefinite with more damping.
    """
    work, hessian = weight.float().clone(), hessian.float().clone()
    num_columns = work.shape[1]
    if not bool(hessian.isfinite().all()):
        raise ValueError("the calibration gave numbers that are not finite")
    dead = hessian.diagonal() == 0  # inputs that never came: their weights are free
    hessian.diagonal()[dead] = 1.0
    work[:, dead] = 0.0
    order = torch.arange(num_columns, device=work.device)
    if grid.act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
        work, hessian = work[:, order], hessian[order][:, order]
    inverse = _inverse_factor(hessian, damping)
    size = num_columns if grid.group_size == -1 else min(grid.group_size, num_columns)
    codes = torch.empty(work.shape, dtype=torch.uint8, device=work.device)
    scales, zeros = [], []
    for start in range(0, num_columns, size):
        end = min(start + size, num_columns)
        scale, zero = group_grid(work[:, start:end], grid)
        scales.append(scale)
        zeros.append(zero)
        for first in range(start, end, BLOCK):
            last = min(first + BLOCK, end)
            _round_block(work, codes, inverse, (first, last), (scale, zero), grid.bits)
    back = order.argsort()
    g_idx = (torch.arange(num_columns, device=work.device, dtype=torch.int32) // size)[back]
    return _codes(codes[:, back], scales, zeros, g_idx)


def weighted_error(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """What GPTQ makes small: tr((W - Q) H (W - Q)^T), the mean squared change of the outputs."""
    change = weight.float() - rounded.float()
    return float(((change @ hessian.float()) * change).sum())


def group_grid(part: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Scale, rounded to float16 as it will be stored, and zero point, both float32 [N], of one
    group [N, g].
    """
    top = (1 << grid.bits) - 1
    if grid.sym:
        largest = part.abs().amax(dim=1)
        scale = 2 * largest / top
        zero = torch.full_like(scale, float(1 << (grid.bits - 1)))
    else:
        low, high = part.amin(dim=1).clamp(max=0.0), part.amax(dim=1).clamp(min=0.0)
        scale = (high - low) / top
        zero = (-low / scale.clamp(min=SMALLEST_SCALE)).round()
        without = zero < 1  # 0 cannot be stored: the grid starts one step below
        scale = torch.where(without, high / (top - 1), scale)
        zero = zero.clamp(1, top)
    scale = scale.clamp(min=SMALLEST_SCALE).half().float()
    return scale, zero


def _nearest(values: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    return ((values / scale).round() + zero).clamp(0, (1 << bits) - 1).to(torch.uint8)


def _round_block(
    work: Tensor,
    codes: Tensor,
    inverse: Tensor,
    span: tuple[int, int],
    params: tuple[Tensor, Tensor],
    bits: int,
) -> None:
    """Round the columns first..last of `work` into `codes`; their errors go to later columns."""
    first, last = span
    scale, zero = params
    block, factor = work[:, first:last], inverse[first:last, first:last]
    errors = torch.empty_like(block)
    for i in range(last - first):
        column = block[:, i]
        code = _nearest(column, scale, zero, bits)
        codes[:, first + i] = code
        error = (column - (code.float() - zero) * scale) / factor[i, i]
        block[:, i:] -= error[:, None] * factor[i, i:]
        errors[:, i] = error
    work[:, last:] -= errors @ inverse[first:last, last:]


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped Hessian."""
    diagonal = torch.arange(hessian.shape[0], device=hessian.device)
    mean = float(hessian.diagonal().mean())
    for step in range(DAMPING_STEPS):
        damped = hessian.clone()
        damped[diagonal, diagonal] += damping * 10**step * mean
        lower, failed = torch.linalg.cholesky_ex(damped)
        if int(failed):
            continue
        upper: Tensor
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not int(failed) and bool(upper.isfinite().all()):
            return upper
    raise ValueError("the Hessian of its inputs is not positive definite; use more text")


def _codes(codes: Tensor, scales: list[Tensor], zeros: list[Tensor], g_idx: Tensor) -> Codes:
    return Codes(
        codes,
        torch.stack(scales, dim=1).half(),
        torch.stack(zeros, dim=1).to(torch.uint8),
        g_idx,
    )
