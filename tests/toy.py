"""A toy language model whose KV entry of a slot *is* the token id: every paging error changes its
next-token law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.batch import ForwardBatch
from specdec.block_pool import BlockPool
from specdec.engine import Engine
from specdec.kv_cache import KVLayout
from specdec.models.paged_model import PagedModel
from specdec.outputs import Request
from specdec.proposers.base import Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.none import NoProposer
from specdec.scheduler import Scheduler
from specdec.sequence import Sequence as Seq
from specdec.verifiers.rejection import rejection
from specdec.verifiers.target_model import TargetModelVerifier

CPU = torch.device("cpu")
Law = Callable[[Tensor], Tensor]  # context hashes [N] int64 -> logits [N, vocab]


def table_law(vocab_size: int, seed: int, *, scale: float = 2.0, rows: int = 1009) -> Law:
    """Logits looked up by the hash of the context."""
    table = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale

    def law(hashes: Tensor) -> Tensor:
        return table[hashes % rows]

    law.table = table  # type: ignore[attr-defined]
    return law


def context_hash(token_ids: Sequence[int], order: int | None) -> int:
    """What ToyModel hashes a context to: all tokens, or the last `order`."""
    return int(_hashes(torch.tensor([list(token_ids)]), order)[0, -1])


def _hashes(ids: Tensor, order: int | None) -> Tensor:
    """Hash of each prefix of ids [B, L] (order None), or of its last `order` tokens: [B, L] int64,
    not negative.
    """
    length = ids.shape[1]
    if order is None:
        weights = torch.cumprod(torch.full((length,), 6364136223846793005), 0)
        return (torch.cumsum((ids + 1) * weights, 1) >> 7) & 0x7FFFFFFF
    total = torch.zeros_like(ids)
    for back in range(order):
        shifted = torch.zeros_like(ids)
        shifted[:, back:] = ids[:, : length - back] + 1
        total = total * 131 + shifted
    return total


class ToyModel(PagedModel):
    """Writes token ids into its cache and reads its whole context back through the block table."""

    def __init__(
        self,
        law: Law,
        vocab_size: int,
        *,
        max_model_len: int = 512,
        order: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.kv_layout = KVLayout(1, 1, 1, torch.float64)
        self.device = CPU
        self.num_forwards = 0
        self.num_tokens = 0
        self.q_lens: list[int | None] = []
        self._law = law
        self._order = order

    def forward(self, batch: ForwardBatch) -> Tensor:
        assert int(batch.positions.max()) < self.max_model_len + 64
        self.num_forwards += 1
        self.num_tokens += batch.token_ids.shape[0]
        self.q_lens.append(batch.q_len)
        cache = self.kv_cache
        values = batch.token_ids.double().view(-1, 1, 1)
        cache.write(0, values, values, batch.slot_mapping)
        flat = cache.k[0].view(cache.num_blocks + 1, -1)
        context = flat[batch.block_table.long()].view(batch.num_seqs, -1).long()
        hashes = _hashes(context, self._order)
        counts = batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1]
        rows = torch.repeat_interleave(torch.arange(batch.num_seqs), counts.long())
        at = batch.positions.clamp(max=hashes.shape[1] - 1)
        wanted = batch.logits_indices
        return self._law(hashes[rows[wanted], at[wanted]]).float()


def build_engine(
    target: PagedModel,
    draft: PagedModel | Proposer | None = None,
    *,
    num_draft_tokens: int = 4,
    num_blocks: int = 256,
    block_size: int = 16,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    prefix_caching: bool = True,
    rule: Any = rejection,
    eos_ids: Sequence[int] = (),
    tokenizer: Any = None,
    max_model_len: int | None = None,
) -> Engine:
    """An engine of stubs, wired as specdec.assembly wires real models."""
    target.attach(num_blocks, block_size)
    proposer: Proposer
    if draft is None:
        proposer = NoProposer()
    elif isinstance(draft, Proposer):
        proposer = draft
    else:
        draft.attach(num_blocks, block_size)
        proposer = DraftModelProposer(draft, max_num_batched_tokens)
    pool = BlockPool(num_blocks, block_size, prefix_caching)
    longest = num_blocks * block_size - num_draft_tokens - 1
    scheduler = Scheduler(
        pool,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=min(max_model_len or target.max_model_len, longest),
        num_draft_tokens=num_draft_tokens,
        proposer_max_len=proposer.max_model_len,
    )
    verifier = TargetModelVerifier(target, rule)
    return Engine(target, proposer, verifier, pool, scheduler, tokenizer=tokenizer, eos_ids=eos_ids)


def run(
    engine: Engine, *, check: Callable[[Engine], None] | None = None, limit: int = 100_000
) -> list[Request]:
    """Step until nothing is left; returns the requests in the order in which they finished."""
    finished: list[Request] = []
    for _ in range(limit):
        if not engine.has_work:
            return finished
        finished += [r for r in engine.step() if r.finished and r not in finished]
        if check:
            check(engine)
    raise AssertionError(f"not done after {limit} steps")


def output_ids(request: Request) -> list[int]:
    """Emitted tokens of the first sample."""
    return request.output().outputs[0].token_ids


def audit(engine: Engine) -> None:
    """KV below each counter equals the tokens, in both models; the pool is sound."""
    engine.pool.check_integrity()
    for seq in engine.scheduler.running:
        _audit_model(engine._target, seq, seq.num_computed_tokens)
        proposer = engine._proposer
        if isinstance(proposer, DraftModelProposer):
            _audit_model(proposer.model, seq, seq.num_draft_computed_tokens)
        if seq.prefilled:
            assert seq.num_computed_tokens == len(seq) - 1


def _audit_model(model: Any, seq: Seq, num_valid: int) -> None:
    cache = model.kv_cache
    flat = cache.k[0][torch.tensor(seq.block_table, dtype=torch.long)].view(-1)
    assert flat[:num_valid].long().tolist() == seq.token_ids[:num_valid], "KV differs from tokens"


def plain_greedy(
    law: Law, prompt: Sequence[int], num_tokens: int, order: int | None = None
) -> list[int]:
    """Greedy decoding without any engine."""
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = law(torch.tensor([context_hash(ids, order)]))[0]
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]
