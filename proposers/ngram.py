"""NgramProposer: prompt lookup. The text so far is the draft model (Saxena 2023,
prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specdec.decode_state import DecodeState
from specdec.proposers.base import Draft, Proposer
from specdec.sequence import Sequence


class NgramIndex:
    """Where each n-gram of a growing token list ended last, and the time before that.

    Feeding a token costs O(max_n); a lookup as much. The latest match wins: recent text resembles
    what follows most.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)  # longest first
        self._ends: dict[
            tuple[int, ...], int
        ] = {}  # n-gram -> position behind its latest occurrence
        self._previous: dict[tuple[int, ...], int] = {}  # ... behind the occurrence before that
        self._num_fed = 0

    def feed(self, token_ids: Seq[int]) -> None:
        """Index the tokens that were appended since the last call."""
        for end in range(self._num_fed + 1, len(token_ids) + 1):
            for n in self._sizes:
                if n <= end:
                    gram = tuple(token_ids[end - n : end])
                    if gram in self._ends:
                        self._previous[gram] = self._ends[gram]
                    self._ends[gram] = end
        self._num_fed = len(token_ids)

    def propose(self, token_ids: Seq[int], count: int) -> list[int]:
        """Up to `count` tokens that followed an earlier occurrence of the longest matching suffix.

        A match that reaches the end of the text goes on with its own draft (a text that repeats
        keeps repeating).
        """
        for n in self._sizes:
            start = self._previous.get(tuple(token_ids[-n:])) if n <= len(token_ids) else None
            if start is None:
                continue
            draft: list[int] = []
            for i in range(start, start + count):
                draft.append(token_ids[i] if i < len(token_ids) else draft[i - len(token_ids)])
            return draft
        return []


class NgramProposer(Proposer):
    """Drafts the continuation of the latest earlier match of the last max_n .. min_n tokens; q is
    one-hot.
    """

    name = "ngram"
    placement = "host"

    def __init__(self, min_n: int = 2, max_n: int = 4) -> None:
        self._min_n = min_n
        self._max_n = max_n
        self._indices: dict[int, NgramIndex] = {}  # by seq_id

    def propose(self, state: DecodeState) -> Draft:
        return Draft.from_lists(self.find(state), state.device)

    def find(self, state: DecodeState) -> list[list[int]]:
        """The drafts of each row; none where nothing matches."""
        rows = zip(state.seqs, state.num_draft_tokens, strict=True)
        return [self._draft(seq, count) if count else [] for seq, count in rows]

    def forget(self, seq: Sequence) -> None:
        self._indices.pop(seq.seq_id, None)

    def _draft(self, seq: Sequence, count: int) -> list[int]:
        index = self._indices.setdefault(seq.seq_id, NgramIndex(self._min_n, self._max_n))
        index.feed(seq.token_ids)
        return index.propose(seq.token_ids, count)
