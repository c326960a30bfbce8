"""On a CUDA device: flash_attn against the contract, the whole engine on it, noise and rules
against the CPU.
"""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from attention_cases import check_backend, make_problem
from toy import build_engine, output_ids, run

from specdec.attention.base import AttentionBackend
from specdec.attention.reference import ReferenceBackend
from specdec.attention.select import BACKENDS
from specdec.config import SamplingParams
from specdec.models.paged_model import ATTENTION_NAME, TransformersModel
from specdec.proposers.ngram import NgramProposer
from specdec.sampling.noise import window_uniforms
from specdec.verifiers.rejection import rejection

pytestmark = pytest.mark.gpu
needs_flash = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed"
)
HEADS = {"mha": (4, 4), "gqa": (8, 2), "mqa": (8, 1)}


def flash() -> AttentionBackend:
    from specdec.attention.flash_attn import FlashAttnBackend

    return FlashAttnBackend()


@needs_flash
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("layout", HEADS)
def test_flash_decode_and_verify_rows(layout: str, head_dim: int, dtype: torch.dtype) -> None:
    """flash_attn_with_kvcache with in-kernel append, q from 1 to 9, lengths around the page
    size.
    """
    for q_len in range(1, 10):
        problem = make_problem(
            [0, 5, 250, 255, 256, 700],
            [q_len] * 6,
            heads=HEADS[layout],
            head_dim=head_dim,
            block_size=256,
            dtype=dtype,
            device="cuda",
            seed=q_len,
        )
        check_backend(flash(), problem)


@needs_flash
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("q_lens", [[1, 300, 6, 20], [4, 4, 4, 4]])
def test_flash_ragged_windows_softcap(
    q_lens: list[int], window: int | None, softcap: float | None
) -> None:
    problem = make_problem(
        [0, 3, 400, 17],
        q_lens,
        heads=(8, 2),
        head_dim=64,
        block_size=256,
        dtype=torch.bfloat16,
        device="cuda",
        window=window,
        softcap=softcap,
    )
    check_backend(flash(), problem)


def test_reference_backend_on_the_gpu() -> None:
    for q_lens in ([3, 3, 3], [1, 40, 7]):
        problem = make_problem([0, 30, 61], q_lens, device="cuda", head_dim=64)
        torch.backends.cuda.matmul.allow_tf32 = False
        check_backend(ReferenceBackend(), problem)


def tiny_llama(seed: int, dtype: torch.dtype, device: str = "cuda"):  # type: ignore[no-untyped-def]
    """Random Llama with head_dim 64 whose greedy text is not degenerate."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.15,
    )
    return AutoModelForCausalLM.from_config(config).to(dtype).to(device).eval()


def greedy_texts(model, backend, prompts, draft, num_draft_tokens, block_size):  # type: ignore[no-untyped-def]
    model.set_attn_implementation(ATTENTION_NAME)
    target = TransformersModel(model, backend)
    if draft == "ngram":
        proposer = NgramProposer()
    else:
        proposer = None if draft is None else TransformersModel(draft, backend)
    engine = build_engine(
        target, proposer, num_draft_tokens=num_draft_tokens, num_blocks=24, block_size=block_size
    )
    requests = [engine.add(p, SamplingParams(temperature=0, max_tokens=100)) for p in prompts]
    run(engine)
    assert not any(r.error for r in requests)
    assert engine.pool.num_free == 24
    return [output_ids(r) for r in requests], engine.stats


def assert_tie(model, token_ids):  # type: ignore[no-untyped-def]
    """The exact top-two margin is within 3 times the error that bf16 makes in plain
    transformers.
    """
    model.set_attn_implementation("sdpa")
    exact = copy.deepcopy(model).float()
    inputs = torch.tensor([token_ids], device=model.device)
    with torch.inference_mode():
        low = model(inputs).logits[0, -1].float()
        logits = exact(inputs).logits[0, -1]
    best = logits.topk(2).values
    margin, error = (best[0] - best[1]).item(), (low - logits).abs().max().item()
    assert margin <= 3 * error + 1e-5, f"margin {margin:.3f}, bf16 error {error:.3f}"


@pytest.mark.parametrize("backend", [pytest.param("flash_attn", marks=needs_flash), "triton"])
@pytest.mark.parametrize("draft", [None, "ngram", "second", "self"])
def test_engine_on_kernels_equals_engine_on_reference(draft: str | None, backend: str) -> None:
    """bf16 greedy: equal tokens, or a first difference at a near-tie of the target (A23)."""
    model = tiny_llama(0, torch.bfloat16)
    prompts = [list(range(5, 5 + n)) for n in (1, 2, 30, 255, 256, 257, 400)]
    expected, _ = greedy_texts(model, ReferenceBackend(), prompts, None, 0, 256)
    helper = {"second": tiny_llama(1, torch.bfloat16), "self": model}.get(draft or "", draft)
    if isinstance(helper, torch.nn.Module):
        helper.set_attn_implementation(ATTENTION_NAME)
    kernels = BACKENDS.get(backend)()
    got, stats = greedy_texts(model, kernels, prompts, helper, 0 if draft is None else 5, 256)
    differing = 0
    for prompt, want, have in zip(prompts, expected, got, strict=True):
        if want != have:
            differing += 1
            at = next(i for i, (a, b) in enumerate(zip(want, have, strict=True)) if a != b)
            assert_tie(model, [*prompt, *want[:at]])
    assert differing < len(prompts), "every prompt differs: not ties"
    if draft == "self":
        assert stats.acceptance_rate > 0.95


@needs_flash
@pytest.mark.parametrize("helper", ["ngram", "second"])
def test_flash_rows_of_unequal_lookahead_keep_to_their_blocks(helper: str) -> None:
    """The kernel appends as many tokens to a row without drafts as to the others: behind the end of
    its block that must not reach a neighbour's. Texts equal those of each request alone.
    """
    model = tiny_llama(0, torch.bfloat16)
    draft = "ngram" if helper == "ngram" else tiny_llama(1, torch.bfloat16)
    if isinstance(draft, torch.nn.Module):
        draft.set_attn_implementation(ATTENTION_NAME)
    prompts = [list(range(5, 5 + n)) for n in (253, 20, 254)]
    lookaheads = [0, 5, 0]
    model.set_attn_implementation(ATTENTION_NAME)
    texts = []
    for group in ([0, 1, 2], [0], [1], [2]):
        target = TransformersModel(model, flash())
        proposer = NgramProposer() if draft == "ngram" else TransformersModel(draft, flash())
        engine = build_engine(target, proposer, num_draft_tokens=5, num_blocks=24, block_size=256)
        requests = [
            engine.add(
                prompts[i],
                SamplingParams(temperature=0, max_tokens=40, num_draft_tokens=lookaheads[i]),
            )
            for i in group
        ]
        run(engine)
        assert not any(r.error for r in requests)
        texts.append([(i, output_ids(r)) for i, r in zip(group, requests, strict=True)])
    alone = dict(pair for text in texts[1:] for pair in text)
    for i, ids in texts[0]:
        if ids != alone[i]:
            at = next(j for j, (a, b) in enumerate(zip(ids, alone[i], strict=True)) if a != b)
            assert_tie(model, [*prompts[i], *ids[:at]])
            model.set_attn_implementation(ATTENTION_NAME)


def test_fp32_engine_on_the_gpu_equals_the_cpu() -> None:
    """Same weights, greedy and seeded sampling: the same tokens on both devices."""
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = [[7, 8, 9], list(range(40))]
    texts = []
    for device in ("cpu", "cuda"):
        model = tiny_llama(0, torch.float32, "cpu").to(device)
        draft = tiny_llama(1, torch.float32, "cpu").to(device)
        for m in (model, draft):
            m.set_attn_implementation(ATTENTION_NAME)
        backend = ReferenceBackend()
        engine = build_engine(
            TransformersModel(model, backend), TransformersModel(draft, backend), num_blocks=24
        )
        requests = [
            engine.add(p, SamplingParams(temperature=t, seed=3, top_k=20, top_p=0.9, max_tokens=60))
            for p in prompts
            for t in (0.0, 0.8)
        ]
        run(engine)
        texts.append([output_ids(r) for r in requests])
    assert texts[0] == texts[1]


def test_noise_and_rejection_are_equal_on_both_devices() -> None:
    """Philox words bit for bit; the rule decides alike."""
    seeds = torch.arange(64) * 0x9E3779B97F4A7C15 % 2**62
    starts = torch.arange(64) * 7
    cpu, gpu = window_uniforms(seeds, starts, 6), window_uniforms(seeds.cuda(), starts.cuda(), 6)
    for name in ("draft", "accept", "recover"):
        assert torch.equal(getattr(cpu, name), getattr(gpu, name).cpu())
    gen = torch.Generator().manual_seed(0)
    p = torch.rand(64, 6, 100, generator=gen).softmax(-1)
    q = torch.rand(64, 5, 100, generator=gen).softmax(-1)
    x = torch.randint(0, 100, (64, 5), generator=gen)
    nd = torch.randint(0, 6, (64,), generator=gen)
    inputs = (p, q, x, nd, cpu.accept, cpu.recover)
    for a, b in zip(rejection(*inputs), rejection(*(t.cuda() for t in inputs)), strict=True):
        assert torch.equal(a, b.cpu())
