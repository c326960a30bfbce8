"""The lean forward against the plain transformers model, its fallbacks, and the CPU's linears."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from test_models import TOLERANCE, check_chunked_prefill, ragged_logits, sequence
from tiny_models import save_tiny, tiny_model
from transformers import PreTrainedModel

from specdec import LLM
from specdec.attention.reference import ReferenceBackend
from specdec.batch import ForwardBatch
from specdec.config import CPU_LINEARS
from specdec.models import linear
from specdec.models.layer_ops import LayerOps
from specdec.models.lean_model import FAMILIES, PRODUCTS, LeanModel, lean_or_transformers
from specdec.models.paged_model import ATTENTION_NAME, TransformersModel
from specdec.sequence import Span

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
PACKED = [kind for kind in linear.KINDS if kind != "fp32"]


def choose(model: PreTrainedModel, **options: Any) -> tuple[Any, str]:
    model.set_attn_implementation(ATTENTION_NAME)
    options = {"owned": True, "cpu_linear": "fp32", "lookahead": 4, **options}
    return lean_or_transformers(model, ReferenceBackend(), **options)


def lean(model: PreTrainedModel) -> LeanModel:
    found, kept = choose(model)
    assert isinstance(found, LeanModel) and kept == "fp32"
    found.attach(num_blocks=32, block_size=16)
    return found


def products(runner: LeanModel) -> list[Any]:
    return [getattr(layer, name) for layer in runner._layers for name in PRODUCTS]


@pytest.mark.parametrize("overrides", [{}, {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_ragged_prefill_equals_the_plain_model(
    family: str, overrides: dict[str, Any]
) -> None:
    """Windows, biases and head norms included."""
    check_chunked_prefill(tiny_model(family, **overrides), lean)


@pytest.mark.parametrize("family", ["mistral", "phi3", "qwen2", "qwen3"])
def test_windows(family: str) -> None:
    """The check at load is too short to see a window: here each is soon passed."""
    if family in ("mistral", "phi3"):
        settings: dict[str, Any] = {"sliding_window": 8}
    else:
        types = ["sliding_attention", "full_attention"]
        settings = {"use_sliding_window": True, "sliding_window": 8, "layer_types": types}
    model = tiny_model(family, **settings)
    check_chunked_prefill(model, lean)
    windows = {layer.options.window for layer in lean(model)._layers}
    assert 8 in windows, "no window was set: the test shows nothing"


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_scaled_rotary_positions(rope: str) -> None:
    settings = {
        "rope_type": rope,
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    name = "rope_parameters"
    model = tiny_model("llama", **{name: settings, "rope_scaling": settings})
    ids = list(range(5, 95))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    runner = lean(model)
    logits = ragged_logits(runner, [Span(sequence(ids, [1, 3, 5, 7, 9, 11]), 0, 90)])
    assert (logits - expected).abs().max() < TOLERANCE


def test_only_wanted_logits_are_computed() -> None:
    runner = lean(tiny_model("llama"))
    seq = sequence(list(range(5, 15)), [3])
    device = torch.device("cpu")
    whole = ragged_logits(runner, [Span(seq, 0, 10)])
    for wanted in ([], [9], [0, 4]):
        batch = ForwardBatch.ragged([Span(seq, 0, 10)], 16, 32, device, wanted)
        assert torch.allclose(runner.forward(batch), whole[wanted], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_shared_with_the_module(family: str) -> None:
    """No second copy: each product's weight lies where the module's lies, with the same values."""
    model = tiny_model(family)
    before = {name: p.clone() for name, p in model.named_parameters()}
    runner = lean(model)
    own = {w.weight.untyped_storage().data_ptr() for w in products(runner)}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        if ".layers." in name and name.endswith("proj.weight"):
            assert parameter.untyped_storage().data_ptr() in own, name


def test_two_forwards_of_one_module_share_their_weights() -> None:
    """Self-drafting: target and draft are the same module."""
    model = tiny_model("qwen2")
    first, second = lean(model), lean(model)
    for one, other in zip(products(first), products(second), strict=True):
        assert one.weight.data_ptr() == other.weight.data_ptr()
        assert one.weight.shape == other.weight.shape
        assert (one.bias is None) == (other.bias is None)
        assert one.bias is None or torch.equal(one.bias, other.bias)


def test_a_forward_that_disagrees_gives_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    norm = LayerOps.norm
    monkeypatch.setattr(LayerOps, "norm", lambda self, x, w: norm(self, x, w) * 1.01)
    with caplog.at_level(logging.INFO, "specdec"):
        found, kept = choose(tiny_model("llama"))
    assert isinstance(found, TransformersModel) and kept == "transformers"
    assert "its logits differ by" in caplog.text


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_other_families_run_through_transformers(family: str) -> None:
    found, _ = choose(tiny_model(family))
    assert isinstance(found, TransformersModel)
    with pytest.raises(ValueError, match="cpu_linear='bf16' needs the lean forward"):
        choose(tiny_model(family), cpu_linear="bf16")


def test_changed_modules_run_through_transformers() -> None:
    """Hooks and foreign layers (adapters, quantised linears) would be passed over."""
    model = tiny_model("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    assert isinstance(choose(model)[0], TransformersModel)

    class Adapter(torch.nn.Linear):
        pass

    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.__class__ = Adapter
    assert isinstance(choose(model)[0], TransformersModel)
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny_model("llama", rope_parameters=dynamic, rope_scaling=dynamic)
    assert isinstance(choose(model)[0], TransformersModel)


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_agree_with_float32(kind: str, with_bias: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=gen)
    bias = torch.randn(96, generator=gen) if with_bias else None
    if linear.obstacle(kind, weight):
        pytest.skip(f"{kind}: {linear.obstacle(kind, weight)}")
    for rows in (1, 2, 5, 9, 33):
        x = torch.randn(rows, 64, generator=gen)
        exact = torch.nn.functional.linear(x, weight, bias)
        got = linear.KINDS[kind](weight, bias)(x)
        assert got.dtype == torch.float32 and got.shape == exact.shape
        assert (got - exact).abs().max() <= linear.PARITY[kind] * exact.abs().max()


def test_a_wrong_product_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(linear.PlainLinear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) * 1.1

    class Absent(linear.PlainLinear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such engine")

    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    monkeypatch.setitem(linear.KINDS, "fp16_weight", Wrong)
    assert "off by" in (linear.obstacle("fp16_weight", weight) or "")
    monkeypatch.setitem(linear.KINDS, "fp16_weight", Absent)
    assert "no such engine" in (linear.obstacle("fp16_weight", weight) or "")
    assert linear.choose_kind([weight], (1, 5))[0] == "fp32"


def test_an_absent_kind_falls_back_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        raise RuntimeError("no such engine")

    monkeypatch.setitem(linear.KINDS, "fp16_weight", absent)
    with caplog.at_level(logging.WARNING, "specdec"):
        found, kept = choose(tiny_model("llama"), cpu_linear="fp16_weight")
    assert isinstance(found, LeanModel) and kept == "fp32"
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "no such engine" in caplog.text


def test_auto_takes_what_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    for winner in linear.SAME_PRECISION:
        if linear.obstacle(winner, torch.randn(8, 8)):
            continue
        monkeypatch.setattr(
            linear,
            "_seconds",
            lambda linears, counts, winner=winner: float(
                not isinstance(linears[0], linear.KINDS[winner])
            ),
        )
        assert choose(tiny_model("llama"), cpu_linear="auto")[1] == winner
        model = tiny_model("llama")
        assert choose(model, cpu_linear="auto", owned=False)[1] == "fp32"


@pytest.mark.parametrize("kind", linear.KINDS)
def test_speculation_keeps_the_text_of_plain_decoding(kind: str, tmp_path: Path) -> None:
    """Greedy, the same kind on both sides; self-drafts, so every window is kept whole."""
    if kind != "fp32" and linear.obstacle(kind, torch.randn(8, 8)):
        pytest.skip(f"{kind} cannot run here")
    folder = save_tiny(tiny_model("llama", 0), tmp_path / "m")
    llm = LLM(folder, folder, cpu_linear=kind, progress=False, num_blocks=64)
    assert llm.description["linears"] == kind
    prompts = [list(range(5, 5 + n)) for n in (1, 7, 20)]
    plain = llm.generate(prompts, **GREEDY, num_draft_tokens=0)
    drafted = llm.generate(prompts, **GREEDY)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert llm.stats()["acceptance_rate"] > 0.9


def test_packed_weights_are_not_kept_twice() -> None:
    """An owned module gives its products up; one of the user's keeps them."""
    for owned, left in ((True, 0), (False, 96 * 48)):
        model = tiny_model("llama")
        found, _ = choose(model, cpu_linear="bf16", owned=owned)
        found.attach(num_blocks=32, block_size=16)
        assert model.model.layers[0].mlp.up_proj.weight.numel() == left
        logits = ragged_logits(found, [Span(sequence(list(range(5, 15)), [3]), 0, 10)])
        assert logits.isfinite().all()


def test_the_config_names_the_kinds_there_are() -> None:
    assert ("auto", *linear.KINDS) == CPU_LINEARS


def test_building_an_engine_leaves_the_random_state_alone(tmp_path: Path) -> None:
    folder = save_tiny(tiny_model("llama", 0), tmp_path / "m")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    LLM(folder, progress=False, num_blocks=32)
    assert torch.equal(before, torch.get_rng_state())


def test_kinds_are_for_float32_on_the_cpu(tmp_path: Path) -> None:
    folder = save_tiny(tiny_model("llama", 0), tmp_path / "m")
    with pytest.raises(ValueError, match="serves float32 models on the CPU"):
        LLM(folder, dtype="bfloat16", cpu_linear="fp16_weight", progress=False, num_blocks=32)
    with pytest.raises(ValueError, match="cpu_linear must be one of auto, fp32"):
        LLM(folder, cpu_linear="fp8", progress=False)
