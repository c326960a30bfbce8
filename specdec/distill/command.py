"""`specdec distill`: the command line of distillation."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

HELP = "train a small draft for a target that has no small sibling"
OPTIONS = {  # fields of DistillConfig that are options of the same name
    "head_size": "keep a head of the M most frequent ids only",
    "num_own_turns": "user turns that the target writes itself",
    "num_answer_tokens": "tokens of answers that the target writes",
    "train_tokens": "answer tokens to train on, each pass counted",
    "max_answer_tokens": "tokens of an answer at most",
    "max_conversation_tokens": "leave out longer conversations",
    "num_held_out": "prompts kept for the reports",
    "num_draft_tokens": "K in the reports",
    "rows_per_step": "packed rows of a training step",
    "row_tokens": "tokens of a packed row",
    "max_num_seqs": "answers written at once",
    "num_reports": "held-out reports on the way",
    "seed": "of texts and training",
}


def add_parser(commands: Any) -> None:
    """Add the subcommand; nothing heavy is imported before it runs."""
    parser = commands.add_parser("distill", help=HELP, description=HELP)
    parser.add_argument("--target", required=True, help="alias, folder, hub id or GGUF file")
    parser.add_argument("--layers", type=int, default=2, help="layers of the draft (default 2)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the draft; resumes")
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help=".jsonl with prompt, question, instruction or turns; or text, one a line",
    )
    for name, text in OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from specdec.distill.config import DistillConfig
    from specdec.distill.run import distill

    known = {field.name for field in fields(DistillConfig)}
    given = {name: value for name, value in vars(args).items() if name in known}
    report = distill(
        args.target,
        args.out,
        DistillConfig(num_layers=args.layers, **given),
        prompt_files=args.prompts,
        device=args.device,
        command=shlex.join(["specdec", *sys.argv[1:]]),
        progress=not args.json,
    )
    if args.json:
        print(json.dumps(report))
    else:
        last = report["reports"][-1]
        print(
            f"draft in {args.out}: top-1 {last['greedy']['top1']:.3f}, "
            f"sum min(p, q) {last['sampled']['overlap']:.3f}, "
            f"{last['greedy']['mean_accepted_length']:.2f} tokens a step (greedy, in the engine)"
        )
    return 0
