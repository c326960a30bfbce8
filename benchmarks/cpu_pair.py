"""Does speculation pay on a CPU? One target, greedy: this engine at K = 0 and with n-gram drafts, beside transformers.

    python benchmarks/cpu_pair.py

Every contender sees the same prompts and stops at the same end tokens. First each runs once (this is the warm-up, and it
picks the best K of each library on the prompts of one batch, at least half of them); then plain decoding and the best K of
each library run `--repeats` times in turn, and ratios are taken inside one repeat. A second pass over the prompts that
emits one token each gives the prefill time, so "decode" is the rest. No prefix cache, since the repeats share prompts.
Texts are compared with transformers' plain fp32 run, token by token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    Spread,
    header,
    header_text,
    read_prompts,
    save_json,
    table,
    timed,
)
from transformers import AutoModelForCausalLM, GenerationConfig

from specdec import LLM, SamplingParams
from specdec.models.loading import eos_token_ids, resolve_source

QUESTION = "Greedy decoding on a CPU: plain, n-gram drafts, and transformers doing the same"
COUNTS = ("num_target_steps", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens")
Ids = list[int]


@dataclass(slots=True)
class Answers:
    """New tokens of each prompt, and the engine's counts where it keeps them."""

    token_ids: list[Ids] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, other: Answers) -> None:
        self.token_ids += other.token_ids
        for name, value in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + value


@dataclass(slots=True)
class Contender:
    """One way to decode. `run` gets the prompts of one batch and the number of new tokens."""

    library: str  # specdec | transformers
    method: str  # plain | ngram | prompt lookup
    dtype: str
    num_draft_tokens: int
    run: Callable[[list[Ids], int], Answers]
    max_batch: int | None = None

    @property
    def name(self) -> str:
        drafts = f" K={self.num_draft_tokens}" if self.num_draft_tokens else ""
        return f"{self.library} {self.method}{drafts} {self.dtype}"


@dataclass(slots=True)
class Pass:
    """One run of one contender over all prompts."""

    seconds: float
    num_tokens: int
    prefill_seconds: float
    answers: Answers

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        """Tokens behind the first of each prompt, by the time that prefill and first token do not take."""
        rest = self.num_tokens - len(self.answers.token_ids)
        return rest / max(self.seconds - self.prefill_seconds, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 4),
            "prefill_seconds": round(self.prefill_seconds, 4),
            "num_tokens": self.num_tokens,
        }


def specdec_contenders(llm: LLM, lookaheads: Sequence[int]) -> list[Contender]:
    """K = 0 and each lookahead, as settings of requests to one engine."""

    def runner(k: int) -> Callable[[list[Ids], int], Answers]:
        def run(prompts: list[Ids], max_tokens: int) -> Answers:
            params = SamplingParams(temperature=0, max_tokens=max_tokens, num_draft_tokens=k)
            outputs = llm.generate(prompts, params)
            for output in outputs:
                if output.error:
                    raise RuntimeError(output.error)
            samples = [output.outputs[0] for output in outputs]
            counts = {name: sum(s.stats[name] for s in samples) for name in COUNTS}
            return Answers([s.token_ids for s in samples], counts)

        return run

    dtype = llm.description["dtype"]
    plain = Contender("specdec", "plain", dtype, 0, runner(0))
    return [plain, *(Contender("specdec", "ngram", dtype, k, runner(k)) for k in lookaheads if k)]


def transformers_contenders(
    path: str, eos_ids: Sequence[int], lookaheads: Sequence[int], *, bf16: bool
) -> list[Contender]:
    """generate() plain in fp32 (the reference) and, if asked for, bf16; prompt lookup in fp32."""

    def runner(model: Any, k: int) -> Callable[[list[Ids], int], Answers]:
        def run(prompts: list[Ids], max_tokens: int) -> Answers:
            return Answers(hf_generate(model, prompts, max_tokens, eos_ids, k))

        return run

    found = []
    for dtype in (torch.float32, *((torch.bfloat16,) if bf16 else ())):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        name = str(dtype).removeprefix("torch.")
        found.append(Contender("transformers", "plain", name, 0, runner(model, 0)))
        if dtype is torch.float32:  # its prompt lookup serves one sequence at a time
            found += [
                Contender("transformers", "prompt lookup", name, k, runner(model, k), max_batch=1)
                for k in lookaheads
                if k
            ]
    return found


@torch.inference_mode()
def hf_generate(
    model: Any, prompts: list[Ids], max_tokens: int, eos_ids: Sequence[int], lookup: int
) -> list[Ids]:
    """New tokens of transformers' greedy generate, prompts padded on the left, cut behind the first end token."""
    width = max(len(prompt) for prompt in prompts)
    pad = eos_ids[0] if eos_ids else 0
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_tokens,
        pad_token_id=pad,
        eos_token_id=list(eos_ids) or None,
        prompt_lookup_num_tokens=lookup or None,
    )
    rows = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
    return [cut(row[:max_tokens], eos_ids) for row in rows]


def cut(token_ids: Ids, eos_ids: Sequence[int]) -> Ids:
    """The tokens up to and with the first end token."""
    for at, token in enumerate(token_ids):
        if token in eos_ids:
            return token_ids[: at + 1]
    return token_ids


def measure(contender: Contender, prompts: list[Ids], batch: int, max_tokens: int) -> Pass:
    """Time all prompts, batch after batch, then once more for the first token alone."""
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]

    def whole(num_tokens: int) -> Answers:
        answers = Answers()
        for group in groups:
            answers.add(contender.run(group, num_tokens))
        return answers

    seconds, answers = timed(lambda: whole(max_tokens))
    prefill_seconds, _ = timed(lambda: whole(1))
    return Pass(seconds, sum(len(ids) for ids in answers.token_ids), prefill_seconds, answers)


def select(
    contenders: list[Contender], prompts: list[Ids], batch: int, max_tokens: int
) -> tuple[list[Contender], list[dict[str, Any]]]:
    """Run each contender once and keep plain ones and, of each library's speculating ones, the quickest."""
    some = prompts[: max(batch, -(-len(prompts) // 2))]
    best: dict[tuple[str, str, str], tuple[float, Contender]] = {}
    log = []
    for contender in contenders:
        contender.run(some[:batch], min(8, max_tokens))  # first calls allocate
        once = measure(contender, some, batch, max_tokens)
        say(f"batch {batch}  once      {contender.name:40} {once.rate:7.2f} tokens/s")
        log.append({"batch": batch, "contender": contender.name, **once.as_dict()})
        key = (contender.library, contender.method, contender.dtype)
        if key not in best or once.rate > best[key][0]:
            best[key] = (once.rate, contender)
    return [contender for _, contender in best.values()], log


def compare(
    contenders: list[Contender], prompts: list[Ids], batch: int, max_tokens: int, repeats: int
) -> dict[str, list[Pass]]:
    """`repeats` passes of each contender, in turn, so that a slow minute falls on all."""
    passes: dict[str, list[Pass]] = {contender.name: [] for contender in contenders}
    for repeat in range(repeats):
        for contender in contenders:
            one = measure(contender, prompts, batch, max_tokens)
            passes[contender.name].append(one)
            say(f"batch {batch}  repeat {repeat + 1}  {contender.name:40} {one.rate:7.2f} tokens/s")
    return passes


def equality(reference: list[Ids], passes: Sequence[Pass]) -> dict[str, Any]:
    """In how many prompts all repeats gave the reference's tokens, and where the others first differ."""
    differences = []
    for number, expected in enumerate(reference):
        for one in passes:
            got = one.answers.token_ids[number]
            if got != expected:
                pairs = zip(got, expected, strict=False)
                same = next(
                    (i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected))
                )
                differences.append({"prompt": number, "first_difference": same})
                break
    return {
        "num_equal": len(reference) - len(differences),
        "num_prompts": len(reference),
        "differences": differences,
    }


def summarise(
    contenders: list[Contender], passes: dict[str, list[Pass]], batch: int, reference: list[Ids]
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
                "equality": equality(reference, own),
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
                f"{equal['num_equal']} of {equal['num_prompts']}",
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


def encode(llm: LLM, text: str) -> Ids:
    """A prompt as a chat turn, or raw where the model has no chat template."""
    if getattr(llm.tokenizer, "chat_template", None):
        return llm.chat_token_ids([{"role": "user", "content": text}])
    return llm.encode(text)


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The whole benchmark, as the data that is saved."""
    result: dict[str, Any] = {"header": header(QUESTION, command, seeds=[])}
    source = resolve_source(args.target)
    llm = LLM(
        args.target,
        num_draft_tokens=max(1, *args.lookahead),
        enable_prefix_caching=False,
        progress=False,
    )
    eos_ids = sorted(eos_token_ids(source, None, llm.tokenizer))
    prompts = read_prompts(args.prompts, args.num_prompts)
    encoded = [encode(llm, prompt.text) for prompt in prompts]
    contenders = [
        *transformers_contenders(source.path, eos_ids, args.lookup, bf16=args.bf16),
        *specdec_contenders(llm, args.lookahead),
    ]
    result["settings"] = {
        "target": args.target,
        "engine": llm.description,
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
        "temperature": 0,
        "lookahead": args.lookahead,
        "lookup": args.lookup,
        "prompts": [
            {"kind": p.kind, "num_tokens": len(ids)}
            for p, ids in zip(prompts, encoded, strict=True)
        ],
    }
    result["selection"], result["results"] = [], []
    reference = contenders[0].run
    expected = [reference([ids], args.max_tokens).token_ids[0] for ids in encoded]
    for batch in args.batch:
        able = [c for c in contenders if c.max_batch is None or batch <= c.max_batch]
        chosen, log = select(able, encoded, batch, args.max_tokens)
        passes = compare(chosen, encoded, batch, args.max_tokens, args.repeats)
        result["selection"] += log
        result["results"] += summarise(chosen, passes, batch, expected)
    return result


def say(text: str) -> None:
    """Progress, beside the table on stdout."""
    print(text, file=sys.stderr, flush=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument(
        "--target", default="smollm2-135m", help="alias or folder (default: smollm2-135m)"
    )
    parser.add_argument(
        "--prompts", type=Path, help='.jsonl with {"prompt"} or {"turns"}; default: built in'
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
