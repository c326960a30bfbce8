"""A draft must speak the target's token ids; padding and added tokens may differ."""

from __future__ import annotations

import pytest
from tiny_models import tiny_tokenizer

from specdec.models.vocabulary import check_vocabularies


class Vocab:
    def __init__(self, vocab: dict[str, int]) -> None:
        self._vocab = vocab

    def get_vocab(self) -> dict[str, int]:
        return dict(self._vocab)


def numbered(count: int, **changes: int) -> Vocab:
    return Vocab({f"t{i}": i for i in range(count)} | changes)


def test_a40_padded_differently() -> None:
    """100 against 104 ids, equal below 100."""
    check_vocabularies(numbered(100), numbered(100), 100, 104)
    check_vocabularies(numbered(100), numbered(100), 104, 100)
    check_vocabularies(numbered(104), numbered(100), 104, 100)


def test_a_prefix_works_both_ways() -> None:
    """A draft without the target's added tokens, and the other way round, with real tokenizers."""
    small, large = tiny_tokenizer(120), tiny_tokenizer(128)
    check_vocabularies(large, small, 128, 120)
    check_vocabularies(small, large, 120, 128)


def test_names_of_padding_ids_do_not_matter() -> None:
    """Above the smaller model's vocabulary nothing is compared."""
    check_vocabularies(numbered(100, a=100), numbered(100, b=100), 104, 100)


def test_the_first_differing_token_is_shown() -> None:
    draft = Vocab({"t0": 0, "t1": 1, "x": 2, "y": 3})
    with pytest.raises(
        ValueError, match=r"token 2 is 'x' in the draft and 't2' in the target"
    ) as e:
        check_vocabularies(numbered(4), draft, 4, 4)
    assert "use a draft with the target's tokenizer" in str(e.value)


def test_swapped_ids_of_the_same_tokens_are_refused() -> None:
    """The set of tokens is the same; only the map differs."""
    draft = Vocab({"t0": 0, "t2": 1, "t1": 2})
    with pytest.raises(ValueError, match="token 1 "):
        check_vocabularies(numbered(3), draft, 3, 3)


def test_real_tokenizers_of_two_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="different vocabularies"):
        check_vocabularies(tiny_tokenizer(128), tiny_tokenizer(300), 128, 300)


@pytest.mark.parametrize("target", [None, numbered(4)])
def test_without_tokenizers_nothing_is_compared(target: Vocab | None) -> None:
    check_vocabularies(target, None, 10, 20)
    check_vocabularies(None, target, 10, 20)
