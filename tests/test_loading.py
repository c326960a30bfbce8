"""Finding and loading models: what works, and one clear error for everything that does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import EOS, save_tiny, tiny_config, tiny_model, tiny_tokenizer
from transformers import AutoConfig, GenerationConfig, LlamaConfig

import specdec.models.paged_model  # registers the attention name
from specdec.models import default_target, loading
from specdec.models.loading import (
    ModelSource,
    eos_token_ids,
    load_model,
    load_tokenizer,
    resolve_dtype,
    resolve_source,
    source_from_model,
    weight_bytes,
)

CPU = torch.device("cpu")
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is in order."""
    return save_tiny(tiny_model("llama"), tmp_path_factory.mktemp("models") / "whole")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def load(name: Any, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(resolve_source(name), device=CPU, dtype=dtype)


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# What works


def test_a_folder_gives_the_saved_weights(whole: Path) -> None:
    model = load(whole)
    wanted = tiny_model("llama").state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert model.config._attn_implementation == "specdec"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_loaded_in_the_wanted_dtype(whole: Path, dtype: torch.dtype) -> None:
    assert {p.dtype for p in load(str(whole), dtype).parameters()} == {dtype}


def test_shards_are_loaded(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(load(tmp_path).state_dict()[UP], model.state_dict()[UP])


def test_the_alias_leads_to_the_default_target(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(default_target.ALIASES, "smollm2-135m", lambda progress: whole)
    source = resolve_source("smollm2-135m")
    assert (source.name, source.path) == ("smollm2-135m", str(whole))


def test_a_loaded_model_as_source(whole: Path) -> None:
    model = load(whole)
    assert source_from_model(model).config is model.config
    assert load_tokenizer(source_from_model(tiny_model("llama"))) is None


def test_the_tokenizer_beside_the_weights(whole: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_source(whole))
    assert tokenizer.decode(tokenizer.encode("the cat, 12")) == "the cat, 12"
    bare = save_tiny(tiny_model("llama"), tmp_path, tokenizer=False)
    assert load_tokenizer(resolve_source(bare)) is None


# Dummy weights


def test_dummy_weights_need_a_config_only(tmp_path: Path) -> None:
    """Seeded, in the wanted dtype, without touching the process's random numbers."""
    tiny_config("llama").save_pretrained(tmp_path)
    source = resolve_source(tmp_path, load_format="dummy")
    state = torch.random.get_rng_state()
    first = load_model(source, device=CPU, dtype=torch.bfloat16)
    assert torch.equal(torch.random.get_rng_state(), state)
    again = load_model(source, device=CPU, dtype=torch.bfloat16)
    other = load_model(source, device=CPU, dtype=torch.bfloat16, seed=1)
    assert {p.dtype for p in first.parameters()} == {torch.bfloat16}
    assert torch.equal(first.state_dict()[UP], again.state_dict()[UP])
    assert not torch.equal(first.state_dict()[UP], other.state_dict()[UP])
    assert load_tokenizer(source) is None


def test_a_dummy_config_file_of_any_name(tmp_path: Path) -> None:
    """It once read config.json beside the named file."""
    tiny_config("llama").save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "deep.json").write_text(
        text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 5')
    )
    source = resolve_source(tmp_path / "deep.json", load_format="dummy")
    assert source.config.num_hidden_layers == 5


def test_a_load_format_that_does_not_exist(whole: Path) -> None:
    with pytest.raises(ValueError, match="'auto' or 'dummy', got 'npz'"):
        resolve_source(whole, load_format="npz")


# Names that lead nowhere


def fails(name: Any, match: str, error: type[Exception] = ValueError) -> None:
    """Loading fails in one line that says what and how to go on."""
    with pytest.raises(error, match=match) as raised:
        load(name)
    text = str(raised.value)
    assert "\n" not in text and ";" in text, text


def test_a_missing_path(tmp_path: Path) -> None:
    fails(tmp_path / "nothing", "no model .*nothing", FileNotFoundError)
    fails("models/nothing.gguf", "no file 'models/nothing.gguf'", FileNotFoundError)


def test_a_mistyped_alias_gives_the_nearest() -> None:
    fails("smollm2-135n", "did you mean 'smollm2-135m'", FileNotFoundError)


def test_a_folder_without_config(tmp_path: Path) -> None:
    fails(tmp_path, "has no config.json", FileNotFoundError)


def test_a_file_of_another_kind(folder: Path) -> None:
    fails(folder / "tokenizer.json", "neither GGUF nor")


def test_the_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("We couldn't connect to the hub.\nCheck your connection.")

    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    fails("owner/name", "couldn't connect.*give a local folder")


# Damaged folders


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "no_such_family"}'])
def test_a_damaged_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    fails(folder, "config of .* cannot be read")


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    fails(folder, "only pickled weights .*pytorch_model.bin.*save_pretrained")


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    fails(folder, "no model.safetensors", FileNotFoundError)


def cut(data: bytes) -> bytes:
    return data[:-100]


def cut_in_header(data: bytes) -> bytes:
    return data[:50]


def cut_to_nothing(data: bytes) -> bytes:
    return b""


def lengthened(data: bytes) -> bytes:
    return data + b"123"


def header_is_a_list(data: bytes) -> bytes:
    return (5).to_bytes(8, "little") + b"[1,2]"


def header_without_offsets(data: bytes) -> bytes:
    return (9).to_bytes(8, "little") + b'{"a": {}}'


def header_of_noise(data: bytes) -> bytes:
    return data[:8] + b"\xff" * (len(data) - 8)


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        cut_in_header,
        cut_to_nothing,
        lengthened,
        header_is_a_list,
        header_without_offsets,
        header_of_noise,
    ],
)
def test_damaged_safetensors_are_named(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    fails(folder, r"model\.safetensors .*download it again")


def sharded(folder: Path) -> Path:
    tiny_model("llama").save_pretrained(folder, max_shard_size="50KB")
    return folder


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard = sorted(sharded(tmp_path).glob("*.safetensors"))[1]
    shard.unlink()
    fails(tmp_path, f"names {shard.name}, which is missing", FileNotFoundError)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    shard = sorted(sharded(tmp_path).glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    fails(tmp_path, shard.name)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_a_damaged_index(tmp_path: Path, text: str) -> None:
    (sharded(tmp_path) / "model.safetensors.index.json").write_text(text)
    fails(tmp_path, r"index\.json cannot be read")


def test_shards_without_their_index(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model.safetensors.index.json").unlink()
    fails(tmp_path, "no model.safetensors.index.json", FileNotFoundError)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_missing_tensors_are_an_error_not_noise(folder: Path) -> None:
    """transformers would go on with random numbers in their place."""
    rewrite(folder, lambda weights: weights.pop(UP))
    fails(folder, f"lack {UP}")


def test_a_missing_output_head_of_an_untied_model(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.pop("lm_head.weight"))
    fails(folder, "lack lm_head.weight")


def test_a_tied_model_needs_no_output_head(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    save_tiny(model, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = load(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.update({UP: torch.zeros(3, 4)}))
    fails(folder, f"do not fit its config: tensor {UP}")


def test_a_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer in .* cannot be read"):
        load_tokenizer(resolve_source(folder))


# What is refused


def test_quantised_weights_are_refused_by_name(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "awq", "bits": 4})
    fails(folder, r"quantised weights \(awq\)")


def test_remote_code_is_not_run_unasked(folder: Path) -> None:
    marker = folder / "ran"
    (folder / "configuration_own.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
        "from transformers import PretrainedConfig\n"
        "class OwnConfig(PretrainedConfig):\n    model_type = 'own'\n"
    )
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    with pytest.raises(ValueError, match="trust_remote_code"):
        resolve_source(folder)
    assert not marker.exists()


def test_a_class_without_attention_backend_is_refused_after_all(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remote code is checked once its class is known."""
    source = resolve_source(whole)
    monkeypatch.setattr(
        type(tiny_model("llama")), "_supports_attention_backend", False, raising=False
    )
    with pytest.raises(ValueError, match="does not take an attention backend"):
        load_model(source, device=CPU, dtype=torch.float32)


# Figures


@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_count_tied_weights_once(tied: bool) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    count = sum(p.numel() for p in model.parameters())
    source = ModelSource("tiny", "tiny", model.config)
    assert weight_bytes(source, torch.float32) == 4 * count
    assert weight_bytes(source, torch.bfloat16) == 2 * count


def test_weight_bytes_of_a_large_model_take_no_memory() -> None:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, vocab_size=128256
    )
    assert weight_bytes(ModelSource("8b", "8b", config), torch.bfloat16) == 2 * 8_030_261_248


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("float32", torch.float32),
        ("fp32", torch.float32),
        ("float", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("float16", torch.float16),
        ("fp16", torch.float16),
        ("half", torch.float16),
    ],
)
def test_dtypes_by_name(name: str, dtype: torch.dtype) -> None:
    assert resolve_dtype(name, LlamaConfig(), CPU) == dtype


def test_dtype_auto() -> None:
    cuda = torch.device("cuda")
    assert resolve_dtype("auto", LlamaConfig(dtype=torch.float16), CPU) == torch.float32
    assert resolve_dtype("auto", LlamaConfig(dtype=torch.float16), cuda) == torch.float16
    assert resolve_dtype("auto", LlamaConfig(), cuda) == torch.bfloat16


def test_an_unknown_dtype_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'int8' is unknown; use auto, .*bfloat16"):
        resolve_dtype("int8", LlamaConfig(), CPU)


def test_eos_ids_are_a_union(folder: Path) -> None:
    """generation_config, config and tokenizer, before the model is loaded and after."""
    GenerationConfig(eos_token_id=[7, 9]).save_pretrained(folder)
    edit_config(folder, eos_token_id=5)
    source = resolve_source(folder)
    expected = {7, 9, 5, EOS}
    assert eos_token_ids(source, None, tiny_tokenizer()) == expected
    model = load_model(source, device=CPU, dtype=torch.float32)
    assert eos_token_ids(source, model, tiny_tokenizer()) == expected
    assert eos_token_ids(source, None, None) == {7, 9, 5}


def test_the_attention_name_is_the_registered_one() -> None:
    assert loading.ATTENTION == specdec.models.paged_model.ATTENTION_NAME
