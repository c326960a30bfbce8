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
from specdec.decode_state import DecodeState
from specdec.decode_step import DecodeStep
from specdec.engine import Engine
from specdec.kv_cache import KVLayout
from specdec.models.paged_model import PagedModel
from specdec.outputs import Request
from specdec.proposers.base import Draft, Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.none import NoProposer
from specdec.scheduler import Scheduler
from specdec.sequence import Sequence as Seq
from specdec.step_graph import Capture, GraphStep
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
    capture: Capture | None = None,
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
    verifier = TargetModelVerifier(target, rule, "rejection")
    step = DecodeStep(target, proposer, verifier)
    if capture is not None:
        step = GraphStep(
            *(target, proposer, verifier),
            lookahead=num_draft_tokens,
            max_rows=max_num_seqs,
            capture=capture,
        )
    return Engine(step, pool, scheduler, tokenizer=tokenizer, eos_ids=eos_ids)


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
        _audit_model(engine.target, seq, seq.num_computed_tokens)
        proposer = getattr(engine._proposer, "_model", engine._proposer)  # hybrid holds one
        if isinstance(proposer, DraftModelProposer):
            _audit_model(proposer.model, seq, seq.num_draft_computed_tokens)
            _, sample = engine._samples[seq]
            drafted = sample.origins and sample.origins[-1] != "plain" and seq.prefilled
            if drafted and proposer is engine._proposer and engine.scheduler.lookahead(seq):
                assert seq.num_draft_computed_tokens in (len(seq) - 2, len(seq) - 1)
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


def constant_law(logits: Sequence[float]) -> Law:
    """The same logits behind every context."""
    row = torch.tensor(logits, dtype=torch.float32)
    return lambda hashes: row.expand(len(hashes), -1)


def chain_law(vocab_size: int, follows: dict[int, int], *, peak: float = 60.0) -> Law:
    """Token t is followed by follows[t] (t + 1 if absent) with probability 1 in float32; for models
    of order 1.
    """
    table = torch.zeros(vocab_size, vocab_size)
    for token in range(vocab_size):
        table[token, follows.get(token, (token + 1) % vocab_size)] = peak
    return lambda hashes: table[hashes - 1]


def blended_law(law: Law, other: Law, every: int) -> Law:
    """`law`, but `other` behind one context in `every`."""
    return lambda hashes: torch.where((hashes % every == 0)[:, None], other(hashes), law(hashes))


class ScriptedProposer(Proposer):
    """Host-side one-hot drafts: draft(committed token ids, limit) per row, never above the
    limit.
    """

    name = "scripted"

    def __init__(self, draft: Callable[[list[int], int], Sequence[int]]) -> None:
        self._draft = draft

    def propose(self, state: DecodeState) -> Draft:
        rows = zip(state.seqs, state.num_draft_tokens, strict=True)
        drafts = [list(self._draft(list(s.token_ids), k))[:k] if k else [] for s, k in rows]
        return Draft.from_lists(drafts, state.device)


class WordTokenizer:
    """Token i is words[i]; texts are joined as they are."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return "".join(self._words[i] for i in token_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        while text:
            best = max((w for w in self._words if w and text.startswith(w)), key=len)
            ids.append(self._words.index(best))
            text = text[len(best) :]
        return ids


def chi_squared_excess(counts: Tensor, expected: Tensor) -> float:
    """Chi-squared less its bound dof + 5 sqrt(2 dof), over the bound: above 0 is a failure.

    counts and expected [cells]; cells of expectation under 5 are merged, and a count where nothing
    is expected fails.
    """
    counts, expected = counts.double().flatten(), expected.double().flatten()
    if bool((counts[expected == 0] > 0).any()):
        return float("inf")
    order = expected.argsort(descending=True)
    counts, expected = counts[order], expected[order]
    num_large = int((expected >= 5).sum())
    last = num_large if float(expected[num_large:].sum()) >= 5 else num_large - 1
    counts = torch.cat((counts[:last], counts[last:].sum()[None]))
    expected = torch.cat((expected[:last], expected[last:].sum()[None]))
    dof = len(expected) - 1
    bound = dof + 5 * (2 * dof) ** 0.5
    return float(((counts - expected) ** 2 / expected).sum()) / bound - 1
