"""PagedModel's logits against the plain transformers model, for every family that is promised."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import FAMILIES, tiny_model
from transformers import PreTrainedModel

from specdec.attention.reference import ReferenceBackend
from specdec.batch import ForwardBatch
from specdec.config import SamplingParams
from specdec.models.paged_model import ATTENTION_NAME, PagedModel, TransformersModel
from specdec.sequence import Sequence, Span

TOLERANCE = 1e-4


def paged(model: PreTrainedModel, block_size: int = 16) -> TransformersModel:
    model.set_attn_implementation(ATTENTION_NAME)
    model_paged = TransformersModel(model, ReferenceBackend())
    model_paged.attach(num_blocks=32, block_size=block_size)
    return model_paged


def sequence(token_ids: list[int], block_table: list[int]) -> Sequence:
    return Sequence(0, token_ids, len(token_ids), SamplingParams(), block_table=block_table)


def ragged_logits(model: PagedModel, spans: list[Span]) -> torch.Tensor:
    cache = model.kv_cache
    total = sum(span.length for span in spans)
    return model.forward(
        ForwardBatch.ragged(
            spans, cache.block_size, cache.padding_block, torch.device("cpu"), range(total)
        )
    )


def check_chunked_prefill(
    model: PreTrainedModel, wrap: Callable[[PreTrainedModel], PagedModel]
) -> None:
    """Two sequences in interleaved chunks over shuffled blocks give the plain model's logits."""
    gen = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4, 128, (n,), generator=gen).tolist() for n in (37, 21)]
    with torch.inference_mode():
        expected = [model(torch.tensor([p])).logits[0] for p in prompts]
    runner = wrap(model)
    seqs = [sequence(prompts[0], [9, 4, 17]), sequence(prompts[1], [30, 2])]
    got: list[list[torch.Tensor]] = [[], []]
    for chunk in ([(0, 0, 5), (1, 0, 13)], [(0, 5, 20)], [(0, 25, 12), (1, 13, 8)]):
        logits = ragged_logits(runner, [Span(seqs[i], s, n) for i, s, n in chunk])
        for (i, _, _), part in zip(chunk, logits.split([n for *_, n in chunk]), strict=True):
            got[i].append(part)
    for parts, want in zip(got, expected, strict=True):
        assert (torch.cat(parts) - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_ragged_prefill_equals_the_plain_model(family: str) -> None:
    """Windows and softcaps included."""
    check_chunked_prefill(tiny_model(family), paged)


@pytest.mark.parametrize("family", FAMILIES)
def test_verify_rows_equal_the_plain_model(family: str) -> None:
    """A uniform batch of three new tokens behind unequal histories, padded tokens among them."""
    model = tiny_model(family, seed=3)
    gen = torch.Generator().manual_seed(2)
    texts = [torch.randint(4, 128, (n,), generator=gen).tolist() for n in (33, 12)]
    with torch.inference_mode():
        expected = [model(torch.tensor([t])).logits[0, -3:] for t in texts]
    runner = paged(model)
    tables = [[3, 11, 7], [5]]
    for text, table in zip(texts, tables, strict=True):
        seq = sequence(text, table)
        ragged_logits(runner, [Span(seq, 0, len(text) - 3)])
    window = torch.tensor([[*text[-3:], 0] for text in texts])  # the fourth token is padding
    block_table = torch.tensor([[3, 11, 7], [5, 32, 32]], dtype=torch.int32)
    starts = torch.tensor([len(text) - 3 for text in texts])
    batch = ForwardBatch.uniform(
        window, starts, torch.tensor([3, 3]), block_table, 16, 34, torch.arange(8)
    )
    logits = runner.forward(batch).view(2, 4, -1)[:, :3]
    assert (logits - torch.stack(expected)).abs().max() < TOLERANCE


def test_the_comparison_catches_a_wrong_position() -> None:
    """Positive control: rotary positions off by one exceed the tolerance by far."""
    model = tiny_model("llama")
    prompt = list(range(10, 30))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    runner = paged(model)
    batch = ForwardBatch.ragged(
        [Span(sequence(prompt, [0, 1]), 0, 20)], 16, 32, torch.device("cpu"), range(20)
    )
    batch.positions[10:] += 1
    assert (runner.forward(batch) - expected).abs().max() > 100 * TOLERANCE


def test_a_forward_without_logits_skips_the_head_and_writes_kv() -> None:
    model = tiny_model("llama")
    runner = paged(model)
    seq = sequence(list(range(4, 20)), [6])
    batch = ForwardBatch.ragged([Span(seq, 0, 16)], 16, 32, torch.device("cpu"))
    assert runner.forward(batch).shape == (0, 128)
    assert runner.kv_cache.k[0][6].abs().sum(-1).gt(0).all()
    assert runner.kv_cache.k[0][5].abs().sum() == 0


def test_a_block_table_too_short_is_refused_with_the_numbers() -> None:
    seq = sequence(list(range(40)), [0, 1])
    with pytest.raises(ValueError, match="covers 32 tokens, row 0 needs 40"):
        ForwardBatch.ragged([Span(seq, 0, 40)], 16, 32, torch.device("cpu"))


def test_the_model_called_outside_the_engine_says_so() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(ValueError, match="outside specdec"):
        model(torch.tensor([[5, 6]]))
