"""The ways to decode that cpu_pair compares: this engine's and transformers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from common import Ids, transformers_generate
from transformers import AutoModelForCausalLM

from specdec import LLM, SamplingParams
from specdec.models.loading import resolve_source
from specdec.models.shared_draft import is_shared, load_shared_draft

COUNTS = ("num_target_steps", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens")


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
    method: str  # plain | ngram | draft_model | hybrid | prompt lookup | assisted, or "... auto"
    dtype: str  # of the weights
    num_draft_tokens: int | None  # None: the engine chooses
    run: Callable[[list[Ids], int], Answers]
    max_batch: int | None = None

    @property
    def name(self) -> str:
        drafts = (
            f" K={self.num_draft_tokens}" if self.num_draft_tokens else ""
        )  # in the method if auto
        return f"{self.library} {self.method}{drafts} {self.dtype}"


def specdec_contenders(
    engines: dict[str, LLM], lookaheads: Sequence[int], temperature: float
) -> list[Contender]:
    """K = 0, and each proposer with each lookahead and the engine's own choice, as settings of
    requests.
    """

    def runner(llm: LLM, k: int | None) -> Callable[[list[Ids], int], Answers]:
        def run(prompts: list[Ids], max_tokens: int) -> Answers:
            params = SamplingParams(
                temperature=temperature, max_tokens=max_tokens, num_draft_tokens=k
            )
            outputs = llm.generate(prompts, params)
            for output in outputs:
                if output.error:
                    raise RuntimeError(output.error)
            samples = [output.outputs[0] for output in outputs]
            counts = {name: sum(s.stats[name] for s in samples) for name in COUNTS}
            return Answers([s.token_ids for s in samples], counts)

        return run

    found = []
    for proposer, llm in engines.items():
        kept_as = llm.description["linears"]
        if not found:
            found.append(Contender("specdec", "plain", kept_as, 0, runner(llm, 0)))
        found += [
            Contender("specdec", proposer, kept_as, k, runner(llm, k)) for k in lookaheads if k
        ]
        found.append(Contender("specdec", f"{proposer} auto", kept_as, None, runner(llm, None)))
    return found


def transformers_contenders(
    path: str,
    eos_ids: Sequence[int],
    lookaheads: Sequence[int],
    temperature: float,
    *,
    bf16: bool,
    draft: str | None,
) -> list[Contender]:
    """generate() plain in fp32 (the reference) and, if asked for, bf16; prompt lookup and assisted
    generation in fp32.
    """

    def runner(model: Any, **drafting: Any) -> Callable[[list[Ids], int], Answers]:
        def run(prompts: list[Ids], max_tokens: int) -> Answers:
            return Answers(
                transformers_generate(model, prompts, max_tokens, eos_ids, temperature, **drafting)
            )

        return run

    found = []
    for dtype in (torch.float32, *((torch.bfloat16,) if bf16 else ())):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        name = str(dtype).removeprefix("torch.")
        found.append(Contender("transformers", "plain", name, 0, runner(model)))
        if dtype is not torch.float32:
            continue
        assistant = None if draft is None else assistant_of(model, draft)
        for k in filter(None, lookaheads):  # both serve one sequence at a time
            lookup = runner(model, lookup=k)
            found.append(Contender("transformers", "prompt lookup", name, k, lookup, max_batch=1))
            if assistant is not None:
                assisted = runner(model, assistant=assistant, lookahead=k)
                found.append(Contender("transformers", "assisted", name, k, assisted, max_batch=1))
    return found


def assistant_of(model: Any, draft: str) -> Any:
    """The draft for transformers' assisted generation, with a whole head."""
    source = resolve_source(draft)
    if is_shared(source.config):
        found = load_shared_draft(source, model, cut_head=False)
        found.set_attn_implementation(model.config._attn_implementation)
        return found
    return AutoModelForCausalLM.from_pretrained(source.path, dtype=model.dtype).eval()
