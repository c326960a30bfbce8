"""Does speculation pay on a CPU? One target: K = 0, drafts, and transformers doing the same.

    python benchmarks/cpu_pair.py
    python benchmarks/cpu_pair.py --draft FOLDER --temperature 0.7

Drafts come from the text (n-gram), and with --draft also from a model, or from both (hybrid); each
with every K asked for and with the K that the engine chooses by cost ("auto").

Every contender sees the same prompts and stops at the same end tokens. First each runs once; that
is the warm-up, and it picks the best K of each library on at least half of the prompts. Then plain
decoding and the best K of each library run `--repeats` times, taking turns at each batch, and
ratios are taken inside one repeat. A second run that emits one token a prompt gives the prefill
time; "decode" is the rest. The prefix cache is off, since repeats share their prompts. Greedy
texts are compared, token by token, with transformers' plain fp32 run at batch 1. A batch during
which other processes took more than `--quiet` of the processors is run again; what stays disturbed
is marked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    Ids,
    Spread,
    encode,
    equality,
    header,
    header_text,
    read_prompts,
    save_json,
    say,
    table,
    timed,
    wait_until_quiet,
)
from contenders import Answers, Contender, specdec_contenders, transformers_contenders

from specdec import LLM
from specdec.models.loading import eos_token_ids, resolve_source

QUESTION = "Decoding on a CPU: plain, with drafts, and transformers doing the same"
PATIENCE = 600.0  # seconds to wait for other processes to end


@dataclass(slots=True)
class Pass:
    """One run of one contender over all prompts."""

    seconds: float
    num_tokens: int
    prefill_seconds: float
    answers: Answers
    disturbance: float = 0.0  # share of the processors that other processes used

    def add(self, other: Pass) -> None:
        """Join another batch's figures."""
        self.seconds += other.seconds
        self.num_tokens += other.num_tokens
        self.prefill_seconds += other.prefill_seconds
        self.answers.add(other.answers)
        self.disturbance = max(self.disturbance, other.disturbance)

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        """Tokens behind each prompt's first, by the time behind prefill and first token."""
        rest = self.num_tokens - len(self.answers.token_ids)
        return rest / max(self.seconds - self.prefill_seconds, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 4),
            "prefill_seconds": round(self.prefill_seconds, 4),
            "num_tokens": self.num_tokens,
            "disturbance": round(self.disturbance, 3),
        }


def measure(contender: Contender, group: list[Ids], max_tokens: int, quiet: float) -> Pass:
    """Time one batch, then once more for its first token alone.

    Repeated, at most four times, if other processes used more than `quiet` of the processors.
    """
    for tries_left in range(4, -1, -1):
        wait_until_quiet(quiet, PATIENCE)
        time, answers = timed(lambda: contender.run(group, max_tokens))
        prefill, _ = timed(lambda: contender.run(group, 1))
        disturbance = max(time.disturbance, prefill.disturbance)
        if disturbance <= quiet or not tries_left:
            break
        say(f"again: others used {disturbance:.0%} during {contender.name}")
    num_tokens = sum(len(ids) for ids in answers.token_ids)
    return Pass(time.seconds, num_tokens, prefill.seconds, answers, disturbance)


def compare(
    contenders: list[Contender],
    prompts: list[Ids],
    batch: int,
    max_tokens: int,
    quiet: float,
    repeats: int,
) -> dict[str, list[Pass]]:
    """`repeats` passes of each; they take turns at each batch, so a slow minute falls on all."""
    passes: dict[str, list[Pass]] = {contender.name: [] for contender in contenders}
    for repeat in range(repeats):
        whole = {contender.name: Pass(0.0, 0, 0.0, Answers()) for contender in contenders}
        for first in range(0, len(prompts), batch):
            for contender in contenders:
                group = prompts[first : first + batch]
                whole[contender.name].add(measure(contender, group, max_tokens, quiet))
        for name, one in whole.items():
            passes[name].append(one)
            say(f"batch {batch}, pass {repeat + 1}: {name:40} {one.rate:7.2f} tokens/s")
    return passes


def select(
    contenders: list[Contender], prompts: list[Ids], batch: int, max_tokens: int, quiet: float
) -> tuple[list[Contender], list[dict[str, Any]]]:
    """Run each once; keep plain ones and, of each library's speculating ones, the quickest."""
    some = prompts[: max(batch, -(-len(prompts) // 2))]
    for contender in contenders:
        contender.run(some[:batch], min(8, max_tokens))  # first calls allocate
    passes = compare(contenders, some, batch, max_tokens, quiet, 1)
    best: dict[tuple[str, str, str], Contender] = {}
    for contender in contenders:
        key = (contender.library, contender.method, contender.dtype)
        if key not in best or passes[contender.name][0].rate > passes[best[key].name][0].rate:
            best[key] = contender
    log = [
        {"batch": batch, "contender": name, **found[0].as_dict()} for name, found in passes.items()
    ]
    return list(best.values()), log


def summarise(
    contenders: list[Contender],
    passes: dict[str, list[Pass]],
    batch: int,
    reference: list[Ids] | None,
) -> list[dict[str, Any]]:
    """One result per contender: rates, ratios inside each repeat, equality, acceptance."""
    names = {(c.library, c.method, c.dtype): c.name for c in contenders}
    hf_plain = passes[names["transformers", "plain", "float32"]]
    own_plain = next(
        passes[c.name] for c in contenders if (c.library, c.method) == ("specdec", "plain")
    )
    results = []
    for contender in contenders:
        own = passes[contender.name]

        def ratio(base: list[Pass], own: list[Pass] = own) -> dict[str, float]:
            return Spread.of(a.rate / b.rate for a, b in zip(own, base, strict=True)).as_dict()

        results.append(
            {
                "batch": batch,
                "contender": contender.name,
                "library": contender.library,
                "method": contender.method,
                "dtype": contender.dtype,
                "num_draft_tokens": contender.num_draft_tokens,
                "tokens_per_second": Spread.of(one.rate for one in own).as_dict(),
                "decode_tokens_per_second": Spread.of(one.decode_rate for one in own).as_dict(),
                "ratio_to_transformers_plain": ratio(hf_plain),
                "ratio_to_specdec_plain": ratio(own_plain),
                "equality": None
                if reference is None
                else equality(reference, [one.answers.token_ids for one in own]),
                "disturbance": round(max(one.disturbance for one in own), 3),
                "counts": own[0].answers.counts,
                "passes": [one.as_dict() for one in own],
            }
        )
    return results


def result_table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown: median (min-max) over the repeats."""

    def spread(values: dict[str, float]) -> str:
        return Spread(**values).text()

    rows = []
    for one in results:
        counts, equal = one["counts"], one["equality"]
        steps = counts.get("num_target_steps")
        rows.append(
            (
                str(one["batch"]),
                one["contender"],
                str(one["passes"][0]["num_tokens"]),
                spread(one["tokens_per_second"]),
                spread(one["decode_tokens_per_second"]),
                spread(one["ratio_to_transformers_plain"]),
                spread(one["ratio_to_specdec_plain"]),
                f"{counts['num_emitted_tokens'] / steps:.2f}" if steps else "-",
                f"{equal['num_equal']} of {equal['num_prompts']}" if equal else "-",
            )
        )
    columns = (
        "batch",
        "contender",
        "tokens",
        "tokens/s",
        "decode tokens/s",
        "x transformers plain",
        "x specdec plain",
        "tokens per target step",
        "same text",
    )
    return table(columns, rows)


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The whole benchmark, as the data that is saved."""
    result: dict[str, Any] = {"header": header(QUESTION, command, seeds=[])}
    source = resolve_source(args.target)
    engines = {
        proposer: LLM(
            args.target,
            None if proposer == "ngram" else args.draft,
            proposer=proposer,
            enable_prefix_caching=False,
            progress=False,
        )
        for proposer in (("draft_model", "hybrid", "ngram") if args.draft else ("ngram",))
    }
    llm = engines["ngram"]
    eos_ids = sorted(eos_token_ids(source, None, llm.tokenizer))
    prompts = read_prompts(args.prompts, args.num_prompts)
    encoded = [encode(llm, prompt.text) for prompt in prompts]
    contenders = [
        *transformers_contenders(
            source.path, eos_ids, args.lookup, args.temperature, bf16=args.bf16, draft=args.draft
        ),
        *specdec_contenders(engines, args.lookahead, args.temperature),
    ]
    result["settings"] = {
        "target": args.target,
        "draft": args.draft,
        "engines": {name: engine.description for name, engine in engines.items()},
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
        "temperature": args.temperature,
        "lookahead": args.lookahead,
        "lookup": args.lookup,
        "prompts": [
            {"kind": p.kind, "num_tokens": len(ids)}
            for p, ids in zip(prompts, encoded, strict=True)
        ],
    }
    result["selection"], result["results"] = [], []
    expected = None
    if args.temperature == 0:
        reference = contenders[0].run
        expected = [reference([ids], args.max_tokens).token_ids[0] for ids in encoded]
    for batch in args.batch:
        able = [c for c in contenders if c.max_batch is None or batch <= c.max_batch]
        work = (encoded, batch, args.max_tokens, args.quiet)
        chosen, log = select(able, *work)
        passes = compare(chosen, *work, args.repeats)
        result["selection"] += log
        result["results"] += summarise(chosen, passes, batch, expected)
    return result


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument(
        "--target", default="smollm2-135m", help="alias or folder (default: smollm2-135m)"
    )
    parser.add_argument(
        "--draft", help="draft model for the pair, made by specdec distill or other"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument(
        "--prompts", type=Path, help='.jsonl with "prompt" or "turns"; default: built in'
    )
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument(
        "--max-tokens", type=int, default=64, help="new tokens a prompt (default 64)"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--lookahead", type=int, nargs="+", default=[2, 3, 5, 7], help="K to try, this engine"
    )
    parser.add_argument(
        "--lookup", type=int, nargs="+", default=[3, 7], help="K to try, transformers"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--quiet",
        type=float,
        default=0.1,
        help="share of the processors left to others (default 0.1)",
    )
    parser.add_argument("--bf16", action="store_true", help="also transformers plain in bfloat16")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("--name", default="cpu_pair", help="name of the JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = parse(given)
    result = run(args, ["python", "benchmarks/cpu_pair.py", *given])
    path = save_json(args.out, args.name, result)
    print(header_text(result["header"]))
    print()
    print(result_table(result["results"]))
    say(f"\nsaved {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
