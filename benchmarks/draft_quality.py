"""How often does the target keep what a draft proposes? By category, and for the first 96 tokens.

    python benchmarks/draft_quality.py --draft FOLDER --prompts prompts.jsonl

The target answers each prompt greedily and at temperature 1. On these texts: the share of positions
where both argmaxes agree (greedy) and the mean of sum min(p, q) (temperature 1), which are the
chances that a first draft is kept. Then chained drafting in the engine, K = --lookahead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, encode, header, header_text, read_prompts, save_json, say, table

from specdec import LLM, SamplingParams
from specdec.distill.corpus import Conversation, write_answers
from specdec.distill.evaluate import agreement
from specdec.models.loading import load_model, resolve_dtype, resolve_source
from specdec.models.shared_draft import load_shared_draft

QUESTION = "How often the target keeps a draft's tokens"
FIRST = 96
KINDS = {"greedy": 0.0, "sampled": 1.0}


def first_tokens(talks: list[Conversation]) -> list[Conversation]:
    """The talks, their answers cut behind FIRST tokens."""
    return [Conversation(t.token_ids[: t.num_prompt + FIRST], t.num_prompt) for t in talks]


def chained(args: argparse.Namespace, prompts: list[list[int]], temperature: float) -> Any:
    """Counts of the engine that drafts with this draft."""
    llm = LLM(
        args.target,
        args.draft,
        num_draft_tokens=args.lookahead,
        max_num_seqs=args.max_num_seqs,
        enable_prefix_caching=False,
        progress=False,
    )
    params = SamplingParams(temperature=temperature, max_tokens=args.max_tokens, seed=0)
    llm.generate(prompts, params)
    stats = llm.stats()
    names = ("acceptance_rate", "mean_accepted_length", "acceptance_by_position")
    return {name: stats[name] for name in names}


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    result: dict[str, Any] = {"header": header(QUESTION, command, seeds=[0])}
    prompts = read_prompts(args.prompts, args.num_prompts)
    llm = LLM(
        args.target, num_draft_tokens=0, max_num_seqs=args.max_num_seqs, progress=not args.quiet
    )
    encoded = [encode(llm, prompt.text) for prompt in prompts]
    fits = [i for i, ids in enumerate(encoded) if len(ids) <= args.max_prompt_tokens]
    kept = [encoded[i] for i in fits]
    texts = {
        kind: write_answers(
            llm, kept, [temperature] * len(kept), max_tokens=args.max_tokens, seed=1
        )
        for kind, temperature in KINDS.items()
    }
    del llm
    kinds_of = {tuple(encoded[i]): prompts[i].kind for i in fits}
    source = resolve_source(args.target)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = resolve_dtype("auto", source.config, device)
    target = load_model(source, device=device, dtype=dtype, progress=False)
    draft = load_shared_draft(resolve_source(args.draft), target)
    for model in (target, draft):
        model.set_attn_implementation("sdpa")
    width = args.max_prompt_tokens + args.max_tokens
    rows = []
    for category in ("all", *sorted(set(kinds_of.values()))):
        row: dict[str, Any] = {"category": category}
        for kind, talks in texts.items():
            own = [
                t
                for t in talks
                if category in ("all", kinds_of[tuple(t.token_ids[: t.num_prompt])])
            ]
            row[kind] = agreement(target, draft, own, width)
            row[f"{kind}_first"] = agreement(target, draft, first_tokens(own), width)
        rows.append(row)
    result["settings"] = {
        **{k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "num_used": len(fits),
        "dtype": str(dtype),
    }
    result["results"] = rows
    del target, draft
    result["chained"] = {kind: chained(args, kept, t) for kind, t in KINDS.items()}
    return result


def result_table(result: dict[str, Any]) -> str:
    rows = [
        (
            row["category"],
            str(row["greedy"]["num_positions"]),
            f"{row['greedy']['top1']:.3f}",
            f"{row['greedy_first']['top1']:.3f}",
            f"{row['sampled']['overlap']:.3f}",
            f"{row['sampled_first']['overlap']:.3f}",
        )
        for row in result["results"]
    ]
    columns = ("category", "positions", "greedy top-1", f"first {FIRST}")
    return table((*columns, "T = 1 sum min(p, q)", f"first {FIRST} "), rows)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", required=True, help="folder made by specdec distill")
    parser.add_argument("--prompts", type=Path, help='.jsonl with "prompt" or "turns"')
    parser.add_argument("--num-prompts", type=int, default=10_000)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-prompt-tokens", type=int, default=1000, help="longer ones are left")
    parser.add_argument("--lookahead", type=int, default=5)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="draft_quality")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = parse(given)
    result = run(args, ["python", "benchmarks/draft_quality.py", *given])
    path = save_json(args.out, args.name, result)
    print(header_text(result["header"]))
    print()
    print(result_table(result))
    for kind, found in result["chained"].items():
        by_position = " ".join(f"{rate:.3f}" for rate in found["acceptance_by_position"])
        say(
            f"in the engine, {kind}, K = {args.lookahead}: "
            f"{found['mean_accepted_length']:.2f} tokens a step; kept by position {by_position}"
        )
    say(f"\nsaved {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
