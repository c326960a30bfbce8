"""The benchmark scripts run from start to end on a tiny model and save what they promise."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.distill.trainer import start_draft
from specdec.models.shared_draft import save_shared_draft

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
OPTIONS = (
    "--num-prompts 4 --max-tokens 12 --batch 1 4 --lookahead 2 4 --lookup 2 --repeats 2 --quiet 1"
)
SPREAD = {"median", "min", "max"}


@pytest.fixture
def cpu_pair(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cpu_pair

    return cpu_pair


@pytest.fixture
def cpu_attention(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cpu_attention

    return cpu_attention


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import common

    return common


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a tokenizer that knows the built-in prompts' words."""
    folder = tmp_path_factory.mktemp("tiny")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from common import PROMPTS
    finally:
        sys.path.remove(str(BENCHMARKS))
    splitter = pre_tokenizers.Whitespace()
    words = {word for p in PROMPTS for word, _ in splitter.pre_tokenize_str(p.text)}
    vocab = {word: i for i, word in enumerate(["<unk>", "</s>", *sorted(words)])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = splitter
    PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def result(cpu_pair: ModuleType, tiny_folder: Path, tmp_path: Path) -> dict[str, Any]:
    options = [*OPTIONS.split(), f"--target={tiny_folder}", f"--out={tmp_path}"]
    code = cpu_pair.main(options)
    assert code == 0
    found: dict[str, Any] = json.loads((tmp_path / "cpu_pair.json").read_text(encoding="utf-8"))
    return found


def test_cpu_pair_saves_header_settings_and_results(result: dict[str, Any]) -> None:
    head = result["header"]
    assert head["schema_version"] == 1
    assert head["command"].startswith("python benchmarks/cpu_pair.py --num-prompts 4")
    assert {"cpu", "threads", "memory_gib"} <= head["hardware"].keys()
    assert {"python", "torch", "transformers"} <= head["versions"].keys()
    assert [p["kind"] for p in result["settings"]["prompts"]] == [
        "chat",
        "code",
        "summarisation",
        "reasoning",
    ]
    rows = {(r["batch"], r["library"], r["method"]): r for r in result["results"]}
    assert rows.keys() == {
        (1, "transformers", "plain"),
        (1, "transformers", "prompt lookup"),
        (1, "specdec", "plain"),
        (1, "specdec", "ngram"),
        (1, "specdec", "ngram auto"),
        (4, "transformers", "plain"),
        (4, "specdec", "plain"),
        (4, "specdec", "ngram"),
        (4, "specdec", "ngram auto"),
    }
    assert len(result["selection"]) == 6 + 5  # each K of each library ran once


def test_cpu_pair_counts_tokens_and_finds_equal_texts(result: dict[str, Any]) -> None:
    """These random fp32 weights give no near ties in 12 tokens: all must emit the same tokens."""
    totals = set()
    for row in result["results"]:
        for name in (
            "tokens_per_second",
            "decode_tokens_per_second",
            "ratio_to_transformers_plain",
        ):
            spread = row[name]
            assert (
                spread.keys() == SPREAD and 0 < spread["min"] <= spread["median"] <= spread["max"]
            )
        assert row["equality"] == {"num_equal": 4, "num_prompts": 4, "differences": []}
        assert len(row["passes"]) == 2
        totals |= {one["num_tokens"] for one in row["passes"]}
        if row["library"] == "specdec":
            assert row["counts"]["num_emitted_tokens"] == row["passes"][0]["num_tokens"]
        base = (row["library"], row["method"]) == ("transformers", "plain")
        assert not base or row["ratio_to_transformers_plain"]["max"] == 1
    assert len(totals) == 1


def test_cpu_pair_runs_a_draft_and_samples(
    cpu_pair: ModuleType, tiny_folder: Path, tmp_path: Path
) -> None:
    """A draft that borrows the target's embedding, in every way that a draft can serve."""
    target = LlamaForCausalLM.from_pretrained(tiny_folder)
    draft = start_draft(target, 1, torch.arange(0, target.config.vocab_size, 2))
    save_shared_draft(tmp_path / "draft", draft, target, "tiny", int8=True)
    options = OPTIONS.replace("--batch 1 4", "--batch 1 --temperature 0.7").split()
    options += [f"--target={tiny_folder}", f"--draft={tmp_path / 'draft'}", f"--out={tmp_path}"]
    assert cpu_pair.main(options) == 0
    found = json.loads((tmp_path / "cpu_pair.json").read_text(encoding="utf-8"))
    methods = {(r["library"], r["method"]) for r in found["results"]}
    assert methods == {
        *(("transformers", m) for m in ("plain", "prompt lookup", "assisted")),
        ("specdec", "plain"),
        *(("specdec", m) for m in ("draft_model", "hybrid", "ngram")),
        *(("specdec", f"{m} auto") for m in ("draft_model", "hybrid", "ngram")),
    }
    assert all(r["equality"] is None for r in found["results"])
    assert found["settings"]["engines"]["draft_model"]["proposer"] == "draft_model"


def test_draft_quality_runs(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import draft_quality

    target = LlamaForCausalLM.from_pretrained(tiny_folder)
    save_shared_draft(tmp_path / "d", start_draft(target, 2, None), target, "tiny", int8=False)
    options = f"--target={tiny_folder} --draft={tmp_path / 'd'} --out={tmp_path} --num-prompts 4"
    assert draft_quality.main([*options.split(), "--max-tokens", "100", "--quiet"]) == 0
    found = json.loads((tmp_path / "draft_quality.json").read_text(encoding="utf-8"))
    rows = {row["category"]: row for row in found["results"]}
    assert rows.keys() == {"all", "chat", "code", "summarisation", "reasoning"}
    everything = rows["all"]["greedy"]
    assert everything["num_positions"] == sum(
        row["greedy"]["num_positions"] for name, row in rows.items() if name != "all"
    )
    assert everything["top1"] > 0.9  # the draft's two layers are the target's, in bfloat16
    assert rows["all"]["greedy_first"]["num_positions"] <= 4 * draft_quality.FIRST
    assert found["chained"]["greedy"]["mean_accepted_length"] > 3


def test_equality_names_the_first_different_token(common: ModuleType) -> None:
    reference = [[1, 2, 3], [4, 5]]
    found = common.equality(reference, [[[1, 2, 3], [4, 5]], [[1, 9, 3], [4]]])
    assert found["num_equal"] == 0
    assert found["differences"] == [
        {"prompt": 0, "first_difference": 1},
        {"prompt": 1, "first_difference": 1},
    ]


def test_selection_keeps_the_quickest_lookahead(cpu_pair: ModuleType, monkeypatch: Any) -> None:
    rates = {0: 10.0, 2: 12.0, 5: 11.0}

    def contender(method: str, k: int) -> Any:
        return cpu_pair.Contender(
            "specdec", method, "float32", k, lambda prompts, n: cpu_pair.Answers()
        )

    def measured(contender: Any, *rest: Any) -> Any:
        tokens = int(100 * rates[contender.num_draft_tokens])
        return cpu_pair.Pass(100.0, tokens, 1.0, cpu_pair.Answers())

    monkeypatch.setattr(cpu_pair, "measure", measured)
    all_three = [contender("plain", 0), contender("ngram", 2), contender("ngram", 5)]
    chosen, log = cpu_pair.select(all_three, [[1]], 1, 4, 1.0)
    assert [c.num_draft_tokens for c in chosen] == [0, 2]
    assert len(log) == 3


def test_prompt_files_take_prompts_and_turns(common: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"turns": ["two", "more"], "category": "chat"}\n')
    found = common.read_prompts(file, 8)
    assert [(p.kind, p.text) for p in found] == [("file", "one"), ("chat", "two")]
    assert len(common.read_prompts(file, 1)) == 1
    file.write_text('{"prompt": "one"}\n{"question": "two"}\n')
    with pytest.raises(ValueError, match="line 2"):
        common.read_prompts(file, 8)


def test_spread_and_table(common: ModuleType) -> None:
    spread = common.Spread.of([3.0, 1.0, 2.0])
    assert (spread.median, spread.min, spread.max) == (2.0, 1.0, 3.0)
    assert spread.text(1) == "2.0 (1.0-3.0)"
    assert common.table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_cpu_attention_saves_shares(
    cpu_attention: ModuleType, tiny_folder: Path, tmp_path: Path
) -> None:
    options = ["--context=40", "--repeats=2", f"--target={tiny_folder}", f"--out={tmp_path}"]
    assert cpu_attention.main(options) == 0
    found = json.loads((tmp_path / "cpu_attention.json").read_text(encoding="utf-8"))
    assert [one["case"].split()[0] for one in found["results"]] == ["prefill", "decode", "verify"]
    for one in found["results"]:
        assert one["attention_share"].keys() == SPREAD
        assert 0 < one["attention_share"]["min"] <= one["attention_share"]["max"] < 1
