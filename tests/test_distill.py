"""Distillation: the loss, packing, resuming, cut heads, and a toy pair that learns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tiny_models import save_tiny, tiny_model

import specdec.distill.corpus as corpus_module
from specdec import LLM, SamplingParams
from specdec.cli import main
from specdec.distill.config import DistillConfig
from specdec.distill.corpus import Conversation, frequent_ids, pack_rows
from specdec.distill.evaluate import agreement
from specdec.distill.losses import distribution_loss, head_loss, loss_weights
from specdec.distill.prompts import built_in_prompts
from specdec.distill.run import distill
from specdec.distill.trainer import Trainer, source_layers, start_draft
from specdec.models.loading import resolve_source
from specdec.models.shared_draft import load_shared_draft, save_shared_draft

SMALL = DistillConfig(
    num_layers=2,
    num_own_turns=8,
    num_answer_tokens=6000,
    max_turn_tokens=16,
    max_answer_tokens=32,
    max_conversation_tokens=128,
    num_held_out=10,
    train_tokens=60_000,
    row_tokens=128,
    rows_per_step=8,
    num_warmup_steps=10,
    num_reports=0,
    num_draft_tokens=3,
    max_num_seqs=32,
)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return save_tiny(tiny_model("llama", num_hidden_layers=4), folder)


@pytest.fixture(scope="module")
def distilled(
    target_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A draft with a cut head, and its report."""
    out = tmp_path_factory.mktemp("draft")
    config = replace(SMALL, head_size=96)
    return out, distill(str(target_folder), out, config, device="cpu", progress=False)


def target_module(num_layers: int = 4) -> Any:
    model = tiny_model("llama", num_hidden_layers=num_layers)
    model.set_attn_implementation("sdpa")
    return model


def conversations(count: int, seed: int = 0) -> list[Conversation]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(3, 40, (), generator=generator))
        ids = tuple(torch.randint(4, 128, (length,), generator=generator).tolist())
        found.append(Conversation(ids, int(torch.randint(1, length, (), generator=generator))))
    return found


# The loss


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.3, 1.0)])
def test_the_written_gradient_is_autograds(cut: bool, weights: tuple[float, float]) -> None:
    torch.manual_seed(0)
    token_map = torch.tensor([0, 3, 4, 9, 11]) if cut else None
    width = 5 if cut else 12
    target_logits = torch.randn(7, 12) * 2
    draft_logits = (torch.randn(7, width) * 2).requires_grad_()
    p = target_logits.softmax(-1)
    p = p if token_map is None else p[:, token_map]
    q = draft_logits.softmax(-1)
    kl = (p * (p.log() - q.log())).sum()
    expected = weights[0] * kl + weights[1] * (7 - torch.minimum(p, q).sum())
    expected.backward()
    loss, gradient = distribution_loss(
        draft_logits.detach(), target_logits, torch.tensor(weights), token_map
    )
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert draft_logits.grad is not None
    torch.testing.assert_close(gradient, draft_logits.grad, atol=1e-6, rtol=1e-5)


def test_the_loss_over_heads_in_chunks_equals_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("specdec.distill.losses.CHUNK", 4)
    hidden, taught = torch.randn(11, 6, requires_grad=True), torch.randn(11, 6)
    head = torch.randn(20, 6)
    weights = torch.tensor(loss_weights(0.0, 0.5))
    loss = head_loss(hidden, taught, head, head, weights, None)
    loss.backward()
    again = hidden.detach().clone().requires_grad_()
    p, q = (taught @ head.T).softmax(-1), (again @ head.T).log_softmax(-1)
    expected = (p * (p.log() - q)).sum() / 11
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(hidden.grad, again.grad)


def test_the_loss_turns_to_total_variation_for_the_end() -> None:
    assert loss_weights(0.59, 0.6) == (1.0, 0.0)
    assert loss_weights(0.6, 0.6) == (0.3, 1.0)


# Text


def test_every_conversation_is_packed_once_and_answers_are_learned() -> None:
    talks = conversations(60)
    rows = pack_rows(talks, 64)
    found = []
    for row in range(rows.num_rows):
        for segment in range(int(rows.segments[row].max()) + 1):
            inside = rows.segments[row] == segment
            ids = tuple(rows.token_ids[row][inside].tolist())
            assert rows.positions[row][inside].tolist() == list(range(len(ids)))
            found.append(Conversation(ids, len(ids) - int(rows.learned[row][inside].sum())))
            assert not rows.learned[row][inside][-1]  # nothing comes behind the last token
    assert sorted(found, key=str) == sorted(talks, key=str)
    assert not rows.learned[rows.segments < 0].any()
    assert rows.num_rows <= 1.1 * sum(len(t.token_ids) for t in talks) / 64 + 1


def test_rows_hide_conversations_from_each_other() -> None:
    target = target_module()
    talks = [c for c in conversations(6) if c.num_answer > 1]
    draft = start_draft(target, 2, None)
    together = agreement(target, draft, talks, 160)
    apart = [agreement(target, draft, [talk], 160) for talk in talks]
    total = sum(a["num_positions"] for a in apart)
    mean = sum(a["overlap"] * a["num_positions"] for a in apart) / total
    assert together["num_positions"] == total
    assert together["overlap"] == pytest.approx(mean, abs=1e-5)


def test_frequent_ids_counts_answers_only() -> None:
    talks = [Conversation((7, 7, 7, 5, 5, 9), 3), Conversation((8, 5, 9, 6), 1)]
    assert frequent_ids(talks, 16, 2).tolist() == [5, 9]


def test_an_interrupted_corpus_is_taken_up(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(target_folder), num_draft_tokens=0, progress=False, num_blocks=256)
    config = replace(SMALL, num_answer_tokens=900, max_num_seqs=2)
    prompts = [[5, 6, i] for i in range(4, 44)]
    whole = corpus_module.write_corpus(llm, prompts, tmp_path / "a", config)
    (tmp_path / "b").mkdir()
    first = "shard-00000.safetensors"
    (tmp_path / "b" / first).write_bytes((tmp_path / "a" / first).read_bytes())
    written = []
    answers = corpus_module.write_answers
    monkeypatch.setattr(
        corpus_module,
        "write_answers",
        lambda *args, **kw: written.append(1) or answers(*args, **kw),
    )
    assert corpus_module.write_corpus(llm, prompts, tmp_path / "b", config) == whole
    assert len(written) == len(list((tmp_path / "a").iterdir())) - 1


# Training


def test_a_draft_starts_from_layers_spread_over_the_target() -> None:
    assert source_layers(2, 30) == [0, 29]
    assert source_layers(4, 30) == [0, 10, 19, 29]
    assert source_layers(1, 30) == [29]
    target = target_module()
    draft = start_draft(target, 4, None)
    ids = torch.arange(4, 20)[None]
    torch.testing.assert_close(draft(ids).logits, target(ids).logits)
    with pytest.raises(ValueError, match="num_layers is 5, the target has 4"):
        start_draft(target, 5, None)
    with pytest.raises(ValueError, match="'gemma2'"):
        start_draft(tiny_model("gemma2"), 1, None)


def trainer(folder: Path, rows: Any) -> Trainer:
    folder.mkdir(exist_ok=True)
    target = target_module()
    draft = start_draft(target, 2, None)
    config = replace(SMALL, train_tokens=20 * 8 * 60, rows_per_step=8)
    return Trainer(target, draft, rows, config, folder, Accelerator(cpu=True))


def test_a_resumed_run_gives_the_same_weights(tmp_path: Path) -> None:
    rows = pack_rows(conversations(300), 128)
    straight = trainer(tmp_path / "a", rows)
    straight.run(14)
    before = trainer(tmp_path / "b", rows)
    before.run(5)
    before.save()
    after = trainer(tmp_path / "b", rows)
    assert after.resume() and after.step == 5
    after.run(14)
    for one, other in zip(straight.draft.parameters(), after.draft.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_of_another_length_is_refused(tmp_path: Path) -> None:
    rows = pack_rows(conversations(300), 128)
    first = trainer(tmp_path, rows)
    first.save()
    other = trainer(tmp_path, pack_rows(conversations(100), 128))
    with pytest.raises(ValueError, match="give the same settings, or another --out"):
        other.resume()


def test_training_leaves_the_target_as_it_was(tmp_path: Path) -> None:
    run = trainer(tmp_path, pack_rows(conversations(100), 128))
    fresh = target_module().state_dict()
    run.run(3)
    target = run.draft.get_output_embeddings()
    assert torch.equal(target.weight, fresh["lm_head.weight"])
    assert torch.equal(run.draft.get_input_embeddings().weight, fresh["model.embed_tokens.weight"])


# The whole command


def test_distilling_a_toy_pair_raises_acceptance(distilled: tuple[Path, dict[str, Any]]) -> None:
    _, report = distilled
    first, last = report["reports"][0], report["reports"][-1]
    assert (first["step"], last["step"]) == (0, report["num_steps"])
    for kind in ("greedy", "sampled"):
        assert last[kind]["overlap"] > first[kind]["overlap"] + 0.15
        assert last[kind]["acceptance_rate"] > first[kind]["acceptance_rate"] + 0.05
    assert last["greedy"]["top1"] > first["greedy"]["top1"] + 0.1


def test_a_cut_head_is_lossless_and_reaches_other_tokens(
    target_folder: Path, distilled: tuple[Path, dict[str, Any]]
) -> None:
    out, _ = distilled
    prompts = [[5, 6, i] for i in range(4, 24)]
    plain = LLM(str(target_folder), num_draft_tokens=0, progress=False, num_blocks=256)
    pair = LLM(str(target_folder), str(out), num_draft_tokens=3, progress=False, num_blocks=256)
    for params in (
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=3),
    ):
        texts = [o.outputs[0].token_ids for o in pair.generate(prompts, params)]
        if params.greedy:
            expected = [o.outputs[0].token_ids for o in plain.generate(prompts, params)]
            assert texts == expected
        map_ids = set(resolve_map(out))
        assert any(set(text) - map_ids for text in texts)
    assert pair.stats()["acceptance_rate"] > 0.05


def resolve_map(folder: Path) -> list[int]:
    draft = load_shared_draft(resolve_source(folder), target_module())
    return [int(i) for i in draft.token_map]


def test_the_report_is_written(distilled: tuple[Path, dict[str, Any]]) -> None:
    out, report = distilled
    assert json.loads((out / "report.json").read_text()) == report
    text = (out / "REPORT.md").read_text()
    assert f"{report['reports'][-1]['greedy']['top1']:.3f}" in text
    assert report["environment"]["torch"] == torch.__version__


def test_the_command_makes_a_draft_and_goes_on(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"word number {i}" for i in range(20)) + "\n")
    command = [
        *("distill", "--target", str(target_folder), "--layers", "1", "--device", "cpu"),
        *("--out", str(tmp_path / "out"), "--prompts", str(prompts), "--num-own-turns", "0"),
        *("--num-answer-tokens", "300", "--max-answer-tokens", "16", "--train-tokens", "600"),
        *("--max-conversation-tokens", "64", "--row-tokens", "64", "--num-reports", "0"),
        *("--num-held-out", "2", "--max-num-seqs", "8", "--num-draft-tokens", "2", "--json"),
    ]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["config"]["num_layers"] == 1 and report["corpus"]["num_prompts"] == 20
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert main(command) == 0  # nothing left to do
    assert json.loads(capsys.readouterr().out)["reports"] == report["reports"]
    assert main([*command, "--seed", "1"]) == 1
    assert "begun with other settings (seed 0 -> 1)" in capsys.readouterr().err


# Bad input


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"head_size": 0}, "head_size must be at least 1, got 0"),
        ({"muon_lr": 0.0}, "muon_lr must be above 0"),
        ({"row_tokens": 512}, "row_tokens is 512, a conversation may have 1024"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillConfig(**fields)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"nothing": 1}\n', "a.jsonl, line 2: needs a JSON object"),
        ("a.jsonl", '{"prompt": ["x"]}\n', "line 1: the prompt is not a text"),
        ("a.txt", "\n\n", "a.txt holds no prompt"),
        ("a.txt", "one\ntwo\n", "2 prompts, of which 10 are held out, leave none"),
    ],
)
def test_bad_prompt_files_are_named(
    target_folder: Path, tmp_path: Path, name: str, text: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    config = replace(SMALL, num_own_turns=0)
    with pytest.raises(ValueError, match=message):
        distill(
            str(target_folder),
            tmp_path / "out",
            config,
            prompt_files=[file],
            device="cpu",
            progress=False,
        )


def test_a_borrowing_draft_knows_its_target(tmp_path: Path) -> None:
    target = target_module()
    draft = start_draft(target, 1, None)
    save_shared_draft(tmp_path / "d", draft, target, "the target", int8=False)
    source = resolve_source(tmp_path / "d")
    loaded = load_shared_draft(source, target)
    ids = torch.arange(4, 20)[None]
    loaded.set_attn_implementation("sdpa")
    torch.testing.assert_close(loaded(ids).logits, draft(ids).logits, atol=0.3, rtol=0.1)
    other = tiny_model("llama", seed=5, num_hidden_layers=4)
    with pytest.raises(ValueError, match="borrows the embedding of 'the target'"):
        LLM(other, tmp_path / "d", num_blocks=64, progress=False)
    wider = tiny_model("llama", hidden_size=64)
    with pytest.raises(ValueError, match="with hidden_size 48, this target has 64"):
        LLM(wider, tmp_path / "d", num_blocks=64, progress=False)
    with pytest.raises(ValueError, match="give it as draft="):
        LLM(tmp_path / "d", num_blocks=64, progress=False)


def test_a_draft_of_another_shape_than_its_config_is_refused(tmp_path: Path) -> None:
    target = target_module()
    save_shared_draft(tmp_path / "d", start_draft(target, 1, None), target, "t", int8=True)
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    config["num_hidden_layers"] = 2
    config.pop("layer_types", None)
    (tmp_path / "d" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"tensor layers\.1\..* is missing"):
        LLM(target, tmp_path / "d", num_blocks=64, progress=False)


def test_built_in_prompts_are_many_and_different() -> None:
    prompts = built_in_prompts()
    assert len(set(prompts)) == len(prompts) >= 300
