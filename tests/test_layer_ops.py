"""The fused operations of a decoder layer against torch's. On a machine without a CUDA device
Triton's interpreter runs them: TRITON_INTERPRET=1 pytest tests/test_layer_ops.py.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_model
from torch import Tensor
from triton_interpreter import interpreting, let_loops_run

from specdec import LLM, SamplingParams
from specdec.models.fused_layer_ops import FusedLayerOps, layer_ops
from specdec.models.layer_ops import LayerOps, LayerShape

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if interpreting():
    let_loops_run()
else:
    pytestmark = pytest.mark.gpu
DEVICE = "cpu" if interpreting() else "cuda"
DTYPES = [torch.float32] if interpreting() else [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def shape(num_heads: int = 3, num_kv_heads: int = 1, head_dim: int = 64) -> LayerShape:
    frequencies = 1e4 ** -(torch.arange(head_dim // 2, device=DEVICE) * 2 / head_dim)
    return LayerShape(num_heads, num_kv_heads, head_dim, 1e-5, frequencies, 1.3, F.silu)


def random(*size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=generator).to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor) -> None:
    limit = TOLERANCE[found.dtype] * max(1.0, float(expected.float().abs().max()))
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert float((found.float() - expected.float()).abs().max()) <= limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 576, 2048])
def test_norms(size: int, dtype: torch.dtype) -> None:
    fused, plain = FusedLayerOps(shape()), LayerOps(shape())
    hidden, delta = random(5, size, dtype=dtype), random(5, size + 1, dtype=dtype)[:, :size]
    weight = random(size, dtype=dtype)
    close(fused.norm(hidden, weight), plain.norm(hidden, weight))
    one, other = hidden.clone(), hidden.clone()
    close(
        fused.add_norm(one, delta.contiguous(), weight),
        plain.add_norm(other, delta.contiguous(), weight),
    )
    assert torch.equal(one, other) and not torch.equal(one, hidden)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [24, 64, 128])
@pytest.mark.parametrize("normed", [False, True])
def test_rotations_give_the_same_scores(head_dim: int, normed: bool, dtype: torch.dtype) -> None:
    """The order of dimensions differs, the products of queries and keys do not."""
    geometry = shape(4, 2, head_dim)
    fused, plain = FusedLayerOps(geometry), LayerOps(geometry)
    qkv = random(6, 8 * head_dim, dtype=dtype)
    norms = [random(head_dim, dtype=dtype) if normed else None for _ in range(2)]
    positions = torch.tensor([0, 1, 5, 900, 8000, 3], device=DEVICE)
    scores = []
    for ops in (fused, plain):
        q, k, v = ops.rotate(qkv, *norms, ops.rotation(positions))
        assert q.shape == (6, 4, head_dim) and k.shape == v.shape == (6, 2, head_dim)
        assert torch.equal(v.reshape(6, -1), qkv[:, 6 * head_dim :])
        scores.append(torch.einsum("thd,sgd->thsg", q.float(), k.float()))
    limit = 4 * TOLERANCE[dtype] * float(scores[1].abs().max())
    assert float((scores[0] - scores[1]).abs().max()) <= limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 1536, 1500])
def test_gates(size: int, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * size, dtype=dtype) * 4
    close(FusedLayerOps(shape()).gate(gate_up), LayerOps(shape()).gate(gate_up))


def test_other_activations_stay_in_torch() -> None:
    geometry = shape()
    assert isinstance(layer_ops(geometry), FusedLayerOps)
    geometry.activation = F.gelu
    assert not isinstance(layer_ops(geometry), FusedLayerOps)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_with_fused_operations_answers_as_plain_torch(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family).to(DEVICE)
    found = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr("specdec.models.lean_model.layer_ops", LayerOps)
        llm = LLM(model, num_draft_tokens=0, attention="reference", num_blocks=32, progress=False)
        ops = llm._driver.engine.target._ops  # type: ignore[attr-defined]
        assert isinstance(ops, FusedLayerOps) == fused
        output = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=12))
        found.append(output.token_ids)
    assert found[0] == found[1]
