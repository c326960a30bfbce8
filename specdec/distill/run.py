"""distill(): text from the target, a draft trained on it, a report. Every stage resumes."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel

from specdec.distill.config import DistillConfig
from specdec.distill.corpus import (
    Conversation,
    frequent_ids,
    load_shard,
    pack_rows,
    save_prompts,
    save_shard,
    write_answers,
    write_corpus,
)
from specdec.distill.evaluate import report_on
from specdec.distill.prompts import built_in_prompts, encode_prompt, file_prompts, own_turns
from specdec.distill.report import environment, write_report
from specdec.distill.trainer import Trainer, start_draft
from specdec.llm import LLM
from specdec.models.loading import load_model, resolve_dtype, resolve_source
from specdec.models.shared_draft import save_shared_draft

WORK = "work"
GROWING = ("num_answer_tokens", "train_tokens", "num_reports")  # may be raised later
SETTINGS = "settings.json"
TURNS = "own_turns.jsonl"


def distill(
    target: str,
    out: Path,
    config: DistillConfig,
    *,
    prompt_files: Sequence[Path] = (),
    device: str = "auto",
    command: str = "specdec.distill.run.distill()",
    progress: bool = True,
) -> dict[str, Any]:
    """Train a draft for `target` and write it to `out`, with its report; returns the report.

    `out`/work keeps the texts and a checkpoint: the same call goes on where an interrupted one
    stopped; it may be deleted afterwards.
    Raises ValueError if `out` was made with other settings.
    """
    started = time.perf_counter()
    work = out / WORK
    work.mkdir(parents=True, exist_ok=True)
    _check_settings(work / SETTINGS, {"target": target, **config.as_dict()})
    accelerator = _accelerator(device)
    corpus, held_out, num_prompts = _texts(
        target, work, config, prompt_files, accelerator, progress
    )
    written = time.perf_counter()
    model = _load_target(target, accelerator.device, progress)
    token_map = None
    if config.head_size is not None:
        token_map = frequent_ids(corpus, model.config.vocab_size, config.head_size)
    draft = start_draft(model, config.num_layers, token_map)
    rows = pack_rows(corpus, config.row_tokens)
    trainer = Trainer(model, draft, rows, config, work, accelerator)
    trainer.resume()
    reports = _train(trainer, model, draft, target, held_out, config, work, progress)
    report = {
        "target": target,
        "command": command,
        "config": config.as_dict(),
        "environment": environment(accelerator.device),
        "corpus": {
            "num_prompts": num_prompts,
            "num_conversations": len(corpus),
            "num_answer_tokens": sum(c.num_answer for c in corpus),
            "num_held_out": len(held_out["greedy"]),
        },
        "num_steps": trainer.num_steps,
        "seconds": {
            "texts": round(written - started, 1),
            "total": round(time.perf_counter() - started, 1),
        },
        "reports": reports,
    }
    if accelerator.is_main_process:
        save_shared_draft(out, draft, model, target, int8=True)
        write_report(out, report)
    return report


def _texts(
    target: str,
    work: Path,
    config: DistillConfig,
    prompt_files: Sequence[Path],
    accelerator: Accelerator,
    progress: bool,
) -> tuple[list[Conversation], dict[str, list[Conversation]], int]:
    """The corpus, the held-out texts, and how many prompts there were. The first process writes,
    the others read what it wrote.
    """
    with accelerator.main_process_first():
        llm = LLM(
            target,
            device=str(accelerator.device),
            num_draft_tokens=0,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max(2048, 4 * config.max_num_seqs),
            max_model_len=_conversation_limit(config),
            progress=progress and accelerator.is_main_process,
        )
        prompts = file_prompts(llm, prompt_files) or [
            encode_prompt(llm, text) for text in built_in_prompts() if llm.tokenizer is not None
        ]
        prompts += _turns(llm, work / TURNS, config)
        prompts = [list(p) for p in dict.fromkeys(map(tuple, prompts))]
        if len(prompts) <= config.num_held_out:
            raise ValueError(
                f"{len(prompts)} prompts, of which {config.num_held_out} are held out, leave none "
                f"to train on; give more with --prompts, or lower num_held_out"
            )
        kept, training = _split(prompts, config.num_held_out)
        held_out = {
            name: _held_out(llm, work / f"held-out-{name}.safetensors", kept, temperature, config)
            for name, temperature in (("greedy", 0.0), ("sampled", 1.0))
        }
        corpus = write_corpus(llm, training, work / "corpus", config)
    del llm
    gc.collect()
    if accelerator.device.type == "cuda":
        torch.cuda.empty_cache()
    return corpus, held_out, len(prompts)


def _conversation_limit(config: DistillConfig) -> int:
    longest = max(config.max_answer_tokens, config.max_turn_tokens)
    return config.max_conversation_tokens + longest


def _split(prompts: list[list[int]], num_held_out: int) -> tuple[list[list[int]], list[list[int]]]:
    """Every n-th prompt is held out, so that each source gives some."""
    stride = len(prompts) // num_held_out
    chosen = set(range(0, stride * num_held_out, stride))
    kept = [prompt for i, prompt in enumerate(prompts) if i in chosen]
    return kept, [prompt for i, prompt in enumerate(prompts) if i not in chosen]


def _turns(llm: LLM, file: Path, config: DistillConfig) -> list[list[int]]:
    if not file.is_file():
        turns = own_turns(
            llm, config.num_own_turns, max_tokens=config.max_turn_tokens, seed=config.seed
        )
        save_prompts(file, turns)
    return file_prompts(llm, [file]) if file.stat().st_size else []


def _held_out(
    llm: LLM, file: Path, prompts: list[list[int]], temperature: float, config: DistillConfig
) -> list[Conversation]:
    if not file.is_file():
        fitting = [p for p in prompts if len(p) < config.max_conversation_tokens]
        texts = write_answers(
            llm,
            fitting,
            [temperature] * len(fitting),
            max_tokens=config.max_answer_tokens,
            seed=config.seed,
        )
        save_shard(file, texts)
    limit = config.row_tokens
    return [c for c in load_shard(file) if len(c.token_ids) <= limit]


def _train(
    trainer: Trainer,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    target_name: str,
    held_out: dict[str, list[Conversation]],
    config: DistillConfig,
    work: Path,
    progress: bool,
) -> list[dict[str, Any]]:
    """Train to the end, with reports and checkpoints on the way."""
    log = work / "reports.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    reports = [json.loads(line) for line in lines]
    reports = [r for r in reports if r["step"] <= trainer.step]
    total = trainer.num_steps
    parts = config.num_reports + 1
    stops = sorted({round(total * i / parts) for i in range(parts + 1)})
    with _bar(total, trainer.step, progress) as advance:
        for stop in stops:
            if stop <= trainer.step and any(r["step"] == stop for r in reports):
                continue
            trainer.run(stop, advance)
            trainer.save()
            reports.append(
                {"step": stop, **report_on(target, draft, target_name, held_out, config)}
            )
            log.write_text("".join(json.dumps(r) + "\n" for r in reports), encoding="utf-8")
    return reports


@contextmanager
def _bar(total: int, done: int, progress: bool) -> Iterator[Any]:
    with Progress(
        *Progress.get_default_columns(), console=Console(stderr=True), disable=not progress
    ) as bar:
        task = bar.add_task("training", total=total, completed=done)

        def advance(step: int, loss: float) -> None:
            bar.update(task, completed=step, description=f"training, loss {loss:.3f}")

        yield advance


def _accelerator(device: str) -> Accelerator:
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    return Accelerator(cpu=on_cpu, mixed_precision="no" if on_cpu else "bf16")


def _load_target(name: str, device: torch.device, progress: bool) -> PreTrainedModel:
    source = resolve_source(name, progress=progress)
    dtype = resolve_dtype("auto", source.config, device)
    model = load_model(source, device=device, dtype=dtype, progress=progress)
    model.set_attn_implementation("sdpa")
    return model


def _check_settings(file: Path, settings: dict[str, Any]) -> None:
    """Refuse to go on with other settings than the folder was begun with."""
    if not file.is_file():
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    changed = [k for k in settings if settings[k] != before.get(k) and k not in GROWING]
    if changed:
        told = ", ".join(f"{k} {before.get(k)!r} -> {settings[k]!r}" for k in changed[:3])
        raise ValueError(
            f"{file.parent} was begun with other settings ({told}); give the same, or another --out"
        )
