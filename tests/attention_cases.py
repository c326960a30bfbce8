"""Random paged-attention problems and a dense float64 answer, for every backend's test."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.attention.base import AttentionBackend, AttentionOptions
from specdec.batch import ForwardBatch
from specdec.sequence import blocks_for


@dataclass(slots=True)
class Problem:
    """One forward: caches filled with history, shuffled tables over three times too many blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: ForwardBatch
    starts: list[int]
    q_lens: list[int]
    block_size: int
    options: AttentionOptions


def make_problem(
    starts: list[int],
    q_lens: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    window: int | None = None,
    softcap: float | None = None,
    seed: int = 0,
) -> Problem:
    """Rows with starts[i] older keys and q_lens[i] new ones; `uniform` when all q_lens are
    equal.
    """
    gen = torch.Generator().manual_seed(seed)
    needed = [blocks_for(s + n, block_size) for s, n in zip(starts, q_lens, strict=True)]
    num_blocks = 3 * sum(needed)
    order = torch.randperm(num_blocks, generator=gen).tolist()
    tables = [[order.pop() for _ in range(n)] for n in needed]
    width = max(needed)
    padded = [[*t, *([num_blocks] * (width - len(t)))] for t in tables]
    shape = (num_blocks + 1, block_size, heads[1], head_dim)
    total = sum(q_lens)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen).to(dtype).to(device)

    block_table = torch.tensor(padded, dtype=torch.int32, device=device)
    uniform = len(set(q_lens)) == 1
    slots, positions = [], []
    for table, start, n in zip(tables, starts, q_lens, strict=True):
        for p in range(start, start + n):
            slots.append(table[p // block_size] * block_size + p % block_size)
            positions.append(p)
    batch = ForwardBatch(
        token_ids=torch.zeros(total, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        cu_seqlens_q=torch.tensor([0, *q_lens], dtype=torch.int64).cumsum(0).int().to(device),
        cache_seqlens=torch.tensor(starts, dtype=torch.int32, device=device),
        block_table=block_table,
        logits_indices=torch.zeros(0, dtype=torch.int64, device=device),
        q_len=q_lens[0] if uniform else None,
        max_seqlen_q=max(q_lens),
        max_seqlen_k=max(s + n for s, n in zip(starts, q_lens, strict=True)),
        spans=tuple(zip(starts, q_lens, strict=True)),
    )
    return Problem(
        q=normal(total, heads[0], head_dim),
        k=normal(total, heads[1], head_dim),
        v=normal(total, heads[1], head_dim),
        k_cache=normal(*shape),
        v_cache=normal(*shape),
        batch=batch,
        starts=starts,
        q_lens=q_lens,
        block_size=block_size,
        options=AttentionOptions(head_dim**-0.5, window, softcap),
    )


def dense_answer(
    problem: Problem, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> Tensor:
    """Softmax attention written out per row and query, computed in `dtype` on `device`, returned
    on the CPU.
    """
    outputs = []
    first = 0
    table = problem.batch.block_table.cpu()
    q, k, v, k_cache, v_cache = (
        t.to(device).to(dtype)
        for t in (problem.q, problem.k, problem.v, problem.k_cache, problem.v_cache)
    )
    group = q.shape[1] // k.shape[1]
    options = problem.options
    for row, (start, n) in enumerate(zip(problem.starts, problem.q_lens, strict=True)):
        past = [
            (int(table[row, p // problem.block_size]), p % problem.block_size) for p in range(start)
        ]
        blocks = [b for b, _ in past]
        offsets = [o for _, o in past]
        keys = torch.cat((k_cache[blocks, offsets], k[first : first + n]))
        values = torch.cat((v_cache[blocks, offsets], v[first : first + n]))
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        for j in range(n):
            at = start + j
            low = 0 if options.window is None else max(0, at - options.window + 1)
            scores = torch.einsum("hd,lhd->hl", q[first + j], keys[low : at + 1])
            scores = scores * options.softmax_scale
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            weights = torch.softmax(scores, -1)
            outputs.append(torch.einsum("hl,lhd->hd", weights, values[low : at + 1]))
        first += n
    return torch.stack(outputs).cpu()


def check_backend(
    backend: AttentionBackend, problem: Problem, *, answer_device: str = "cpu"
) -> None:
    """Error at most 3 times that of a same-precision dense answer + 1e-5; the cache written bit for
    bit, and only there.
    """
    exact = dense_answer(problem, device=answer_device)
    same_precision = dense_answer(problem, problem.q.dtype, answer_device)
    before_k, before_v = problem.k_cache.clone(), problem.v_cache.clone()
    padding_block = problem.k_cache.shape[0] - 1
    problem.batch.plan = backend.plan(problem.batch, problem.block_size, padding_block)
    out = backend.attend(
        problem.q,
        problem.k,
        problem.v,
        problem.k_cache,
        problem.v_cache,
        problem.batch,
        problem.options,
    )
    error = (out.cpu().double() - exact).abs().max().item()
    allowed = 3 * (same_precision.double() - exact).abs().max().item() + 1e-5
    assert error <= allowed, f"error {error:.3g} > {allowed:.3g}"
    slots = problem.batch.slot_mapping
    for before, cache, new in (
        (before_k, problem.k_cache, problem.k),
        (before_v, problem.v_cache, problem.v),
    ):
        flat = before.view(-1, *before.shape[2:])
        flat[slots] = new
        written = cache.view(-1, *cache.shape[2:])
        assert torch.equal(flat.nan_to_num(7), written.nan_to_num(7)), "the cache differs elsewhere"
