"""GPTQ checkpoints: packing against a slow reference, and what loads, on each backend."""

from __future__ import annotations

import copy
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gptq_files import (
    MODEL,
    edit_tensors,
    int32,
    pack_linear,
    plain_logits,
    slow_pack,
    slow_unpack,
    stored_zeros,
    write_gptq,
)
from safetensors.torch import load_file
from tiny_models import save_tiny, tiny_model
from torch import nn

from specdec.models import loading
from specdec.models.loading import load_model, load_tokenizer, resolve_source
from specdec.models.paged_model import ATTENTION_NAME
from specdec.quant import packing
from specdec.quant.linear import AtenInt4Linear, DequantLinear, QuantLinear
from specdec.quant.packing import QuantWeight, dequantize, pack, pack_zeros, unpack, unpack_zeros

CPU = torch.device("cpu")
IDS = [5, 17, 99, 3, 64, 21, 80, 7, 11]
DOWN = "model.layers.0.mlp.down_proj"
Q = "model.layers.0.self_attn.q_proj"


def load(folder: Path, backend: str = "auto", dtype: torch.dtype = torch.float32) -> Any:
    source = resolve_source(folder)
    return load_model(source, device=CPU, dtype=dtype, quant_backend=backend, progress=False)


def agree(folder: Path, dense: Any, backend: str = "dequant", limit: float = 1e-3) -> Any:
    """The checkpoint's logits are those of the dense dequantised weights."""
    model = load(folder, backend)
    assert model.config._attn_implementation == ATTENTION_NAME
    wanted = plain_logits(dense, IDS)
    assert float(wanted.abs().max()) > 1.0
    assert float((plain_logits(model, IDS) - wanted).abs().max()) < limit
    return model


# Packing


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [32, 64, 96, 21])
def test_packing_equals_the_slow_reference(bits: int, count: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(1 << bits, (count, 5), generator=generator)
    words = int32(slow_pack(codes.tolist(), bits))
    assert torch.equal(pack(codes, bits), words)
    assert torch.equal(unpack(words, bits, count).long(), codes)
    assert slow_unpack(words.tolist(), bits, count) == codes.tolist()


def test_three_bits_lie_as_autogptq_puts_them() -> None:
    """Codes 10 and 21 are split between words: two low bits and one, one and two."""
    codes = [i % 8 for i in range(3, 35)]
    first = sum(codes[j] << 3 * j for j in range(10)) | (codes[10] & 3) << 30
    second = codes[10] >> 2 | sum(codes[11 + j] << 3 * j + 1 for j in range(10))
    second |= (codes[21] & 1) << 31
    third = codes[21] >> 1 | sum(codes[22 + j] << 3 * j + 2 for j in range(10))
    wanted = [[w - (1 << 32) if w >> 31 else w] for w in (first, second, third)]
    assert pack(torch.tensor(codes)[:, None], 3).tolist() == wanted


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("v2", [False, True])
def test_zero_points_of_both_versions(bits: int, v2: bool) -> None:
    generator = torch.Generator().manual_seed(bits)
    zeros = torch.randint(1, 1 << bits, (40, 32), generator=generator)
    stored = int32(stored_zeros(zeros.tolist(), bits, v2))
    assert torch.equal(unpack_zeros(stored, bits, 32, v2=v2).long(), zeros)
    assert torch.equal(pack_zeros(zeros, bits, v2=v2), stored)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_zero_point_of_zero_borrows_within_its_word(bits: int) -> None:
    """Adding one to each code alone would leave the neighbours one too low."""
    zeros = [[0, 1, 2, 0] * 8, [3, 0, 0, 1] * 8]
    stored = int32(stored_zeros(zeros, bits, v2=False))
    assert unpack_zeros(stored, bits, 32, v2=False).tolist() == zeros
    codes = unpack(stored.t(), bits, 32)
    naive = [[(c + 1) % (1 << bits) for c in row] for row in codes.t().tolist()]
    assert naive != zeros


def canonical(bits: int, group_size: int, **how: Any) -> tuple[QuantWeight, torch.Tensor]:
    """A module of 96 inputs and 40 outputs, its rows sorted, and its weight [N, K]."""
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    tensors, dense = pack_linear(weight, bits, group_size, **how)
    perm = tensors["g_idx"].argsort(stable=True)
    zeros = unpack_zeros(tensors["qzeros"], bits, 40, v2=False)
    words = pack(unpack(tensors["qweight"], bits, 96)[perm], bits)
    scales = tensors["scales"].float()
    return QuantWeight(bits, group_size, 96, 40, words, scales, zeros, perm), dense


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 96])
def test_the_layer_equals_the_dense_product(bits: int, group_size: int) -> None:
    weight, dense = canonical(bits, group_size, sym=False, act_order=True)
    x = torch.randn(3, 7, 96, generator=torch.Generator().manual_seed(2))
    layer = DequantLinear(weight)
    torch.testing.assert_close(layer(x), x @ dense.t(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.product(layer.gather(x)), layer(x))
    torch.testing.assert_close(layer.dense(), dense)


def test_modules_are_fused_only_if_their_order_and_format_agree() -> None:
    weight, dense = canonical(4, 32, sym=False, act_order=True)
    both = packing.fuse([weight, weight])
    assert isinstance(both, QuantWeight) and both.out_features == 80
    torch.testing.assert_close(DequantLinear(both).dense(), torch.cat([dense, dense]))
    other, _ = canonical(4, 32, sym=False, act_order=True, seed=3)
    assert "permutations" in str(packing.fuse([weight, other]))
    wider, _ = canonical(4, 64, sym=False)
    plain, _ = canonical(4, 32, sym=False)
    assert "group sizes" in str(packing.fuse([plain, wider]))


# What loads


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("backend", ["dequant", "dense"])
def test_logits_equal_those_of_dense_weights(
    tmp_path: Path, sym: bool, act_order: bool, backend: str
) -> None:
    agree(tmp_path, write_gptq(tmp_path, sym=sym, act_order=act_order), backend)


@pytest.mark.parametrize("sym, act_order", [(True, False), (False, True)])
def test_torch_int4_kernel(tmp_path: Path, sym: bool, act_order: bool) -> None:
    model = agree(tmp_path, write_gptq(tmp_path, sym=sym, act_order=act_order), "aten_int4")
    assert isinstance(model.get_submodule(Q), AtenInt4Linear)
    dense = load(tmp_path, "dense")
    for name in (Q, DOWN.replace("down", "up")):
        wanted = dense.get_submodule(name).weight
        found = model.get_submodule(name).dense()
        if name == Q:
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_v1_zero_point_of_zero_in_a_checkpoint(tmp_path: Path) -> None:
    agree(tmp_path, write_gptq(tmp_path, sym=False, zero_point=0, config={"meta": {}}))


def test_v2_is_not_offset(tmp_path: Path) -> None:
    dense = write_gptq(tmp_path, sym=False, v2=True)
    agree(tmp_path, dense)
    agree(tmp_path, dense)  # nothing is written to, so nothing is offset twice


def test_symmetric_zero_points_are_dropped(tmp_path: Path) -> None:
    write_gptq(tmp_path)
    assert load(tmp_path, "dequant").get_submodule(Q).zeros is None


def test_the_file_is_trusted_where_sym_is_wrong(tmp_path: Path) -> None:
    model = agree(tmp_path, write_gptq(tmp_path, sym=False, config={"sym": True}))
    assert model.get_submodule(Q).zeros is not None


def test_act_order_is_a_permutation_that_is_not_monotone(tmp_path: Path) -> None:
    model = agree(tmp_path, write_gptq(tmp_path, act_order=True))
    perm = model.get_submodule(Q).perm
    assert not bool((perm[1:] > perm[:-1]).all())
    assert torch.equal(perm, model.get_submodule(Q.replace("q_proj", "k_proj")).perm)


def test_the_order_of_down_proj_is_folded_into_gate_and_up(tmp_path: Path) -> None:
    model = agree(tmp_path, write_gptq(tmp_path, act_order=True))
    assert model.get_submodule(DOWN).perm is None
    order = load_file(tmp_path / "model.safetensors")[f"{DOWN}.g_idx"]
    assert not bool((order[1:] >= order[:-1]).all())


def test_act_order_with_one_group_is_no_order(tmp_path: Path) -> None:
    model = agree(tmp_path, write_gptq(tmp_path, act_order=True, group_size=-1))
    assert model.get_submodule(Q).perm is None


def test_a_missing_g_idx_is_the_plain_order(tmp_path: Path) -> None:
    dense = write_gptq(tmp_path)
    edit_tensors(tmp_path, lambda t: [t.pop(k) for k in list(t) if k.endswith("g_idx")])
    agree(tmp_path, dense)


def test_a_g_idx_of_zeros_is_the_plain_order_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dense = write_gptq(tmp_path)
    edit_tensors(tmp_path, lambda t: [v.zero_() for k, v in t.items() if k.endswith("g_idx")])
    with caplog.at_level(logging.WARNING, "specdec"):
        agree(tmp_path, dense)
    assert [r for r in caplog.messages if "g_idx is all zeros" in r and "layers.0" in r]
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_group_sizes_and_a_short_last_group(tmp_path: Path, group_size: int) -> None:
    """96 inputs of down_proj are one and a half groups of 64; 64 inputs are half one of 128."""
    agree(tmp_path, write_gptq(tmp_path, group_size=group_size, sym=False, act_order=True))


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("sym", [True, False])
def test_other_bits(tmp_path: Path, bits: int, sym: bool) -> None:
    agree(tmp_path, write_gptq(tmp_path, bits=bits, sym=sym, act_order=not sym))


def test_a_quantised_head_with_a_setting_of_its_own(tmp_path: Path) -> None:
    own = {"lm_head": {"bits": 8, "group_size": 32}}
    dense = write_gptq(tmp_path, head=True, dynamic=own, group_size=64)
    model = agree(tmp_path, dense)
    assert model.lm_head.bits == 8 and model.get_submodule(Q).bits == 4


def test_bits_per_module_and_modules_left_dense(tmp_path: Path) -> None:
    rules = {"down_proj": {"bits": 8}, "v_proj": {"bits": 3, "group_size": 64}}
    dense = write_gptq(tmp_path, dynamic=rules, config={"lm_head": False})
    model = agree(tmp_path, dense)
    assert model.get_submodule(DOWN).bits == 8
    edit_tensors(tmp_path, lambda t: leave_dense(t, Q, dense))
    model = agree(tmp_path, dense)
    assert isinstance(model.get_submodule(Q), nn.Linear)


def leave_dense(tensors: dict[str, torch.Tensor], name: str, dense: Any) -> None:
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{name}.{part}"]
    tensors[f"{name}.weight"] = dense.get_submodule(name).weight.clone()


def test_tied_embeddings_with_a_quantised_head_are_not_tied(tmp_path: Path) -> None:
    model = tiny_model("llama", **MODEL, tie_word_embeddings=True)
    untied = copy.deepcopy(model)
    untied.config.tie_word_embeddings = False
    untied.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    dense = write_gptq(tmp_path, untied, head=True)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('embeddings": false', 'embeddings": true'))
    loaded = agree(tmp_path, dense)
    assert isinstance(loaded.lm_head, QuantLinear)


def test_tied_embeddings_without_one_share_a_tensor(tmp_path: Path) -> None:
    dense = write_gptq(tmp_path, tiny_model("llama", **MODEL, tie_word_embeddings=True))
    loaded = agree(tmp_path, dense)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_biases_are_added(tmp_path: Path) -> None:
    dense = write_gptq(tmp_path, tiny_model("qwen2", **MODEL), sym=False, act_order=True)
    assert bool(dense.get_submodule(Q).bias.any())
    for backend in ("dequant", "dense", "aten_int4"):
        agree(tmp_path, dense, backend)


def test_a_bias_of_zeros_without_a_place_is_dropped(tmp_path: Path) -> None:
    dense = write_gptq(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({f"{Q}.bias": torch.zeros(64, dtype=torch.half)}))
    assert agree(tmp_path, dense).get_submodule(Q).bias is None


def test_outputs_that_fill_no_tile(tmp_path: Path) -> None:
    """Heads of 12 give 24 outputs for k and v, the vocabulary has 103 ids, as odd as 32001."""
    model = tiny_model("llama", vocab_size=103, hidden_size=64, intermediate_size=96, head_dim=12)
    dense = write_gptq(tmp_path, model, head=True, sym=False)
    for backend in ("dequant", "dense", "aten_int4"):
        agree(tmp_path, dense, backend)


def test_tensors_of_other_dtypes_are_cast(tmp_path: Path) -> None:
    dense = write_gptq(tmp_path)
    edit_tensors(
        tmp_path,
        lambda t: t.update({k: v.bfloat16() for k, v in t.items() if v.dtype == torch.float32}),
    )
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = load(tmp_path, "dequant", dtype)
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert model.get_submodule(Q).words.dtype == torch.int32
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    difference = plain_logits(load(tmp_path, "dequant"), IDS) - plain_logits(dense, IDS)
    assert float(difference.abs().mean()) < 0.05


def test_settings_in_a_file_of_their_own(tmp_path: Path) -> None:
    agree(tmp_path, write_gptq(tmp_path, own_file=True, act_order=True))


def test_config_json_wins_over_the_file_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dense = write_gptq(tmp_path)
    (tmp_path / "quantize_config.json").write_text('{"bits": 8, "group_size": 32}')
    with caplog.at_level(logging.WARNING, "specdec"):
        agree(tmp_path, dense)
    assert any("bits=4" in m and "says 8" in m for m in caplog.messages)


def test_an_old_file_name(tmp_path: Path) -> None:
    dense = write_gptq(tmp_path, own_file=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-128g.safetensors")
    agree(tmp_path, dense)


def test_buffers_of_old_files_are_passed_over(tmp_path: Path) -> None:
    dense = write_gptq(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(tmp_path, lambda t: t.update({name: torch.ones(8)}))
    agree(tmp_path, dense)


def test_shards(tmp_path: Path) -> None:
    dense = write_gptq(tmp_path, act_order=True)
    shard(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    agree(tmp_path, dense)


def shard(folder: Path) -> list[str]:
    """Split a checkpoint's file in three, tensors of one module apart."""
    import json

    from safetensors.torch import save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [f"model-{i}-of-3.safetensors" for i in (1, 2, 3)]
    where = {name: files[i % 3] for i, name in enumerate(sorted(tensors))}
    for file in files:
        part = {name: t for name, t in tensors.items() if where[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    return files


def test_a_hub_checkpoint_is_fetched_without_pickled_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig

    from specdec.quant import source as quant_source

    dense = write_gptq(tmp_path, own_file=True)
    asked: dict[str, Any] = {}

    def fetch(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(quant_source, "snapshot_download", fetch)
    monkeypatch.setattr(quant_source, "cached_file", lambda name, file, **_: str(tmp_path / file))
    config = AutoConfig.from_pretrained(tmp_path)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: config)
    source = resolve_source("owner/model-gptq")
    assert asked["name"] == "owner/model-gptq"
    assert "*.safetensors" in asked["allow_patterns"] and "*.bin" not in asked["allow_patterns"]
    model = load_model(source, device=CPU, dtype=torch.float32, progress=False)
    assert torch.equal(model.get_submodule(Q).weight, dense.get_submodule(Q).weight)


def test_the_generation_config_and_tokenizer_come_along(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    write_gptq(tmp_path)
    GenerationConfig(eos_token_id=[7, 9]).save_pretrained(tmp_path)
    source = resolve_source(tmp_path)
    model = load(tmp_path)
    assert {7, 9} <= loading.eos_token_ids(source, model, load_tokenizer(source))


# The module


def test_casting_copies_and_states_leave_the_integers_alone(tmp_path: Path) -> None:
    dense = write_gptq(tmp_path, sym=False, act_order=True)
    model = load(tmp_path, "dequant")
    layer = model.get_submodule(Q)
    before = layer.words.clone()
    for cast in (layer.half(), copy.deepcopy(layer).to(torch.bfloat16)):
        assert cast.words.dtype == torch.int32 and torch.equal(cast.words, before)
        assert cast.zeros.dtype == torch.uint8 and cast.perm.dtype == torch.int64
        assert cast(torch.ones(1, 64, dtype=cast.scales.dtype)).dtype == cast.scales.dtype
    again = load(tmp_path, "dequant")
    again.load_state_dict(load(tmp_path, "dequant").state_dict())
    wanted = plain_logits(dense, IDS)
    assert float((plain_logits(again, IDS) - wanted).abs().max()) < 1e-3


def test_dequantised_values_in_half_precision_are_rounded_once() -> None:
    weight, dense = canonical(4, 32, sym=False)
    half = dequantize(weight, torch.float16)
    assert torch.equal(half[weight.perm.argsort()], dense.t().half())  # type: ignore[union-attr]


def test_plain_checkpoints_are_as_before(tmp_path: Path) -> None:
    save_tiny(tiny_model("llama"), tmp_path)
    assert resolve_source(tmp_path).quant is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gptq") / "m"
    write_gptq(path, sym=False, act_order=True)
    return path


def test_a_module_at_a_time_is_held(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources of earlier modules are gone when the next is read."""
    import weakref

    from specdec.quant.checkpoint import ModuleReader

    alive: list[Any] = []
    most = 0
    read = ModuleReader.weight

    def watched(self: ModuleReader, spec: Any) -> QuantWeight:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        weight = read(self, spec)
        alive.append(weakref.ref(weight.words))
        return weight

    monkeypatch.setattr(ModuleReader, "weight", watched)
    load(folder, "dense")
    assert len(alive) == 14 and most <= 1


def test_a_copy_elsewhere_loads(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    assert torch.equal(
        load(tmp_path / "copy").get_submodule(Q).weight, load(folder).get_submodule(Q).weight
    )
