"""End to end with the default target (fetched at first use): the text of plain transformers, token
for token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.cli import main
from specdec.lossless import compare_with_plain
from specdec.models.default_target import fetch_default_target
from specdec.models.linear import SAME_PRECISION

pytestmark = pytest.mark.e2e
NUM_TOKENS = 24
QUESTIONS = [
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "What is 17 + 25? Explain.",
    "List three uses of copper.",
    "Translate to French: good morning, my friend.",
    "Write a Python function that reverses a string.",
    "Summarise: The cat sat on the mat. Then the cat slept on the mat all day.",
    "Repeat this word four times: banana",
    "Name the planets in order from the sun.",
    "What is the capital of Portugal?",
    "Explain photosynthesis to a child.",
    "Give me a recipe for pancakes.",
    "Fix the spelling: teh quik brwon fox",
    "Write an SQL query that counts the rows of table users.",
    "Is 91 a prime number?",
    "Tell a joke about a penguin.",
    "Continue: Once upon a time there was",
    "What does HTTP status 404 mean?",
    "Count from 1 to 15.",
    "Who wrote Don Quixote?",
]


@pytest.fixture(scope="module")
def target() -> Any:
    from transformers import AutoModelForCausalLM

    folder = fetch_default_target()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(target: Any) -> dict[str, list[int]]:
    """Plain transformers generate, one prompt at a time."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetch_default_target())
    target.set_attn_implementation("sdpa")
    texts = {}
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            out = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                pad_token_id=2,
            )
        texts[question] = out[0, ids.shape[1] :].tolist()
    return texts


def settings() -> Iterator[tuple[str, int]]:
    yield from (("ngram", k) for k in range(9))
    yield from (("self", k) for k in (1, 4, 8))


def test_speculation_keeps_the_text_with_the_linears_that_auto_takes() -> None:
    """The default target as a user gets it. A difference is allowed at a tie only (A23)."""
    llm = LLM(num_draft_tokens=4, num_blocks=400, progress=False)
    assert llm.description["linears"] in SAME_PRECISION
    prompts = [llm.chat_token_ids([{"role": "user", "content": q}]) for q in QUESTIONS[:8]]
    found = compare_with_plain(llm, prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    assert found.explained(1e-3), found.differences
    assert len(found.differences) <= 1


@pytest.mark.parametrize(("proposer", "num_draft_tokens"), list(settings()))
def test_greedy_text_is_that_of_plain_transformers(
    proposer: str, num_draft_tokens: int, target: Any, expected: dict[str, list[int]]
) -> None:
    """20 real prompts in one batch, fp32: identical tokens whatever drafts."""
    from transformers import AutoTokenizer

    llm = LLM(
        target,
        target if proposer == "self" else None,
        tokenizer=AutoTokenizer.from_pretrained(fetch_default_target()),
        num_draft_tokens=num_draft_tokens,
        num_blocks=400,
        progress=False,
    )
    prompts = [llm.chat_token_ids([{"role": "user", "content": q}]) for q in QUESTIONS]
    outputs = llm.generate(prompts, temperature=0, max_tokens=NUM_TOKENS)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        assert output.token_ids == expected[question], question
    stats = llm.stats()
    if proposer == "self":
        assert stats["acceptance_rate"] > 0.99
    elif num_draft_tokens:
        assert stats["num_accepted_tokens"] > 0


def test_logits_of_the_default_target_equal_the_plain_model(target: Any) -> None:
    from specdec.attention.reference import ReferenceBackend
    from specdec.batch import ForwardBatch
    from specdec.config import SamplingParams
    from specdec.models.paged_model import ATTENTION_NAME, TransformersModel
    from specdec.sequence import Sequence, Span

    ids = list(range(1000, 1100))
    target.set_attn_implementation("sdpa")
    with torch.inference_mode():
        want = target(torch.tensor([ids])).logits[0]
    target.set_attn_implementation(ATTENTION_NAME)
    model = TransformersModel(target, ReferenceBackend())
    model.attach(16, 16)
    seq = Sequence(0, ids, 100, SamplingParams(), block_table=[7, 3, 9, 1, 12, 0, 5])
    parts = []
    for start, length in ((0, 33), (33, 60), (93, 7)):
        batch = ForwardBatch.ragged(
            [Span(seq, start, length)], 16, 16, torch.device("cpu"), range(length)
        )
        parts.append(model.forward(batch))
    assert (torch.cat(parts) - want).abs().max() < 1e-4


def test_the_command_line_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "What is the capital of France?", "--max-tokens", "24"]) == 0
    captured = capsys.readouterr()
    assert "Paris" in captured.out
    assert "mean accepted length" in captured.err
