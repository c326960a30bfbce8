"""The triton backend and the packed prefix on flash-attn, under the rule of test_attention.py.

On a CUDA device these are `gpu` tests; elsewhere Triton's interpreter runs the same kernels:
TRITON_INTERPRET=1 pytest tests/test_triton_attention.py. The interpreter has no bfloat16 products.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from attention_cases import Problem, check_backend, dense_answer, make_problem
from fake_flash import FakeFlash
from tiny_models import tiny_model
from torch import Tensor
from toy import build_engine, output_ids, run
from triton_interpreter import interpreting, let_loops_run

from specdec.attention import flash_attn
from specdec.attention.reference import ReferenceBackend
from specdec.attention.triton_attn import TritonBackend
from specdec.config import SamplingParams
from specdec.models.paged_model import ATTENTION_NAME, TransformersModel

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if interpreting():
    let_loops_run()
else:
    pytestmark = pytest.mark.gpu
DEVICE = "cpu" if interpreting() else "cuda"
HALF = [torch.float16] if interpreting() else [torch.float16, torch.bfloat16]
GROUPS = {1: (2, 2), 3: (6, 2), 8: (8, 1)}


def attend(problem: Problem, num_splits: int | None = None) -> Tensor:
    backend = TritonBackend(num_splits)
    last = problem.k_cache.shape[0] - 1
    problem.batch.plan = backend.plan(problem.batch, problem.block_size, last)
    return backend.attend(
        problem.q,
        problem.k,
        problem.v,
        problem.k_cache,
        problem.v_cache,
        problem.batch,
        problem.options,
    )


def poison_unused(problem: Problem) -> None:
    """NaN in every slot but those of the rows' older keys: where nothing may be read."""
    used = torch.zeros(problem.k_cache.shape[:2], dtype=torch.bool)
    table = problem.batch.block_table.cpu()
    for row, start in enumerate(problem.starts):
        for p in range(start):
            used[table[row, p // problem.block_size], p % problem.block_size] = True
    for cache in (problem.k_cache, problem.v_cache):
        cache[~used.to(cache.device)] = float("nan")


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    ("block_size", "head_dim", "group", "q_len"),
    [(16, 64, 1, 1), (16, 128, 8, 6), (64, 96, 3, 5), (64, 128, 1, 6), (256, 64, 8, 2)],
)
def test_lengths_around_a_block(
    block_size: int, head_dim: int, group: int, q_len: int, num_splits: int, dtype: torch.dtype
) -> None:
    """Shuffled tables, prefixes of nothing, one token, and around one block; all else is NaN."""
    starts = [0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size + 3]
    problem = make_problem(
        starts,
        [q_len] * len(starts),
        heads=GROUPS[group],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=DEVICE,
        seed=block_size + q_len,
    )
    poison_unused(problem)
    check_backend(TritonBackend(num_splits), problem)


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("q_lens", "num_splits"), [([1, 90, 6, 20], 2), ([7, 7, 7, 7], 3)])
def test_ragged_rows_windows_and_softcap(
    q_lens: list[int], num_splits: int, softcap: float | None, window: int | None
) -> None:
    """Windows smaller and larger than a block; a prompt's chunk, several tiles of new keys long,
    beside one-token rows.
    """
    problem = make_problem(
        [0, 3, 70, 17],
        q_lens,
        heads=(6, 2),
        head_dim=64,
        dtype=torch.float16,
        device=DEVICE,
        window=window,
        softcap=softcap,
    )
    poison_unused(problem)
    check_backend(TritonBackend(num_splits), problem)


@pytest.mark.parametrize("q_len", [1, 8, 16, 32])
@pytest.mark.parametrize("group", [1, 3])
def test_fp32_and_all_q(q_len: int, group: int) -> None:
    """The exact rule for a dtype without tensor cores, several query tiles to a row."""
    problem = make_problem(
        [0, 13, 40], [q_len] * 3, heads=GROUPS[group], head_dim=24, device=DEVICE, seed=q_len
    )
    poison_unused(problem)
    check_backend(TritonBackend(), problem)


def test_a_tile_may_cut_a_group() -> None:
    """A group of 71 heads fits no power of two: packed rows of one token lie in several tiles."""
    problem = make_problem(
        [5, 20], [3, 3], heads=(71, 1), head_dim=64, dtype=torch.float16, device=DEVICE
    )
    check_backend(TritonBackend(), problem)


def test_more_splits_than_keys() -> None:
    """Splits without a key count for nothing, be their scratch NaN."""
    problem = make_problem([0, 200], [2, 2], dtype=torch.float16, head_dim=64, device=DEVICE)
    backend = TritonBackend(9)
    problem.batch.plan = backend.plan(problem.batch, 16, problem.k_cache.shape[0] - 1)
    problem.batch.plan.scratch(9, problem.q)[0].fill_(float("nan"))
    problem.batch.plan.lse.fill_(float("nan"))
    backend.plan = lambda *_: problem.batch.plan  # type: ignore[method-assign]
    check_backend(backend, problem)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_the_error_rule_catches_a_misaligned_mask(num_splits: int) -> None:
    """Positive control: with one cached key less per row the same check fails."""
    problem = make_problem([5, 80], [4, 4], dtype=torch.float16, head_dim=64, device=DEVICE)
    problem.batch.cache_seqlens -= 1
    with pytest.raises(AssertionError, match="error"):
        check_backend(TritonBackend(num_splits), problem)


def test_inputs_may_be_views() -> None:
    """q, k, v as transformers hands them over: [heads, tokens, head_dim], transposed."""
    problem = make_problem([3, 30], [4, 4], dtype=torch.float16, head_dim=64, device=DEVICE)
    for name in ("q", "k", "v"):
        value = getattr(problem, name).transpose(0, 1).contiguous().transpose(0, 1)
        assert not value.is_contiguous()
        setattr(problem, name, value)
    check_backend(TritonBackend(), problem)


def test_an_engine_on_triton_equals_one_on_reference() -> None:
    """Greedy text of prompts around a block, by a draft model's windows: the same tokens."""
    prompts = [[7, 8, 9], list(range(5, 22))]
    texts = []
    for backend in (ReferenceBackend(), TritonBackend()):
        models = [tiny_model("llama", seed, head_dim=16).to(DEVICE) for seed in (0, 1)]
        for model in models:
            model.set_attn_implementation(ATTENTION_NAME)
        target, draft = (TransformersModel(model, backend) for model in models)
        engine = build_engine(target, draft, num_draft_tokens=3, num_blocks=24)
        greedy = SamplingParams(temperature=0, max_tokens=6)
        requests = [engine.add(prompt, greedy) for prompt in prompts]
        run(engine)
        assert not any(request.error for request in requests)
        texts.append([output_ids(request) for request in requests])
    assert texts[0] == texts[1]


def packed_flash(problem: Problem) -> Tensor:
    backend = flash_attn.FlashAttnBackend()
    problem.batch.plan = backend.plan(problem.batch, problem.block_size, 0)
    return backend.attend(
        problem.q,
        problem.k,
        problem.v,
        problem.k_cache,
        problem.v_cache,
        problem.batch,
        problem.options,
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeFlash:
    fake = FakeFlash()
    monkeypatch.setattr(flash_attn, "flash_module", lambda: fake)
    return fake


@pytest.mark.parametrize("attend", [attend, packed_flash])
def test_padded_tokens_write_nowhere(attend: Callable[[Problem], Tensor], fake: FakeFlash) -> None:
    """Every block keeps its bits but at the real tokens' slots, the padding block too."""
    problem = make_problem([20, 33, 0], [4] * 3, dtype=torch.float16, head_dim=64, device=DEVICE)
    expected = dense_answer(problem)
    real = torch.tensor([0, 1, 4, 5, 6, 7])
    slots = problem.batch.slot_mapping
    slots[[2, 3, 8, 9, 10, 11]] = -1  # two tokens of row 0 and all of row 2
    problem.batch.block_table[2] = problem.k_cache.shape[0] - 1
    before = [cache.clone() for cache in (problem.k_cache, problem.v_cache)]
    out = attend(problem)
    for old, cache, new in zip(
        before, (problem.k_cache, problem.v_cache), (problem.k, problem.v), strict=True
    ):
        old.view(-1, *old.shape[2:])[slots[real]] = new[real]
        assert torch.equal(old, cache)
    assert out.isfinite().all()
    assert torch.allclose(out.cpu().double()[real], expected[real], atol=3e-3)


@pytest.mark.parametrize("attend", [attend, packed_flash])
def test_a_refused_drafts_nan_stays_with_it(
    attend: Callable[[Problem], Tensor], fake: FakeFlash
) -> None:
    """Queries before the token that overflowed have their result; it and those after it do not."""
    problem = make_problem([20, 0], [4, 4], dtype=torch.float16, head_dim=64, device=DEVICE)
    expected = dense_answer(problem)
    problem.v[2, :, 5] = float("inf")
    problem.k[7] = float("nan")
    out = attend(problem).cpu().double()
    good = torch.tensor([0, 1, 4, 5, 6])
    assert torch.allclose(out[good], expected[good], atol=3e-3)
    assert out[[2, 3, 7]].isnan().any(-1).all()


@pytest.mark.parametrize(("heads", "q_len"), [((4, 2), 2), ((6, 2), 5), ((16, 2), 6)])
def test_packed_prefix_matches_the_dense_answer(
    fake: FakeFlash, heads: tuple[int, int], q_len: int
) -> None:
    """Prefix by a kernel that packs nothing, rest by ours: as one. Rows without a prefix, too."""
    for empty_lse in (float("inf"), float("-inf")):
        fake.empty_lse = empty_lse
        starts = [0, 5, 250, 255, 256, 300]
        problem = make_problem(
            starts,
            [q_len] * 6,
            heads=heads,
            head_dim=64,
            block_size=256,
            dtype=torch.float16,
            device=DEVICE,
        )
        poison_unused(problem)
        check_backend(flash_attn.FlashAttnBackend(), problem)
    assert [call["causal"] for call in fake.calls] == [False, False]


@pytest.mark.parametrize(
    ("heads", "q_len", "window", "softcap"),
    [
        ((4, 4), 3, None, None),
        ((4, 2), 1, None, None),
        ((4, 2), 3, 7, None),
        ((4, 2), 3, None, 5.0),
    ],
)
def test_what_is_not_packed_takes_the_plain_call(
    fake: FakeFlash, heads: tuple[int, int], q_len: int, window: int | None, softcap: float | None
) -> None:
    problem = make_problem(
        [0, 5, 30],
        [q_len] * 3,
        heads=heads,
        head_dim=64,
        dtype=torch.float16,
        device=DEVICE,
        window=window,
        softcap=softcap,
    )
    check_backend(flash_attn.FlashAttnBackend(), problem)
    assert [call["causal"] for call in fake.calls] == [True]


@pytest.mark.gpu
@pytest.mark.skipif(interpreting(), reason="real sizes are for a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((8, 8), 64), ((24, 8), 96), ((32, 8), 128), ((64, 8), 128), ((48, 1), 128), ((16, 8), 256)],
)
def test_real_sizes(heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    """Decode, verification and prompts as models have them, by the splits the shapes ask for."""
    cases = (
        ([0, 63, 64, 65, 1500, 4000], [1] * 6, 64, None),
        ([0, 63, 64, 65, 1500, 4000], [6] * 6, 64, None),
        ([4000], [32], 16, None),
        ([0, 700, 255], [500, 1, 130], 128, None),
        ([0, 700, 2000], [300, 6, 6], 256, 512),
    )
    for starts, q_lens, block_size, window in cases:
        problem = make_problem(
            starts,
            q_lens,
            heads=heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            device=DEVICE,
            window=window,
        )
        poison_unused(problem)
        check_backend(TritonBackend(), problem, answer_device=DEVICE)


@pytest.mark.gpu
@pytest.mark.skipif(interpreting(), reason="graphs are for a GPU")
@pytest.mark.parametrize("num_splits", [None, 1, 7])
def test_a_captured_launch_follows_the_device(num_splits: int | None) -> None:
    """Lengths, slots and tables change between replays; a replay equals an eager call, bit for
    bit.
    """
    shapes = {"heads": (16, 2), "head_dim": 128, "block_size": 64, "dtype": torch.bfloat16}
    first, second = (
        make_problem(starts, [6] * 3, device=DEVICE, seed=seed, **shapes)
        for starts, seed in (([700, 3, 1000], 0), ([10, 1010, 64], 1))
    )
    backend = TritonBackend(num_splits)
    attend(first, num_splits)  # compiles
    graph = torch.cuda.CUDAGraph()
    first.batch.plan = backend.plan(first.batch, 64, 0)
    with torch.cuda.graph(graph):
        out = backend.attend(
            first.q, first.k, first.v, first.k_cache, first.v_cache, first.batch, first.options
        )
    first.batch.max_seqlen_k = second.batch.max_seqlen_k = 1016
    for problem in (first, second):
        expected = attend(problem, num_splits)
        if problem is second:
            width = second.batch.block_table.shape[1]
            assert width <= first.batch.block_table.shape[1]
            first.batch.block_table[:, :width] = second.batch.block_table
            blocks = min(first.k_cache.shape[0], second.k_cache.shape[0])
            assert int(second.batch.block_table.max()) < blocks
            for name in ("q", "k", "v"):
                getattr(first, name).copy_(getattr(second, name))
            for name in ("k_cache", "v_cache"):
                getattr(first, name)[:blocks] = getattr(second, name)[:blocks]
            first.batch.cache_seqlens.copy_(second.batch.cache_seqlens)
            first.batch.slot_mapping.copy_(second.batch.slot_mapping)
        graph.replay()
        assert torch.equal(out, expected)
