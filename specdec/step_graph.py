"""GraphStep: a whole decode step, draft to acceptance, replayed as one CUDA graph.

Captured at first use per (rows, table width, drafting or not, greedy or not), rounded up so that a
few graphs serve all batches. What changes from step to step lies in tensors of fixed addresses.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch

from specdec.batch import pad_tables
from specdec.decode_state import DecodeState, row_source
from specdec.decode_step import DecodeStep, StepResult, pack
from specdec.models.paged_model import PagedModel
from specdec.proposers.base import Draft, Proposer
from specdec.sampling.rows import SamplingRows
from specdec.sequence import Sequence, blocks_for
from specdec.stats import EngineStats
from specdec.verifiers.base import Verifier

logger = logging.getLogger("specdec")

MAX_GRAPHS = 32  # kept; the least recently used one goes first
LAST_0, LAST_1, LENGTH, LIMIT, SEED, GREEDY = range(6)  # columns of a row's integers


class Graph(Protocol):
    """A captured function: run again by replay(), on the same tensors."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None]], Graph]


class CudaCapture:
    """Captures into CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Graph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()  # kernels compile and libraries allocate before the capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            function()
        return graph


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a graph is captured for."""

    num_rows: int
    num_blocks: int  # width of the block table
    num_drafts: int
    greedy: bool


class GraphStep(DecodeStep):
    """Replays graphs where it can; other steps run eagerly.

    Eager are steps with a row whose parameters are more than a temperature, or that wants
    log-probabilities (a graph keeps no logits), and proposers that are neither tensor functions nor
    work on the host alone.
    """

    def __init__(
        self,
        target: PagedModel,
        proposer: Proposer,
        verifier: Verifier,
        *,
        lookahead: int,
        max_rows: int,
        capture: Capture | None = None,
    ) -> None:
        super().__init__(target, proposer, verifier)
        self._lookahead = lookahead
        self._max_rows = max_rows
        self._capture = capture or CudaCapture()
        self._captured: OrderedDict[StepShape, CapturedStep] = OrderedDict()
        self._failed: set[StepShape] = set()  # run eagerly, with the reason logged once

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    def run(
        self, seqs: Seq[Sequence], num_draft_tokens: Seq[int], stats: EngineStats
    ) -> StepResult:
        shape = self._shape(seqs, num_draft_tokens)
        if shape is None or shape in self._failed:
            return super().run(seqs, num_draft_tokens, stats)
        with stats.phase("draft"):
            self.prepare(seqs, num_draft_tokens)
            drafts = self._host_drafts(seqs, num_draft_tokens)
            step = self._step(shape)
            step.load(seqs, num_draft_tokens, drafts)
        with stats.phase("verify"):
            try:
                step.replay(self._capture)
            except torch.OutOfMemoryError as error:
                self._give_up(shape, error)
        if shape in self._failed:
            return super().run(seqs, num_draft_tokens, stats)
        with stats.phase("read"):
            return step.read(len(seqs))

    def _shape(self, seqs: Seq[Sequence], num_draft_tokens: Seq[int]) -> StepShape | None:
        rows = [row_source(seq) for seq in seqs]
        asks_more = any(row.has_rules or row.params.logprobs is not None for row in rows)
        if self.proposer.placement == "mixed" or asks_more:
            return None
        num_drafts = self._lookahead if any(num_draft_tokens) else 0
        longest = max(len(seq) for seq in seqs) + num_drafts
        num_blocks = blocks_for(longest, self.target.kv_cache.block_size)
        return StepShape(
            num_rows=min(rounded(len(seqs)), max(self._max_rows, len(seqs))),
            num_blocks=rounded(num_blocks),
            num_drafts=num_drafts,
            greedy=all(row.greedy for row in rows),
        )

    def _host_drafts(self, seqs: Seq[Sequence], num_draft_tokens: Seq[int]) -> Draft | None:
        """The drafts of a proposer that works on the host; None: it drafts inside the step."""
        if self.proposer.placement == "device" or not any(num_draft_tokens):
            return None
        return self.checked_draft(self.build(seqs, num_draft_tokens, torch.device("cpu")))

    def _step(self, shape: StepShape) -> CapturedStep:
        step = self._captured.get(shape)
        if step is None:
            while len(self._captured) >= MAX_GRAPHS:
                self._captured.popitem(last=False)
            step = self._captured[shape] = CapturedStep(self, shape)
        self._captured.move_to_end(shape)
        return step

    def _give_up(self, shape: StepShape, error: Exception) -> None:
        logger.warning(
            "no memory for the CUDA graph of %s (%s); such steps run eagerly. Lower "
            "max_num_seqs, or memory_utilization to leave more room",
            shape,
            str(error).split(". ")[0],
        )
        self._failed.add(shape)
        self._captured.pop(shape, None)


class CapturedStep:
    """The tensors of one shape, and the graph over them."""

    def __init__(self, step: DecodeStep, shape: StepShape) -> None:
        self._step, self.shape = step, shape
        cache, device = step.target.kv_cache, step.target.device
        rows, pinned = shape.num_rows, device.type == "cuda"
        self._padding_block = cache.padding_block
        self._ints = torch.zeros(rows, 6, dtype=torch.int64, device=device)
        self._table = torch.full(
            (rows, shape.num_blocks), cache.padding_block, dtype=torch.int32, device=device
        )
        self._temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self._drafts = torch.full((rows, shape.num_drafts + 1), -1, device=device)
        self._host = [
            torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned)
            for t in (self._ints, self._table, self._temperature, self._drafts)
        ]
        self._graph: Graph | None = None
        self._small = self._ints  # of the last step, see pack()

    def load(self, seqs: Seq[Sequence], num_draft_tokens: Seq[int], drafts: Draft | None) -> None:
        """Write this step's rows; the rows behind them decode nothing into the padding block."""
        ints, table, temperature, drafted = (t.numpy() for t in self._host)
        count = len(seqs)
        rows = [row_source(seq) for seq in seqs]
        ints[count:] = 0
        ints[count:, LENGTH] = 1
        ints[:count, LENGTH] = np.fromiter((len(seq.token_ids) for seq in seqs), np.int64)
        pairs = (s.token_ids[-2:] if len(s) > 1 else s.token_ids * 2 for s in seqs)
        ints[:count, : LAST_1 + 1] = np.fromiter(
            chain.from_iterable(pairs), np.int64, 2 * count
        ).reshape(count, 2)
        ints[:count, LIMIT] = num_draft_tokens
        ints[:count, SEED] = np.fromiter((row.signed_seed for row in rows), np.int64)
        ints[:count, GREEDY] = np.fromiter((row.greedy for row in rows), np.int64)
        ints[count:, GREEDY] = 1
        temperature[:] = 1.0
        temperature[:count] = np.fromiter(
            (1.0 if row.greedy else row.params.temperature for row in rows), np.float32
        )
        table[count:] = self._padding_block
        table[:count] = pad_tables(
            [seq.block_table for seq in seqs], self._padding_block, table.shape[1]
        ).numpy()[:, : table.shape[1]]
        drafted[:] = -1
        drafted[:, -1] = 0
        if drafts is not None:
            drafted[:count, : drafts.max_num_draft_tokens] = drafts.token_ids.numpy()
            drafted[:count, -1] = drafts.num_draft_tokens.numpy()
        fixed = (self._ints, self._table, self._temperature, self._drafts)
        for on_device, host in zip(fixed, self._host, strict=True):
            on_device.copy_(host, non_blocking=True)

    def replay(self, capture: Capture) -> None:
        """Run the step on what was loaded; the first time, capture it."""
        if self._graph is None:
            self._graph = capture(self._run)
        self._graph.replay()

    def read(self, count: int) -> StepResult:
        """The first `count` rows; waits for the device."""
        return StepResult(self._small[:count].tolist(), None)

    @torch.inference_mode()
    def _run(self) -> None:
        state = self._state()
        state.draw_noise()
        if self.shape.num_drafts == 0:
            draft = Draft.empty(state.num_rows, state.device)
        elif self._step.proposer.placement == "device":
            draft = self._step.checked_draft(state)
        else:
            draft = Draft(self._drafts[:, :-1], self._drafts[:, -1])
        verdict = self._step.verifier.verify(state, draft)
        self._small = pack(draft, verdict)

    def _state(self) -> DecodeState:
        target, ints = self._step.target, self._ints
        block_size = target.kv_cache.block_size
        greedy = ints[:, GREEDY] != 0
        all_greedy = self.shape.greedy
        sampling: dict[str, Any] = {
            **dict.fromkeys(("allowed", "bans", "biases", "penalties", "log_min_p")),
            "temperature": None if all_greedy else self._temperature[:, None, None],
        }
        return DecodeState(
            seqs=[],
            num_draft_tokens=[self.shape.num_drafts] * self.shape.num_rows,
            draft_limits=ints[:, LIMIT],
            last_token_ids=ints[:, : LAST_1 + 1],
            seq_lens=ints[:, LENGTH],
            block_table=self._table,
            block_size=block_size,
            vocab_size=target.vocab_size,
            max_len=self.shape.num_blocks * block_size - self.shape.num_drafts,
            sampling=SamplingRows(
                all_greedy=all_greedy,
                any_greedy=True,
                greedy=greedy,
                seeds=ints[:, SEED],
                truncations=(),
                **sampling,
            ),
        )


def rounded(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: at most a third of it is padding."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power
