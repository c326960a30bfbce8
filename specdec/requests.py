"""RequestBuilder: checks a prompt and its parameters, and makes the request that the engine
serves.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from specdec.config import SamplingParams
from specdec.outputs import Request, Sample, TextStream, Tokenizer
from specdec.sequence import Sequence, end_ids_of

CONTEXT_TOKENS = 8  # prompt tokens that text decoding looks back at


class RequestBuilder:
    """Raises ValueError (what, got, limit, remedy) for anything that cannot be served."""

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: Collection[int],
        vocab_size: int,
        max_model_len: int,
        num_draft_tokens: int,
        greedy_only: bool = False,
    ) -> None:
        self._tokenizer: Tokenizer | None = tokenizer
        self._encode = None if tokenizer is None else tokenizer.encode
        self._eos_ids = frozenset(eos_ids)
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._num_draft_tokens = num_draft_tokens
        self._greedy_only = greedy_only
        self._counter = itertools.count()

    def build(
        self,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        request_id: str | None,
        prompt: str | None,
        taken: Collection[str],
    ) -> Request:
        """Check everything, then make one sequence per sample; sample j has seed + j."""
        self._check_prompt(prompt_token_ids, params)
        self._check_params(params)
        number = next(self._counter)
        if request_id is None:
            base = f"request-{number}"
            names = itertools.chain((base,), (f"{base}-{i}" for i in itertools.count(1)))
            request_id = next(name for name in names if name not in taken)
        if request_id in taken:
            raise ValueError(f"request_id {request_id!r} is being served already; use another")
        seed = secrets.randbits(64) if params.seed is None else params.seed
        bad_words = self._bad_words(params)
        samples = []
        for j in range(params.n):
            own = params if j == 0 else replace(params, prompt_logprobs=None)
            seq = Sequence(
                seq_id=number * 1024 + j,
                token_ids=list(prompt_token_ids),
                num_prompt_tokens=len(prompt_token_ids),
                params=own,
                seed=(seed + j) % 2**64,
                end_ids=end_ids_of(params, self._eos_ids),
                bad_words=bad_words,
            )
            samples.append(Sample(seq, self._text_stream(seq)))
        wants = params.prompt_logprobs is not None
        return Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            samples=samples,
            prompt_logprobs=[] if wants else None,
        )

    def _text_stream(self, seq: Sequence) -> TextStream:
        params = seq.params
        return TextStream(
            self._tokenizer,
            seq.token_ids[-CONTEXT_TOKENS:],
            params.stop,
            include_stop_text=params.include_stop_text,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _check_prompt(self, token_ids: Seq[int], params: SamplingParams) -> None:
        if len(token_ids) == 0:
            raise ValueError("the prompt is empty: at least one token is needed")
        for token in token_ids:
            if not isinstance(token, int) or not 0 <= token < self._vocab_size:
                raise ValueError(
                    f"prompt token {token!r} is not an id of the vocabulary of "
                    f"{self._vocab_size} tokens"
                )
        room = self._max_model_len - len(token_ids)
        if room < (0 if params.max_tokens == 0 else 1):
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, the context holds "
                f"{self._max_model_len} with the output; "
                f"shorten the prompt or raise max_model_len"
            )

    def _check_params(self, params: SamplingParams) -> None:
        if self._greedy_only and not params.greedy:
            raise ValueError(
                f"acceptance='greedy' serves temperature 0 only, got {params.temperature}; lower "
                f"the request's temperature, or build the engine with acceptance='rejection'"
            )
        asked = params.num_draft_tokens
        if asked is not None and asked > self._num_draft_tokens:
            raise ValueError(
                f"the request asks for num_draft_tokens {asked}, the engine was built for "
                f"{self._num_draft_tokens}; "
                f"raise the engine's num_draft_tokens or lower the request's"
            )
        ids = {
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids or (),
            "stop_token_ids": params.stop_token_ids,
        }
        for name, values in ids.items():
            self._check_ids(name, values)
        if params.stop and self._tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer, this engine has none; use stop_token_ids"
            )

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            if token >= self._vocab_size:
                raise ValueError(
                    f"{name} names token {token}, the vocabulary has {self._vocab_size} tokens"
                )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of the bad words; a text is banned at a line's start and behind a
        space.
        """
        words: list[tuple[int, ...]] = []
        for word in params.bad_words:
            if not isinstance(word, str):
                self._check_ids("bad_words", word)
                words.append(word)
                continue
            if self._encode is None:
                raise ValueError("bad_words given as text need a tokenizer; give token ids")
            for text in (word, " " + word.lstrip()):
                ids = tuple(self._encode(text, add_special_tokens=False))
                if ids and ids not in words:
                    words.append(ids)
        return tuple(words)
