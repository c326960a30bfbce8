"""The training report: report.json, REPORT.md and a plot."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

FIGURES = (
    ("top1", "same argmax as the target (share of positions)"),
    ("overlap", "sum min(p, q), the chance that a sampled draft is kept"),
    ("acceptance_rate", "accepted / drafted, in the engine"),
    ("mean_accepted_length", "tokens emitted per target step, in the engine"),
)


def environment(device: torch.device) -> dict[str, str]:
    """Hardware and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    packages = {package: version(package) for package in ("torch", "transformers", "accelerate")}
    return {"device": name, "python": platform.python_version(), **packages}


def write_report(folder: Path, report: dict[str, Any]) -> list[Path]:
    """Write what was found; the plot needs matplotlib (extra "bench") and is left out without it.

    report: command, config, environment, corpus, seconds, reports: [{step, greedy, sampled}].
    """
    data = folder / "report.json"
    data.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    text = folder / "REPORT.md"
    text.write_text(_markdown(report), encoding="utf-8")
    plot = _plot(folder / "report.png", report)
    return [data, text, *([plot] if plot else [])]


def _markdown(report: dict[str, Any]) -> str:
    last = report["reports"][-1]
    k = report["config"]["num_draft_tokens"]
    lines = [
        f"# Draft for {report['target']}: {report['config']['num_layers']} layers",
        "",
        f"Made by `{report['command']}`, seed {report['config']['seed']}, in "
        f"{report['seconds']['total'] / 60:.1f} minutes on {report['environment']['device']} "
        f"(torch {report['environment']['torch']}).",
        f"Text: {report['corpus']['num_answer_tokens']:,} answer tokens that the target wrote to "
        f"{report['corpus']['num_prompts']:,} prompts; {report['num_steps']:,} steps.",
        "",
        f"Held-out prompts: {report['corpus']['num_held_out']}. In the engine K = {k}.",
        "",
        "| figure | greedy | temperature 1 |",
        "|---|---|---|",
    ]
    for key, meaning in FIGURES:
        lines.append(f"| {meaning} | {last['greedy'][key]:.3f} | {last['sampled'][key]:.3f} |")
    lines += [
        "",
        "Acceptance by position in the draft:",
        "",
        "| position | greedy | temperature 1 |",
    ]
    lines.append("|---|---|---|")
    pairs = zip(
        last["greedy"]["acceptance_by_position"],
        last["sampled"]["acceptance_by_position"],
        strict=False,
    )
    lines += [f"| {i} | {a:.3f} | {b:.3f} |" for i, (a, b) in enumerate(pairs)]
    return "\n".join(lines) + "\n"


def _plot(file: Path, report: dict[str, Any]) -> Path | None:
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [r["step"] for r in report["reports"]]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for kind, key in (("greedy", "top1"), ("sampled", "overlap")):
        axes[0].plot(steps, [r[kind][key] for r in report["reports"]], "o-", label=f"{kind} {key}")
    for kind in ("greedy", "sampled"):
        lengths = [r[kind]["mean_accepted_length"] for r in report["reports"]]
        axes[1].plot(steps, lengths, "o-", label=kind)
    axes[0].set_ylabel("agreement with the target")
    axes[1].set_ylabel("tokens per target step")
    for one in axes:
        one.set_xlabel("training step")
        one.legend()
        one.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return file
