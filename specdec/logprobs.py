"""Log-probabilities for outputs: of emitted tokens, and of a prompt that comes in chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.outputs import Request, Sample, TokenLogprobs
from specdec.sampling.pipeline import invalid_rows, raw_logprobs
from specdec.sequence import Span


def token_logprobs(logits: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """Raw log-probabilities of token_ids [N] under logits [N, V], and the num_top best of each."""
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    own, top_ids, top = raw_logprobs(logits, ids, num_top)
    rows = zip(token_ids, own.tolist(), top_ids.tolist(), top.tolist(), strict=True)
    return [TokenLogprobs(t, p, dict(zip(i, v, strict=True))) for t, p, i, v in rows]


def wants_prompt_logprobs(request: Request, sample: Sample, span: Span) -> bool:
    """Whether this chunk holds prompt positions whose log-probabilities are still missing."""
    if request.prompt_logprobs is None or sample is not request.samples[0]:
        return False
    done = len(request.prompt_logprobs)  # a preempted prompt goes through once more
    return span.start <= done < min(span.end, span.seq.num_prompt_tokens - 1)


def add_prompt_logprobs(request: Request, span: Span, logits: Tensor) -> bool:
    """Append what the chunk's logits [span.length, V] tell; False, and nothing, if they are NaN."""
    num_top = span.seq.params.prompt_logprobs
    assert request.prompt_logprobs is not None and num_top is not None
    if bool(invalid_rows(logits).any()):
        return False
    start = len(request.prompt_logprobs)
    end = min(span.end, span.seq.num_prompt_tokens - 1)
    tokens = span.seq.token_ids[start + 1 : end + 1]
    rows = logits[start - span.start : end - span.start]
    request.prompt_logprobs += token_logprobs(rows, tokens, num_top)
    return True


def add_logprobs(sample: Sample, logits: Tensor) -> None:
    """Append those of the tokens that this step emitted, logits [K + 1, V] at its positions."""
    seq = sample.seq
    tokens = seq.token_ids[seq.num_prompt_tokens + len(sample.logprobs) :]
    assert seq.params.logprobs is not None
    sample.logprobs += token_logprobs(logits[: len(tokens)], tokens, seq.params.logprobs)
