"""Compare speculative with plain decoding on the same engine, and explain each difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec.config import SamplingParams
from specdec.llm import LLM, Prompt
from specdec.lookahead import SEEDED_LOOKAHEAD


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a greedy text first departs from plain decoding's."""

    prompt_index: int
    position: int  # of the output token, 0-based
    plain_token_id: int | None  # None: the plain text ended here
    speculative_token_id: int | None
    margin: float  # target's log-probability of its best token less that of the second best


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of compare_with_plain."""

    num_prompts: int
    num_tokens: int  # emitted by plain decoding
    differences: tuple[Difference, ...]

    def explained(self, tolerance: float) -> bool:
        """Whether every difference starts at a tie: the top-two margin is below `tolerance`.

        In float32, or with kernels whose rows do not depend on the number of rows, there is none to
        explain. In float16 and bfloat16 a verification of K + 1 rows rounds unlike K + 1 forwards
        of one row, and near-ties can fall the other way; both texts are then the target's.
        """
        return all(difference.margin < tolerance for difference in self.differences)


def compare_with_plain(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams | None = None
) -> Comparison:
    """Decode greedily twice, with and without speculation, and report every first difference.

    Raises ValueError for parameters that sample: under `rejection` the law is the same, the text of
    a seed is not. Raises RuntimeError if a request failed.
    """
    params = params or SamplingParams(temperature=0)
    if not params.greedy:
        raise ValueError(f"temperature is {params.temperature}, texts are comparable only at 0")
    lookahead = params.num_draft_tokens
    if lookahead is None and llm.config.num_draft_tokens is None:
        lookahead = SEEDED_LOOKAHEAD  # a K chosen by cost may be 0
    plain = llm.generate(list(prompts), replace(params, num_draft_tokens=0, logprobs=2))
    speculative = llm.generate(
        list(prompts), replace(params, num_draft_tokens=lookahead, logprobs=None)
    )
    differences = []
    for i, (one, other) in enumerate(zip(plain, speculative, strict=True)):
        if one.error or other.error:
            raise RuntimeError(f"prompt {i} failed, nothing to compare: {one.error or other.error}")
        ours, theirs = one.token_ids, other.token_ids
        if ours == theirs:
            continue
        shorter = min(len(ours), len(theirs))
        at = next((j for j in range(shorter) if ours[j] != theirs[j]), shorter)
        entries = one.outputs[0].logprobs or []
        best = list(entries[at].top.values()) if at < len(entries) else [0.0, float("-inf")]
        differences.append(
            Difference(
                prompt_index=i,
                position=at,
                plain_token_id=ours[at] if at < len(ours) else None,
                speculative_token_id=theirs[at] if at < len(theirs) else None,
                margin=best[0] - best[1],
            )
        )
    return Comparison(len(plain), sum(len(o.token_ids) for o in plain), tuple(differences))
