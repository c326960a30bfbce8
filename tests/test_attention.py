"""Attention backends against a dense float64 answer: shuffled pages, unaligned lengths, any head
layout.
"""

from __future__ import annotations

import importlib.util
from itertools import pairwise

import pytest
import torch
from attention_cases import check_backend, dense_answer, make_problem

from specdec.attention.reference import ReferenceBackend
from specdec.attention.select import select_backend

HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1)}


@pytest.mark.parametrize("q_len", range(1, 10))
@pytest.mark.parametrize("layout", HEADS)
def test_a49_uniform_rows_match_the_dense_answer(q_len: int, layout: str) -> None:
    """A49: causal alignment is bottom right, so the last query sees all keys whatever q is."""
    starts = [0, 5, 16, 31, 100]
    problem = make_problem(starts, [q_len] * 5, heads=HEADS[layout], seed=q_len)
    check_backend(ReferenceBackend(), problem)


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a49_ragged_rows_windows_and_softcap(
    block_size: int, window: int | None, softcap: float | None
) -> None:
    """A49: prefill chunks of unequal length behind cached prefixes of unaligned length."""
    problem = make_problem(
        [0, 3, 40, 17], [1, 33, 6, 20], block_size=block_size, window=window, softcap=softcap
    )
    check_backend(ReferenceBackend(), problem)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_stays_within_the_rule(dtype: torch.dtype) -> None:
    check_backend(ReferenceBackend(), make_problem([9, 64, 250], [3, 3, 3], dtype=dtype))


def test_the_error_rule_catches_a_misaligned_mask() -> None:
    """Positive control: with one key less per row (top-left alignment) the same check fails."""
    problem = make_problem([5, 9], [4, 4])
    problem.batch.cache_seqlens -= 1
    with pytest.raises(AssertionError, match="error"):
        check_backend(ReferenceBackend(), problem)


def test_padded_tokens_write_only_to_the_padding_slot() -> None:
    """Slot -1 is nobody's: all real blocks keep their bits, and real rows their result."""
    problem = make_problem([20, 33], [4, 4])
    expected = dense_answer(problem)
    problem.batch.slot_mapping[2:4] = -1  # row 0 has two real tokens
    before = problem.k_cache[:-1].clone()
    backend = ReferenceBackend()
    problem.batch.plan = backend.plan(problem.batch, 16, problem.k_cache.shape[0] - 1)
    out = backend.attend(
        problem.q,
        problem.k,
        problem.v,
        problem.k_cache,
        problem.v_cache,
        problem.batch,
        problem.options,
    )
    changed = (before != problem.k_cache[:-1]).flatten(2).any(-1).nonzero()
    assert len(changed) == 2 + 4
    assert torch.allclose(out[[0, 1, 4, 5, 6, 7]].double(), expected[[0, 1, 4, 5, 6, 7]], atol=1e-5)


def test_nan_in_unread_pages_does_not_leak() -> None:
    """A masked key of weight 0 times NaN is NaN: what lies in the padding block must never be
    gathered.
    """
    problem = make_problem([3, 60], [2, 2])
    problem.k_cache[-1] = float("nan")
    problem.v_cache[-1] = float("nan")
    check_backend(ReferenceBackend(), problem)


def test_batch_of_one_equals_batch_of_many() -> None:
    """Rows are independent: alone or together they give the same numbers up to rounding."""
    problem = make_problem([7, 70, 130], [3, 3, 3])
    answers = dense_answer(problem).split(3)
    for (first, last), answer in zip(pairwise([0, 3, 6, 9]), answers, strict=True):
        assert answer.shape[0] == last - first
    check_backend(ReferenceBackend(), problem)


def test_auto_names_its_reason_on_the_cpu() -> None:
    choice = select_backend("auto", torch.device("cpu"), [(torch.float32, 64)])
    assert choice.backend.name == "reference"
    assert "cpu" in choice.reason


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is here")
def test_a_missing_backend_names_the_package_to_install() -> None:
    with pytest.raises(ImportError, match=r"pip install 'flash-attn>=2\.5'"):
        select_backend("flash_attn", torch.device("cpu"), [(torch.float32, 64)])


def test_an_unknown_backend_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'reference'"):
        select_backend("referense", torch.device("cpu"), [(torch.float32, 64)])
