"""specdec quantize: GPTQ against rounding to nearest, and checkpoints that load back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gptq_files import MODEL, plain_logits, write_gptq
from safetensors.torch import load_file
from tiny_models import save_tiny, tiny_config, tiny_model
from torch import Tensor

from specdec import LLM, SamplingParams
from specdec.cli import main
from specdec.models.loading import load_model, load_tokenizer, resolve_source
from specdec.quantize import layers, writing
from specdec.quantize.gptq import Codes, Grid, gptq, group_grid, round_to_nearest, weighted_error
from specdec.quantize.run import quantize

CPU = torch.device("cpu")
IDS = [5, 17, 99, 3, 64, 21, 80, 7, 11]
Q = "model.layers.0.self_attn.q_proj"


def problem(seed: int = 0, num_columns: int = 192) -> tuple[Tensor, Tensor]:
    """A weight [24, K], and the Hessian of correlated inputs of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, num_columns, generator=generator)
    mixed = torch.randn(num_columns, num_columns, generator=generator) / num_columns**0.5
    sizes = torch.rand(num_columns, generator=generator) * 3
    x = torch.randn(600, num_columns, generator=generator)
    x = (x + 2 * x[:, :8] @ mixed[:8] * 8) * sizes
    return weight, x.t() @ x / 600


GRIDS = [
    Grid(bits, group_size, sym, act_order)
    for bits, group_size in ((2, 64), (3, 32), (4, 128), (4, -1), (8, 64))
    for sym in (True, False)
    for act_order in (False, True)
]


# The rounding


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [True, False])
def test_a_grid_holds_its_group(bits: int, sym: bool) -> None:
    """Also where all weights are of one sign, or 0: zero points from 1, scales that float16 has."""
    part = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    part[1], part[2], part[3] = part[1].abs(), -part[2].abs(), 0.0
    scale, zero = group_grid(part, Grid(bits, 32, sym))
    assert torch.equal(scale, scale.half().float()) and bool((scale > 0).all())
    assert bool((zero >= 1).all() and (zero <= (1 << bits) - 1).all())
    codes = round_to_nearest(part, Grid(bits, 32, sym))
    off = (codes.weight() - part).abs()
    assert bool((off <= scale[:, None] * (1.01 if sym else 0.51)).all())
    if not sym:  # within half a step, but for what rounding the scale to float16 cuts off
        assert float(off[3].max()) == 0.0


def test_rounding_to_nearest_is_the_nearest() -> None:
    weight, _ = problem()
    grid = Grid(3, 64, sym=False)
    found = round_to_nearest(weight, grid)
    scales, zeros = found.scales.float(), found.zeros.float()
    steps = torch.arange(8.0)
    for start in (0, 64, 128):
        group = start // 64
        values = (steps[None] - zeros[:, group : group + 1]) * scales[:, group : group + 1]
        off = (weight[:, start : start + 64, None] - values[:, None]).abs().amin(dim=2)
        got = (weight - found.weight()).abs()[:, start : start + 64]
        torch.testing.assert_close(got, off)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_gptq_beats_rounding_to_nearest(grid: Grid) -> None:
    weight, hessian = problem()
    plain = round_to_nearest(weight, grid).weight()
    best = gptq(weight, hessian, grid).weight()
    error, limit = (weighted_error(weight, w, hessian) for w in (best, plain))
    assert error < 0.7 * limit


def slow_gptq(weight: Tensor, hessian: Tensor, bits: int) -> Tensor:
    """One column after another with the inverse of what is left of the Hessian, in float64: the
    rule itself, without factors and blocks.
    """
    work, left = weight.double().clone(), hessian.double().clone()
    left += 0.01 * left.diagonal().mean() * torch.eye(len(left), dtype=torch.float64)
    scale, zero = group_grid(weight, Grid(bits, -1, sym=False))
    inverse = left.inverse()
    codes = torch.zeros(work.shape, dtype=torch.uint8)
    for i in range(work.shape[1]):
        code = ((work[:, i] / scale).round() + zero).clamp(0, (1 << bits) - 1)
        codes[:, i] = code.to(torch.uint8)
        error = (work[:, i] - (code - zero) * scale) / inverse[0, 0]
        work[:, i:] -= error[:, None] * inverse[0]
        inverse = (inverse - inverse[:, :1] @ inverse[:1] / inverse[0, 0])[1:, 1:]
    return codes


def test_gptq_follows_the_rule() -> None:
    """Over more than one block of columns; a code in ten thousand may round the other way."""
    weight, hessian = problem(1)
    found = gptq(weight, hessian, Grid(4, -1, sym=False)).codes
    assert float((found != slow_gptq(weight, hessian, 4)).float().mean()) < 2e-3


def test_gptq_on_uncorrelated_inputs_is_rounding_to_nearest() -> None:
    weight, _ = problem()
    grid = Grid(4, 64)
    assert torch.equal(
        gptq(weight, torch.eye(192), grid).codes, round_to_nearest(weight, grid).codes
    )


def test_act_order_takes_the_largest_inputs_first() -> None:
    weight, hessian = problem()
    found = gptq(weight, hessian, Grid(4, 64, act_order=True))
    order = hessian.diagonal().argsort(descending=True)
    assert found.g_idx[order].tolist() == [i // 64 for i in range(192)]


def test_inputs_that_never_come_cost_nothing() -> None:
    weight, hessian = problem()
    hessian[3], hessian[:, 3] = 0.0, 0.0
    found = gptq(weight, hessian, Grid(4, 64))
    assert bool((found.weight()[:, 3] == 0).all())


def test_a_hessian_of_few_inputs_is_damped_until_it_serves() -> None:
    weight, _ = problem()
    x = torch.randn(4, 192, generator=torch.Generator().manual_seed(0))
    found = gptq(weight, x.t() @ x, Grid(4, 64), damping=1e-6)
    assert bool(found.weight().isfinite().all())


def test_a_hessian_that_is_no_use() -> None:
    weight, hessian = problem()
    with pytest.raises(ValueError, match="not finite"):
        gptq(weight, hessian * float("nan"), Grid())
    with pytest.raises(ValueError, match="not positive definite; use more text"):
        gptq(weight, -hessian, Grid())


# A whole model


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama", **MODEL)
    return save_tiny(model, tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (3000,), generator=generator).tolist()
    file = tmp_path_factory.mktemp("text") / "calibration.txt"
    file.write_text(" ".join("".join(map(chr, letters[i : i + 5])) for i in range(0, 3000, 5)))
    return file


def run(plain: Path, out: Path, text: Path | None, grid: Grid, **options: Any) -> dict[str, Any]:
    options = {"num_samples": 12, "sample_tokens": 64, "progress": False, **options}
    return quantize(str(plain), out, grid, calibration=text, **options)


def load(folder: Path) -> Any:
    source = resolve_source(folder)
    return load_model(source, device=CPU, dtype=torch.float32, progress=False)


@pytest.mark.parametrize(
    "grid", [Grid(4, 32), Grid(4, 32, False, True), Grid(3, 64, True, True), Grid(8, -1, False)]
)
def test_checkpoints_load_back(
    plain: Path, text: Path, tmp_path: Path, grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the very weights that the rounding left in the model."""
    kept: list[Any] = []
    write = writing.write_checkpoint

    def watched(folder: Path, model: Any, *others: Any) -> None:
        kept.append(model)
        write(folder, model, *others)

    monkeypatch.setattr("specdec.quantize.run.write_checkpoint", watched)
    report = run(plain, tmp_path / "out", text, grid)
    loaded = load(tmp_path / "out")
    wanted, found = plain_logits(kept[0], IDS), plain_logits(loaded, IDS)
    assert float((wanted - found).abs().max()) < 0.02  # embedding and head are float16 now
    name = f"{Q}.weight"
    torch.testing.assert_close(loaded.state_dict()[name], kept[0].state_dict()[name])
    assert report["num_modules"] == 14
    assert 1 < report["perplexity_before"] < 1e9 and report["evaluation_tokens"] > 16
    assert abs(report["perplexity_after"] / report["perplexity_before"] - 1) < 0.5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_gptq_changes_the_model_less_than_rounding(plain: Path, text: Path, tmp_path: Path) -> None:
    """On text like the calibration's, the last tenth of which the rounding did not see."""
    ids = load_tokenizer(resolve_source(plain))(text.read_text()[-250:])["input_ids"]
    wanted = plain_logits(load(plain), ids)
    off = {}
    for method in ("gptq", "rtn"):
        run(plain, tmp_path / method, text, Grid(3, 64), method=method)
        off[method] = float((plain_logits(load(tmp_path / method), ids) - wanted).square().mean())
    assert off["gptq"] < 0.7 * off["rtn"]


def test_the_format_is_autogptqs(plain: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(plain, out, text, Grid(4, 32, False, True))
    tensors = load_file(out / "model.safetensors")
    assert f"{Q}.weight" not in tensors and tensors["lm_head.weight"].dtype == torch.float16
    shapes = {part: tuple(tensors[f"{Q}.{part}"].shape) for part in ("qweight", "qzeros", "scales")}
    assert shapes == {"qweight": (8, 64), "qzeros": (2, 8), "scales": (2, 64)}
    assert tensors[f"{Q}.g_idx"].dtype == tensors[f"{Q}.qweight"].dtype == torch.int32
    own = json.loads((out / "quantize_config.json").read_text())
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"] == own and config["torch_dtype"] == "float16"
    wanted = {"bits": 4, "group_size": 32, "desc_act": True, "sym": False, "quant_method": "gptq"}
    assert wanted.items() <= own.items() and own["checkpoint_format"] == "gptq"
    assert (out / "tokenizer.json").is_file() and (out / "generation_config.json").is_file()


def test_modules_see_what_the_rounded_ones_before_them_give(plain: Path) -> None:
    """The Hessian of the first down_proj comes from rounded gate and up, not from plain ones."""
    model = load(plain)
    model.set_attn_implementation("eager")
    rows = [torch.tensor(IDS * 4), torch.tensor(IDS[::-1] * 4)]
    inputs: list[Tensor] = []
    seen: dict[str, Tensor] = {}
    original = layers.gptq

    def watched(weight: Tensor, hessian: Tensor, *others: Any) -> Codes:
        seen[name_of[weight.data_ptr()]] = hessian
        return original(weight, hessian, *others)

    name_of = {p.data_ptr(): n for n, p in model.named_parameters()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "gptq", watched)
        done = list(layers.calibrate_layers(model, rows, Grid(4, 32), 0.01))
    assert len(done) == len(seen) == 14
    down = model.model.layers[0].mlp.down_proj
    down.register_forward_pre_hook(lambda module, args: inputs.append(args[0][0]))
    with torch.inference_mode():
        for row in rows:
            model(row[None])
    x = torch.cat(inputs)
    found = seen["model.layers.0.mlp.down_proj.weight"]
    torch.testing.assert_close(found, x.t() @ x / len(x), atol=1e-4, rtol=1e-4)


def test_families_whose_layers_have_keywords_of_their_own(text: Path, tmp_path: Path) -> None:
    """Gemma's layers have windows in turn, and a softcap; Qwen's have biases."""
    for family in ("gemma2", "qwen2"):
        fields = {**MODEL, "num_hidden_layers": 2}
        source = save_tiny(tiny_model(family, **fields), tmp_path / family)
        report = run(source, tmp_path / f"{family}-gptq", text, Grid(8, 32))
        wanted, found = (plain_logits(load(f), IDS) for f in (source, Path(report["out"])))
        assert float((wanted - found).square().mean().sqrt()) < 0.2  # of logits of deviation 4
        assert report["num_modules"] == 14


def test_tied_embeddings_stay_tied(text: Path, tmp_path: Path) -> None:
    source = save_tiny(tiny_model("llama", **MODEL, tie_word_embeddings=True), tmp_path / "tied")
    run(source, tmp_path / "out", None, Grid(4, 32), method="rtn")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    loaded = load(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_large_checkpoints_are_written_in_shards(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SHARD_BYTES", 20_000)
    run(plain, tmp_path / "out", None, Grid(4, 32), method="rtn")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    load(tmp_path / "out")


def test_scaled_positions_keep_their_old_names_too(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1234.0}
    source = save_tiny(tiny_model("llama", **MODEL, rope_parameters=rope), tmp_path / "m")
    run(source, tmp_path / "out", None, Grid(4, 32), method="rtn")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == 1234.0 and config["rope_scaling"]["factor"] == 2.0
    wanted = load(source).model.rotary_emb.inv_freq
    assert torch.equal(load(tmp_path / "out").model.rotary_emb.inv_freq, wanted)


# The command


def command(*argv: object) -> int:
    return main(["quantize", *map(str, argv)])


def test_the_command_quantises_and_the_result_generates(
    plain: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = ["--bits", 4, "--group-size", 32, "--act-order", "--asym", "--sample-tokens", 64]
    assert command("--model", plain, "--out", out, "--calibration", text, *options) == 0
    printed = capsys.readouterr().out
    assert "14 layers" in printed and "perplexity" in printed and "before" in printed
    llm = LLM(out, progress=False, num_blocks=32)
    output = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 8


def test_the_report_as_json_and_rounding_without_text(
    plain: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ["--method", "rtn", "--group-size", 32, "--json"]
    assert command("--model", plain, "--out", tmp_path / "a", *how) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["method"] == "rtn" and report["perplexity_before"] is None
    assert command("--model", plain, "--out", tmp_path / "b", "--evaluation", text, *how) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["perplexity_after"] > 1 and report["calibration_tokens"] == 0


@pytest.mark.parametrize(
    "options, match",
    [
        ([], "needs calibration text"),
        (["--method", "awq"], "method must be gptq or rtn"),
        (["--bits", "5", "--method", "rtn"], "bits must be one of 2, 3, 4, 8"),
        (["--group-size", "48", "--method", "rtn"], "-1 or a multiple of 32"),
        (["--group-size", "0", "--method", "rtn"], "-1 or a multiple of 32"),
        (["--method", "rtn", "--act-order"], "act-order follows the calibration"),
    ],
)
def test_what_the_command_refuses(
    plain: Path,
    tmp_path: Path,
    options: list[str],
    match: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command("--model", plain, "--out", tmp_path / "out", *options) == 1
    assert match in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_a_run_refuses(plain: Path, text: Path, tmp_path: Path) -> None:
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("too short")
    binary.write_bytes(b"\xff\xfe\xff")
    full = tmp_path / "full"
    full.mkdir()
    (full / "a").touch()
    bare = save_tiny(tiny_model("llama", **MODEL), tmp_path / "bare", tokenizer=False)
    odd = save_tiny(tiny_model("llama"), tmp_path / "odd")
    done = tmp_path / "done"
    write_gptq(done)
    out = tmp_path / "out"
    for match, arguments in {
        "gives .* tokens, 32 are needed": (plain, out, short, Grid(4, 32)),
        "not UTF-8 text": (plain, out, binary, Grid(4, 32)),
        "exists and is not empty": (plain, full, text, Grid(4, 32)),
        "no tokenizer": (bare, out, text, Grid(4, 32)),
        "q_proj is 48 x 48; .* multiples of 32": (odd, out, text, Grid(4, 32)),
        "quantised already": (done, out, text, Grid(4, 32)),
    }.items():
        with pytest.raises(ValueError, match=match):
            run(*arguments)
    with pytest.raises(ValueError, match="rows of 16 tokens or more"):
        run(plain, out, text, Grid(4, 32), sample_tokens=4)
    assert not out.exists()


def test_numbers_that_float16_cannot_hold(tmp_path: Path) -> None:
    model = tiny_model("llama", **MODEL)
    model.lm_head.weight[0, 0] = 1e6
    source = save_tiny(model, tmp_path / "m")
    with pytest.raises(ValueError, match=r"lm_head\.weight holds numbers that float16 cannot"):
        run(source, tmp_path / "out", None, Grid(4, 32), method="rtn")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_model_without_linear_layers_in_its_layers() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config("llama", num_hidden_layers=0))
    with pytest.raises(ValueError, match="no linear layers"):
        layers.layer_linears(model)
