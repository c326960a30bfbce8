"""GPTQ checkpoints that cannot be loaded: one clear error, with the module's name, before anything
is kept; and backends that cannot serve.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gptq_files import MODEL, edit_config, edit_settings, edit_tensors, write_gptq
from safetensors.torch import load_file
from tiny_models import save_tiny, tiny_model
from torch import Tensor, nn

from specdec import LLM
from specdec.config import QUANT_BACKENDS, EngineConfig
from specdec.models.loading import load_model, resolve_source, weight_bytes
from specdec.models.paged_model import ATTENTION_NAME
from specdec.quant.backends import BACKENDS, PLANNED, choose_backend
from specdec.quant.config import ModuleSetting, read_quant_config
from specdec.quant.linear import AtenInt4Linear, DequantLinear
from specdec.quant.packing import pack_zeros

CPU = torch.device("cpu")
UP = "model.layers.1.mlp.up_proj"
DOWN = "model.layers.1.mlp.down_proj"
Change = Callable[[dict[str, Tensor]], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gptq") / "m"
    write_gptq(path, sym=False, act_order=True)
    return path


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def load(folder: Path, backend: str = "auto") -> Any:
    source = resolve_source(folder)
    model = load_model(
        source, device=CPU, dtype=torch.float32, quant_backend=backend, progress=False
    )
    assert model.config._attn_implementation == ATTENTION_NAME
    return model


def fails(
    folder: Path, match: str, *, error: type[Exception] = ValueError, early: bool = True
) -> None:
    """One line that says what and how to go on; `early`: already when memory is planned."""

    def plan() -> None:
        weight_bytes(resolve_source(folder), torch.float32)

    for attempt in [plan, lambda: load(folder)] if early else [lambda: load(folder)]:
        with pytest.raises(error, match=match) as raised:
            attempt()
        text = str(raised.value)
        assert "\n" not in text and ";" in text, text


def test_the_undamaged_copy_loads(folder: Path) -> None:
    assert isinstance(load(folder, "dequant").get_submodule(UP), DequantLinear)


# Formats that are not read


@pytest.mark.parametrize("bits", [1, 5, 6, 7, "4", None, True])
def test_bits_that_are_not_read(folder: Path, bits: Any) -> None:
    edit_settings(folder, bits=bits)
    fails(folder, "says bits=.*2, 3, 4 and 8 can be read")


@pytest.mark.parametrize("group_size", [0, -2, 1.5, "128", True])
def test_impossible_group_sizes(folder: Path, group_size: Any) -> None:
    edit_settings(folder, group_size=group_size)
    fails(folder, "says group_size=.*1 weight or more, or -1")


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"pack_dtype": "int64"}, "packed in int64 words"),
        ({"pack_dtype": "torch.int16"}, "packed in int16 words"),
        ({"is_marlin_format": True}, "Marlin's own format"),
        ({"checkpoint_format": "marlin"}, "Marlin's own format"),
        ({"checkpoint_format": "exl2"}, "format 'exl2'"),
        ({"checkpoint_format": "exl3"}, "format 'exl3'"),
        ({"format": "bitblas"}, "format 'bitblas'"),
        ({"quant_method": "awq"}, r"quantised weights \(awq\)"),
        ({"quant_method": "bitsandbytes"}, r"quantised weights \(bitsandbytes\)"),
        ({"dynamic": {"+:(": {"bits": 8}}}, "rules per module"),
        ({"dynamic": ["a"]}, "rules per module"),
        ({"dynamic": {"lm_head": {"bits": 5}}}, "bits=5 for lm_head"),
    ],
)
def test_other_formats_are_refused_by_name(
    folder: Path, fields: dict[str, Any], match: str
) -> None:
    edit_settings(folder, **fields)
    fails(folder, match)


def test_a_pack_dtype_of_int32_is_the_usual_one(folder: Path) -> None:
    edit_settings(folder, pack_dtype="int32", is_marlin_format=False)
    load(folder)


def test_pickled_weights_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "gptq_model-4bit-128g.bin").write_bytes(b"not looked at")
    fails(folder, "only pickled weights .*gptq_model-4bit-128g.bin")


def test_several_files_without_an_index(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "a.safetensors")
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    fails(folder, "2 weight files .*no index")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    fails(folder, "no model.safetensors", error=FileNotFoundError)


def test_a_damaged_settings_file(folder: Path) -> None:
    edit_config(folder, quantization_config=None)
    for text in ("{", "[]"):
        (folder / "quantize_config.json").write_text(text)
        fails(folder, "quantize_config.json cannot be read")


def test_a_damaged_settings_file_beside_a_good_config(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "quantize_config.json").write_text("{")
    with caplog.at_level(logging.WARNING, "specdec"):
        load(folder)
    assert any("config.json is used" in m for m in caplog.messages)


# Damaged files


@pytest.mark.parametrize("length", [-1, -100, 50, 0])
def test_a_truncated_file_is_named(folder: Path, length: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    fails(folder, r"model\.safetensors .*download it again")


def test_a_truncated_shard_is_named(folder: Path) -> None:
    from test_quant import shard

    names = shard(folder)
    file = folder / names[1]
    file.write_bytes(file.read_bytes()[:-8])
    fails(folder, f"{names[1]} .*cut off or damaged")


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def replaced(name: str, value: Tensor) -> Change:
    return lambda tensors: tensors.update({name: value})


WORDS = torch.zeros(8, 96, dtype=torch.int32)


@pytest.mark.parametrize(
    "change, match",
    [
        (without(f"{UP}.scales"), f"{UP} lacks its tensor scales"),
        (without(f"{UP}.qzeros"), f"{UP} lacks its tensor qzeros"),
        (without(f"{UP}.qweight"), f"lack {UP}.weight"),
        (without("model.norm.weight"), "lack model.norm.weight"),
        (replaced(f"{UP}.qweight", WORDS[:7]), f"{UP} has 7 words a column, 64 .* take 8"),
        (replaced(f"{UP}.qweight", WORDS[:, :95].contiguous()), f"{UP} has a tensor qweight .*95"),
        (replaced(f"{UP}.qweight", WORDS.float()), f"{UP} has a tensor qweight of dtype F32"),
        (replaced(f"{UP}.qweight", WORDS[0].clone()), f"{UP} has a tensor qweight of shape"),
        (replaced(f"{UP}.scales", torch.ones(2, 95)), f"{UP} has a tensor scales .*95"),
        (replaced(f"{UP}.scales", torch.ones(3, 96)), f"{UP} has 3 groups, group_size 32 gives 2"),
        (replaced(f"{UP}.qzeros", WORDS[:2, :11].contiguous()), f"{UP} has a tensor qzeros .*11"),
        (replaced(f"{UP}.g_idx", torch.zeros(63, dtype=torch.int32)), f"{UP} has a tensor g_idx"),
        (replaced(f"{UP}.bias", torch.zeros(3)), f"{UP} has a tensor bias"),
        (replaced("model.norm.weight", torch.ones(3)), r"tensor model\.norm\.weight is \[3\]"),
        (replaced("model.layers.9.a.qweight", WORDS), "packed weights of model.layers.9.a"),
        (replaced("model.layers.9.a.weight", WORDS), "no place for, first model.layers.9.a.weight"),
    ],
)
def test_wrong_tensors_are_named_before_anything_is_loaded(
    folder: Path, change: Change, match: str
) -> None:
    edit_tensors(folder, change)
    fails(folder, match)


@pytest.mark.parametrize(
    "g_idx", [[i // 32 + 1 for i in range(64)], [-1] * 64, [0] * 33 + [1] * 31]
)
def test_an_order_that_gives_no_groups(folder: Path, g_idx: list[int]) -> None:
    edit_tensors(folder, replaced(f"{UP}.g_idx", torch.tensor(g_idx, dtype=torch.int32)))
    fails(folder, f"{UP} has a g_idx that does not give 2 groups of 32", early=False)


def test_a_bias_without_a_place(folder: Path) -> None:
    edit_tensors(folder, replaced(f"{UP}.bias", torch.ones(96)))
    fails(folder, f"{UP} has a bias, and the model in its config has none", early=False)


def test_a_missing_bias(tmp_path: Path) -> None:
    write_gptq(tmp_path, tiny_model("qwen2", **MODEL))
    edit_tensors(tmp_path, without("model.layers.0.self_attn.k_proj.bias"))
    fails(tmp_path, "self_attn.k_proj lacks its tensor bias")


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"bits": 8}, "q_proj holds 4 bits a weight, its config says 8"),
        ({"bits": 2}, "q_proj holds 4 bits a weight, its config says 2"),
        ({"group_size": 64}, "q_proj has 2 groups, group_size 64 gives 1"),
        ({"group_size": -1}, "q_proj has 2 groups, group_size -1 gives 1"),
        ({"dynamic": {".*layers.1.mlp.up_proj": {"bits": 8}}}, f"{UP} holds 4 bits"),
    ],
)
def test_a_config_that_contradicts_the_tensors(
    folder: Path, fields: dict[str, Any], match: str
) -> None:
    edit_settings(folder, **fields)
    fails(folder, match)


def test_inputs_that_fill_no_words(tmp_path: Path) -> None:
    write_gptq(tmp_path, tiny_model("llama", hidden_size=52, intermediate_size=96, head_dim=16))
    fails(tmp_path, "_proj has 52 inputs, which fill no whole words at 4 bits")


def test_plain_weights_under_a_gptq_config(tmp_path: Path) -> None:
    save_tiny(tiny_model("llama"), tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    fails(tmp_path, "no tensor of it is packed")


def test_a_zero_point_that_a_writer_damaged_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    zeros = torch.full((2, 96), 5)
    zeros[0, 7] = 0  # stored as 15, and the next one less
    edit_tensors(folder, replaced(f"{UP}.qzeros", pack_zeros(zeros, 4, v2=False)))
    for fields, told in (({}, True), ({"meta": {"quantizer": ["gptqmodel:7.7"]}}, False)):
        edit_settings(folder, **fields)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "specdec"):
            load(folder)
        assert any(f"{UP} stores a zero point of 15" in m for m in caplog.messages) is told


# Rules per module


def test_the_first_rule_that_matches_holds() -> None:
    rules = {
        "-:.*q_proj": {},
        "+:.*layers\\.1\\..*": {"bits": 8},
        "lm_head": {"bits": 8, "group_size": 32},
    }
    config = read_quant_config({"bits": 4, "group_size": 128, "dynamic": rules}, "m")
    assert config.for_module("model.layers.1.mlp.up_proj") == ModuleSetting(8, 128)
    assert config.for_module("model.layers.11.mlp.up_proj") == ModuleSetting(4, 128)
    assert config.for_module("lm_head") == ModuleSetting(8, 32)


# Backends


def test_every_backend_is_there_or_planned() -> None:
    assert set(QUANT_BACKENDS) == {"auto", *BACKENDS, *PLANNED}


def test_auto_on_a_cpu_is_dense() -> None:
    assert choose_backend("auto", CPU).name == "dense"
    assert choose_backend("auto", torch.device("cuda")).name == "dequant"


@pytest.mark.parametrize("name", PLANNED)
def test_backends_that_are_not_built_say_so(folder: Path, name: str) -> None:
    match = f"quant_backend='{name}' is not built yet .*quant_backend='auto' runs this checkpoint"
    with pytest.raises(ValueError, match=match):
        load(folder, name)
    with pytest.raises(ValueError, match=match):
        LLM(folder, quant_backend=name, progress=False)


def test_a_kernel_for_another_device() -> None:
    with pytest.raises(ValueError, match="cannot run on cuda: it is a kernel for CPUs"):
        choose_backend("aten_int4", torch.device("cuda"))


def test_an_unknown_backend_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"must be one of auto, humming, .*got 'marlin'"):
        EngineConfig(quant_backend="marlin")


def test_a_named_backend_needs_packed_weights(tmp_path: Path) -> None:
    save_tiny(tiny_model("llama"), tmp_path)
    with pytest.raises(ValueError, match="no model here is one; leave quant_backend out"):
        LLM(tmp_path, quant_backend="dequant", progress=False)


@pytest.mark.parametrize(
    "how, match",
    [
        ({"bits": 8}, r"q_proj \(8 bits, groups of 32\): it takes 4 bits"),
        ({"group_size": 16}, r"q_proj \(4 bits, groups of 16\): it takes groups of 32, 64"),
    ],
)
def test_a_kernel_that_serves_no_module(tmp_path: Path, how: dict[str, int], match: str) -> None:
    write_gptq(tmp_path, **how)
    with pytest.raises(ValueError, match=match):
        load(tmp_path, "aten_int4")


def test_a_kernel_that_serves_some_modules_tells_of_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One row a group is 96 inputs for down_proj, which that kernel does not take."""
    write_gptq(tmp_path, group_size=-1)
    with caplog.at_level(logging.WARNING, "specdec"):
        model = load(tmp_path, "aten_int4")
    assert isinstance(model.get_submodule(UP), AtenInt4Linear)
    assert isinstance(model.get_submodule(DOWN), DequantLinear)
    told = [m for m in caplog.messages if "dequant serves them" in m]
    assert len(told) == 1 and "layers.0.mlp.down_proj" in told[0] and "1 more" in told[0]


def test_nothing_of_the_file_is_left_open_or_changed(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    model = load(folder, "dequant")
    with torch.no_grad():
        model.get_submodule(UP).words.zero_()
    (folder / "model.safetensors").write_bytes(before)
    assert load_file(folder / "model.safetensors")[f"{UP}.qweight"].any()
    assert isinstance(load(folder).get_submodule(UP), nn.Linear)
