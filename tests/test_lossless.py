"""compare_with_plain: finds nothing where there is nothing, and explains what it finds (case
A23).
"""

from __future__ import annotations

import pytest
from tiny_models import tiny_model

from specdec import LLM, SamplingParams
from specdec.lossless import compare_with_plain

PROMPTS = [[5, 6, 7], [9] * 20, list(range(30, 60))]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_model("qwen3", 0), tiny_model("qwen3", 1), progress=False, num_blocks=64)


def test_a23_float32_has_no_difference(llm: LLM) -> None:
    """A23: K + 1 rows against one row, float32: the same text. The run must really have drafted."""
    drafted = llm.stats()["num_draft_tokens"]
    found = compare_with_plain(llm, PROMPTS)
    assert found.differences == () and found.num_prompts == 3 and found.explained(0.0)
    assert llm.stats()["num_draft_tokens"] > drafted


def test_a23_a_difference_is_reported_with_its_margin(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control: a verifier that bends one token is caught, and no tolerance excuses it."""
    verifier = llm._driver.engine._step.verifier
    original = verifier.verify

    def bent(state, draft):  # type: ignore[no-untyped-def]
        verdict = original(state, draft)
        if draft.max_num_draft_tokens:
            verdict.token_ids[0, 0] = (verdict.token_ids[0, 0] + 1) % 128
        return verdict

    monkeypatch.setattr(verifier, "verify", bent)
    found = compare_with_plain(llm, PROMPTS[:1])
    (difference,) = found.differences
    assert difference.position == 0 and difference.margin > 0
    assert not found.explained(difference.margin / 2)


def test_sampling_texts_are_not_comparable(llm: LLM) -> None:
    with pytest.raises(ValueError, match="temperature is 1"):
        compare_with_plain(llm, PROMPTS, SamplingParams())
