"""Whether a draft speaks the target's token ids."""

from __future__ import annotations

from typing import Any


def check_vocabularies(
    target_tokenizer: Any, draft_tokenizer: Any, target_vocab_size: int, draft_vocab_size: int
) -> None:
    """Raise ValueError, showing the first differing token, unless both tokenizers map ids alike.

    One may have more ids than the other (padding, added tokens): those have q = 0 and come from the
    target alone. Without tokenizers (dummy weights) ids are taken to agree.
    """
    if target_tokenizer is None or draft_tokenizer is None:
        return
    target = {i: token for token, i in target_tokenizer.get_vocab().items()}
    draft = {i: token for token, i in draft_tokenizer.get_vocab().items()}
    limit = min(target_vocab_size, draft_vocab_size)
    for i in sorted(target.keys() & draft.keys()):
        if i >= limit:
            break
        if target[i] != draft[i]:
            raise ValueError(
                f"draft and target have different vocabularies: token {i} is {draft[i]!r} in "
                f"the draft and {target[i]!r} "
                f"in the target; use a draft with the target's tokenizer"
            )
